"""Where a directory has a training state of ours, which goes before those of other libraries beside it."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from pathlib import Path

from zerostart.checkpoint.formats.training import stock_time
from zerostart.checkpoint.manifest import STATE_MARKER as MARKER
from zerostart.checkpoint.manifest import is_state, saved_at
from zerostart.checkpoint.storage.files import read_small
from zerostart.checkpoint.strict_json import MAX_DOCUMENT_BYTES, read_json
from zerostart.errors import ZerostartError

logger = logging.getLogger("zerostart")

#: The name of DeepSpeed's file that names its last checkpoint.
LATEST = "latest"
#: accelerate's names of a model's checkpoint, on DeepSpeed and on FSDP2.
DEEPSPEED, FSDP = "pytorch_model", "pytorch_model_fsdp"
#: Directories of which somebody was told that they hold a newer checkpoint of another library.
_told: set[tuple[Path, Path]] = set()


def state_in(directory: str | os.PathLike[str], number: int = 0, tag: str | None = None) -> Path | None:
    """The training state of ours in ``directory``: itself, or that of model ``number`` of accelerate's.

    The newest one of ours, whatever other libraries have left beside it; None where there is none. ``tag`` is
    DeepSpeed's name for one of several, and then that one alone is meant.
    """
    folder = Path(directory)
    own = f"{DEEPSPEED}_{number}" if number else DEEPSPEED
    names = [own, f"{FSDP}_{number}"] if tag in (None, own) else [str(tag)]
    latest = folder / LATEST
    if not number and tag is None:
        names.append(".")
        if latest.is_file():
            named = read_small(str(latest)).decode("utf-8", "replace").strip()
            names += [named] if is_tag(named) else []
    found = [folder / name for name in names if is_state(folder / name)]
    return max(found, key=_saved_at) if len(found) > 1 else next(iter(found), None)


def _saved_at(state: Path) -> int:
    marker, document = state / MARKER, dict[str, object]()
    with contextlib.suppress(ZerostartError):  # a damaged one does not say
        document = read_json(marker, "training state", MAX_DOCUMENT_BYTES)
    return saved_at(document, marker)


def tell_of_newer(directory: Path, own: Path) -> None:
    """Warn, once, where ``directory`` has a checkpoint of another library that is newer than our ``own``."""
    try:
        stock = stock_time(directory)
        saved = (own / MARKER).stat().st_mtime
    except (ZerostartError, OSError):
        return  # nobody has asked for it
    if stock is None or stock[1] <= saved or (stock[0], own) in _told:
        return
    _told.add((stock[0], own))
    logger.warning(
        "%s is taken, which zerostart saved at %s; %s has a checkpoint of another library of %s: to take "
        "that one, name its own folder, or remove %s",
        own,
        _clock(saved),
        stock[0],
        _clock(stock[1]),
        own / MARKER,
    )


def _clock(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def is_tag(name: str) -> bool:
    """Whether ``name`` is one of a folder beside the file that names it."""
    return name not in ("", ".", "..") and "/" not in name and "\\" not in name and "\0" not in name
