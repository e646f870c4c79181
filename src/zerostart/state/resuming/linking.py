"""Files that a save has just written, given a second name in the place of writing their tensors once more."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from pathlib import Path

from zerostart.checkpoint.manifest import INDEX, documents
from zerostart.checkpoint.strict_json import JsonObject, read_json
from zerostart.checkpoint.verifying import verify
from zerostart.checkpoint.write.folders import NO_LINKS
from zerostart.distributed.world import World
from zerostart.errors import VerifyError
from zerostart.state.comparing.digest import digests_of
from zerostart.state.saving.writing import Entry, Outgoing

_WEIGHTS = ".safetensors"


def linked(
    saved: Path | None, folder: Path, entries: list[Entry], outgoing: list[Outgoing], world: World
) -> Mapping[str, str] | None:
    """The digests of ``entries`` if the files that ``save`` wrote in ``saved`` hold just these, now linked.

    Collective. ``folder`` is made then, with hard links of those files: the bytes are on the disk once, and
    either directory can be removed, moved, copied or saved anew without the other. (What is written into a
    file in place is in both: ``check_unchanged``.) None, and nothing is made, where the files hold other
    tensors or other bits than the ranks do now, or the file system has no such links. Raises OSError.
    """
    if saved is None:
        return None
    names = {name for name, _, _ in entries}
    known, files = world.broadcast_object(lambda: _known(saved, names), "looking at the files that are saved")
    if not known:
        return None
    with world.phase("comparing the model with the files that are saved"):
        found = digests_of((item.shard for item in outgoing), world)
    # By what the ranks hold now and not by names alone: a step may have been made since that save.
    if found != known:
        return None
    made = world.broadcast_object(lambda: _link(saved, folder, files), "linking the files that are saved")
    return found if made else None


def check_unchanged(path: Path, folder: str, saved_at: object) -> None:
    """Verify the checkpoint ``path`` if a file in its ``folder`` with two names changed after ``saved_at``.

    Somebody may have edited the saved model in place. ``saved_at`` is in nanoseconds; nothing is asked of a
    checkpoint that does not tell it, and what is not there is told by who reads it. Raises VerifyError.
    """
    if type(saved_at) is not int:
        return
    try:
        files = [entry.stat() for entry in (path / folder).iterdir()]
    except OSError:
        return
    if any(file.st_nlink > 1 and file.st_mtime_ns > saved_at for file in files):
        verify(path)


def _known(saved: Path, names: set[str]) -> tuple[dict[str, str], list[tuple[str, str]]]:
    """Digests of the tensors ``names`` in ``saved``, and its files: the names that they have, and usual ones.

    Both are empty where no save has written just these there, as they are.
    """
    found: list[JsonObject] = []
    with contextlib.suppress(VerifyError):
        found = documents(saved)
    for document in found:
        files = {
            name: one
            for name, one in document["files"].items()
            if "/" not in name and name.endswith((_WEIGHTS, _WEIGHTS + INDEX))
        }
        whole = all(_size(saved / name) == one["bytes"] for name, one in files.items())
        if whole and (digests := document.get("digests", {}).get(".", {})).keys() == names:
            # A mark in a name is no part of the usual one, which is a name alone.
            return digests, [(name, Path(str(one.get("name", name))).name) for name, one in files.items()]
    return {}, []


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else -1


def _link(saved: Path, folder: Path, files: list[tuple[str, str]]) -> bool:
    folder.mkdir()
    usual = dict(files)
    try:
        for name, own in files:
            # The index names the files by the names that they have there: written anew where these change.
            if name.endswith(INDEX) and any(own != n for n, own in files):
                index = read_json(saved / name, "index")
                index["weight_map"] = {n: usual[file] for n, file in index["weight_map"].items()}
                text = json.dumps(index, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
                (folder / own).write_text(text, encoding="utf-8")
            else:
                os.link(saved / name, folder / own)
    except OSError as error:
        if error.errno not in NO_LINKS:
            raise
        for _, own in files:
            # None or all: half a folder of links would pass for a model.
            (folder / own).unlink(missing_ok=True)
        folder.rmdir()
        return False
    return True
