"""Where the training state is in a directory that accelerate, the Trainer or DeepSpeed's engine has made."""

from __future__ import annotations

import os
from pathlib import Path

from zerostart.checkpoint.storage.files import read_small
from zerostart.state.training_state import MARKER

__all__ = ["DEEPSPEED", "FSDP", "LATEST", "is_tag", "state_in"]

#: The name of DeepSpeed's file that names its last checkpoint.
LATEST = "latest"
#: accelerate's names of a model's checkpoint, on DeepSpeed and on FSDP2.
DEEPSPEED, FSDP = "pytorch_model", "pytorch_model_fsdp"


def state_in(directory: str | os.PathLike[str], number: int = 0, tag: str | None = None) -> Path | None:
    """The training state of model ``number`` in a checkpoint of accelerate or the Trainer, of either engine.

    The newest one; None where zerostart has written none. ``tag`` is DeepSpeed's name for one of several.
    """
    folder = Path(directory)
    own = f"{DEEPSPEED}_{number}" if number else DEEPSPEED
    names = [own, f"{FSDP}_{number}"] if tag in (None, own) else [str(tag)]
    latest = folder / LATEST
    if not number and tag is None and latest.is_file():
        named = read_small(str(latest)).decode("utf-8", "replace").strip()
        names += [named] if is_tag(named) else []
    markers = [folder / name / MARKER for name in names]
    found = [marker for marker in markers if marker.is_file()]
    return max(found, key=lambda marker: marker.stat().st_mtime_ns).parent if found else None


def is_tag(name: str) -> bool:
    """Whether ``name`` is one of a folder beside the file that names it."""
    return name not in ("", ".", "..") and "/" not in name and "\\" not in name and "\0" not in name
