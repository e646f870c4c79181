"""Files that a save has just written, given a second name in the place of writing their tensors once more."""

from __future__ import annotations

import errno
import os
from collections.abc import Collection, Mapping
from pathlib import Path

from zerostart.checkpoint.verifying import read_marker, verify
from zerostart.distributed.world import World
from zerostart.errors import VerifyError
from zerostart.state.digest import digests_of
from zerostart.state.writing import Entry, Outgoing

__all__ = ["check_unchanged", "linked"]

#: What a system answers that gives no second name to a file here.
_NO_LINKS = (errno.EXDEV, errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EACCES)


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
    known = world.broadcast_object(lambda: _known(saved), "looking at the files that are saved")
    if known.keys() != {name for name, _, _ in entries}:
        return None
    with world.phase("comparing the model with the files that are saved"):
        found = digests_of((item.shard for item in outgoing), world)
    if found != known:
        return None
    made = world.broadcast_object(lambda: _link(saved, folder), "linking the files that are saved")
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


def _known(saved: Path) -> dict[str, str]:
    """The digests of the tensors in ``saved``; none where its files are not those of a save."""
    try:
        document = read_marker(saved) or {}
    except VerifyError:
        return {}
    sizes = {name: told["bytes"] for name, told in document.get("files", {}).items()}
    whole = all(_size(saved / name) == sizes[name] for name in _weights(sizes))
    return dict(document.get("digests", {}).get(".", {})) if whole else {}


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else -1


def _weights(names: Collection[str]) -> list[str]:
    """Of files those in the directory itself that hold weights, and the index of them."""
    kinds = (".safetensors", ".safetensors.index.json")
    return [name for name in names if "/" not in name and name.endswith(kinds)]


def _link(saved: Path, folder: Path) -> bool:
    folder.mkdir()
    names = _weights((read_marker(saved) or {})["files"])
    try:
        for name in names:
            os.link(saved / name, folder / name)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        for name in names:
            (folder / name).unlink(missing_ok=True)
        folder.rmdir()
        return False
    return True
