"""A saved model to the hub, with a card that says what it was trained from."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from zerostart.checkpoint.manifest import HIDDEN, MARKER, documents
from zerostart.checkpoint.strict_json import read_json
from zerostart.checkpoint.usual_names import PIPELINE_INDEX
from zerostart.distributed.world import World
from zerostart.errors import ConfigError, WriteError

if TYPE_CHECKING:
    from huggingface_hub import ModelCard

CARD = "README.md"
#: How the hub's cache names the directory of a snapshot.
_SNAPSHOT = re.compile(r"models--(?P<id>[^/]+)/snapshots/(?P<commit>[0-9a-f]{40})(/|$)")


def push(
    path: str | os.PathLike[str], repo_id: str, root: str, facts: Mapping[str, object], world: World
) -> str:
    """Upload what was saved in ``path`` to ``repo_id`` of the hub, made if need be; gives its address.

    What else lies there stays here: it may be anybody's, and a secret.

    Collective: rank 0 does it. A card is written into ``path`` unless one is there: from what was trained
    (``root``, the directory or the snapshot that it was loaded from), and ``facts`` by name. Raises
    WriteError on every rank where the hub does not take it; the directory then stays as it is saved.
    """

    def upload() -> str:
        from huggingface_hub import HfApi

        card = Path(path) / CARD
        if not card.exists():
            model_card(Path(path), root, facts).save(card)
        api = HfApi()
        try:
            made = api.create_repo(repo_id, exist_ok=True)
            api.upload_folder(
                repo_id=made.repo_id,
                folder_path=path,
                allow_patterns=saved_files(Path(path)),
                ignore_patterns=[f"{HIDDEN}/*", f"*/{HIDDEN}/*"],
            )
        except Exception as error:  # the hub's own, a network's, and mistakes in the name
            raise WriteError(
                f"{os.fspath(path)} is saved, but not pushed to {repo_id}: {_reason(error)}; log in with "
                f"hf auth login, and push it with hf upload {repo_id} {os.fspath(path)} (all that lies there)"
            ) from error
        return str(made)

    return world.broadcast_object(upload, f"pushing to {repo_id}")


def saved_files(path: Path) -> list[str]:
    """The files that saves have written into ``path``, and its card, as patterns of the hub's client.

    Of a whole pipeline the folders that its index names.
    """
    names = {name for document in documents(path) for name in document["files"]}
    patterns = [glob.escape(name) for name in sorted({*names, MARKER, CARD})]
    if (path / PIPELINE_INDEX).is_file():
        index = read_json(path / PIPELINE_INDEX, "index of a pipeline")
        folders = [name for name, described in index.items() if isinstance(described, list)]
        patterns += [PIPELINE_INDEX, *(f"{glob.escape(name)}/*" for name in folders)]
    return patterns


def check_repository(repo_id: str) -> None:
    """Make the repository ``repo_id``, unless it is there: a mistake is told before a run and not after.

    Raises ConfigError where the hub does not let this user write there.
    """
    from huggingface_hub import HfApi

    try:
        HfApi().create_repo(repo_id, exist_ok=True)
    except Exception as error:  # as above
        raise ConfigError(
            f"output.push_to_hub: {repo_id} cannot be written to ({_reason(error)}); log in with hf auth "
            "login, look for a mistake in the name, or leave it out"
        ) from error


def _reason(error: Exception) -> str:
    """The text of an error on one line."""
    return " ".join(str(error).split()).rstrip(".") or type(error).__name__


def model_card(path: Path, root: str, facts: Mapping[str, object]) -> ModelCard:
    """The card of the model in ``path``, trained from what lies in ``root``; ``facts`` are a table in it."""
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
    if facts:
        lines += ["", "| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in facts.items())]
    version = importlib.metadata.version("zerostart")
    lines += ["", f"Saved with [zerostart](https://github.com/zerostart/zerostart) {version}.", ""]
    return ModelCard(f"---\n{data.to_yaml()}\n---\n\n" + "\n".join(lines))


def _origin(base: str | None, commit: str, root: str) -> str:
    if base is not None:
        return f"Trained from [{base}](https://huggingface.co/{base}), revision `{commit}`."
    # Without the path, which is of this machine alone.
    return f"Trained from the checkpoint `{Path(root).name}`." if root else "Trained from scratch."
