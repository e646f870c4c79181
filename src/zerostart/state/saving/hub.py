"""A saved model to the hub, with a card that says what it was trained from."""

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
#: How the hub's cache names the directory of a snapshot.
_SNAPSHOT = re.compile(r"models--(?P<id>[^/]+)/snapshots/(?P<commit>[0-9a-f]{40})(/|$)")


def push(
    path: str | os.PathLike[str],
    repo_id: str,
    root: str,
    world: World,
    private: bool | None = None,
) -> str:
    """Upload what saves have written into ``path`` to the hub, and return its address; collective.

    Other files in ``path`` stay here. Rank 0 uploads, and writes a card first unless there is one: from what
    was trained (``root``, the directory or snapshot that it was loaded from). Raises
    WriteError on every rank if the hub refuses; the directory stays as it is.
    """

    def upload() -> str:
        from huggingface_hub import HfApi

        card = Path(path) / CARD
        if not card.exists():
            model_card(Path(path), root).save(card)
        patterns = saved_files(Path(path))
        try:
            made = made_repository(repo_id, private)
            HfApi().upload_folder(
                repo_id=made.repo_id,
                folder_path=path,
                allow_patterns=patterns,
                ignore_patterns=[f"{HIDDEN}/*", f"*/{HIDDEN}/*"],
            )
        except Exception as error:  # the hub's own, a network's, and mistakes in the name
            raise WriteError(
                f"{os.fspath(path)} is saved, but not pushed to {repo_id}: {_reason(error)}; log in with hf "
                "auth login, and upload it with hf upload"
            ) from None  # the hub's error may repeat the request
        return str(made)

    return world.broadcast_slow(upload, f"pushing to {repo_id}")


def made_repository(repo_id: str, private: bool | None) -> RepoUrl:
    """Make the repository unless it exists. Raises WriteError if it should be private and is public."""
    from huggingface_hub import HfApi

    api = HfApi()
    made = api.create_repo(repo_id, private=private, exist_ok=True)
    if private and not api.repo_info(made.repo_id).private:
        raise WriteError(
            f"{made.repo_id} is there and public; make it private on the hub, or name another repository"
        )
    return made


def saved_files(path: Path) -> list[str]:
    """Return patterns of the files that saves have written into ``path``, and of its card."""
    names = {name for document in documents(path) for name in document["files"]}
    patterns = [glob.escape(name) for name in sorted({*names, MARKER, CARD})]
    if (path / PIPELINE_INDEX).is_file():
        index = read_json(path / PIPELINE_INDEX, "index of a pipeline")
        folders = [name for name, described in index.items() if isinstance(described, list)]
        patterns += [PIPELINE_INDEX, *(f"{glob.escape(name)}/*" for name in folders)]
    return patterns


def _reason(error: Exception) -> str:
    """The text of an error on one line."""
    return " ".join(str(error).split()).rstrip(".") or type(error).__name__


def model_card(path: Path, root: str) -> ModelCard:
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
    lines = ["# " + path.resolve().name, "", _origin(base, source["commit"] if source else "", root)]
    version = importlib.metadata.version("zerostart")
    lines += ["", f"Saved with zerostart {version}.", ""]
    return ModelCard(f"---\n{data.to_yaml()}\n---\n\n" + "\n".join(lines))


def _origin(base: str | None, commit: str, root: str) -> str:
    if base is not None:
        return f"Trained from [{base}](https://huggingface.co/{base}), revision `{commit}`."
    # Without the path, which is of this machine alone.
    return f"Trained from the checkpoint `{Path(root).name}`." if root else "Trained from scratch."
