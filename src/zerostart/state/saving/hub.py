"""Upload a saved model to the hub, with a model card."""

from __future__ import annotations

import glob
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from zerostart.checkpoint.manifest import HIDDEN, MARKER, documents
from zerostart.checkpoint.strict_json import read_json
from zerostart.checkpoint.usual_names import PIPELINE_INDEX
from zerostart.distributed.world import World
from zerostart.errors import WriteError

if TYPE_CHECKING:
    from huggingface_hub import ModelCard, RepoUrl

CARD = "README.md"
#: Path of a snapshot in the hub's cache.
_SNAPSHOT = re.compile(r"models--(?P<id>[^/]+)/snapshots/(?P<commit>[0-9a-f]{40})(/|$)")


def push(
    path: str | os.PathLike[str],
    repo_id: str,
    root: str,
    world: World,
    private: bool | None = None,
) -> str:
    """Upload the saved files in ``path`` to the hub, and return their address; collective.

    Other files in ``path`` are not uploaded. Rank 0 writes a model card unless there is one; it names the
    source ``root``, a directory or a snapshot of the hub. Raises WriteError on every rank if the upload
    fails; the directory is then unchanged.
    """

    def upload() -> str:
        from huggingface_hub import HfApi

        card = Path(path) / CARD
        if not card.exists():
            build_model_card(Path(path), root).save(card)
        patterns = list_saved_files(Path(path))
        try:
            repository = create_repository(repo_id, private)
            HfApi().upload_folder(
                repo_id=repository.repo_id,
                folder_path=path,
                allow_patterns=patterns,
                ignore_patterns=[f"{HIDDEN}/*", f"*/{HIDDEN}/*"],
            )
        except Exception as error:  # of the hub, the network, or the name
            reason = " ".join(str(error).split()).rstrip(".") or type(error).__name__
            raise WriteError(
                f"{os.fspath(path)} is saved, but not pushed to {repo_id}: {reason}; log in with hf "
                "auth login, and upload it with hf upload"
            ) from None  # the hub's error may repeat the request
        return str(repository)

    return world.broadcast_slow(upload, f"pushing to {repo_id}")


def create_repository(repo_id: str, private: bool | None) -> RepoUrl:
    """Create the repository unless it exists.

    Raises WriteError for an existing public repository if ``private``.
    """
    from huggingface_hub import HfApi

    api = HfApi()
    repository = api.create_repo(repo_id, private=private, exist_ok=True)
    if private and not api.repo_info(repository.repo_id).private:
        raise WriteError(
            f"{repository.repo_id} exists and is public; make it private on the hub, or name "
            "another repository"
        )
    return repository


def list_saved_files(path: Path) -> list[str]:
    """Return patterns of the saved files in ``path`` and its card."""
    names = {name for document in documents(path) for name in document["files"]}
    patterns = [glob.escape(name) for name in sorted({*names, MARKER, CARD})]
    if (path / PIPELINE_INDEX).is_file():
        index = read_json(path / PIPELINE_INDEX, "index of a pipeline")
        folders = [name for name, described in index.items() if isinstance(described, list)]
        patterns += [PIPELINE_INDEX, *(f"{glob.escape(name)}/*" for name in folders)]
    return patterns


def build_model_card(path: Path, root: str) -> ModelCard:
    """Return the card of the model in ``path``, trained from ``root``."""
    import importlib.metadata

    from huggingface_hub import ModelCard, ModelCardData

    source = _SNAPSHOT.search(Path(root).as_posix())
    base = None if source is None else source["id"].replace("--", "/")
    adapter = (path / "adapter_config.json").is_file() or (
        path / "pytorch_lora_weights.safetensors"
    ).is_file()
    library = "transformers"
    if (path / PIPELINE_INDEX).is_file() or (path / "pytorch_lora_weights.safetensors").is_file():
        library = "diffusers"
    elif adapter:
        library = "peft"
    data = ModelCardData(
        base_model=base,
        base_model_relation=("adapter" if adapter else "finetune") if base else None,
        library_name=library,
        tags=["zerostart"],
    )
    lines = ["# " + path.resolve().name, "", _describe_origin(base, source["commit"] if source else "", root)]
    version = importlib.metadata.version("zerostart")
    lines += ["", f"Saved with zerostart {version}.", ""]
    return ModelCard(f"---\n{data.to_yaml()}\n---\n\n" + "\n".join(lines))


def _describe_origin(base: str | None, commit: str, root: str) -> str:
    if base is not None:
        return f"Trained from [{base}](https://huggingface.co/{base}), revision `{commit}`."
    # Only the name: the path has a meaning only on this machine.
    return f"Trained from the checkpoint `{Path(root).name}`." if root else "Trained from scratch."
