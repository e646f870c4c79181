"""Directories that all ranks write together, and that appear whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zerostart.checkpoint.paths import expanded
from zerostart.checkpoint.publishing import Staging, told
from zerostart.checkpoint.replacing import MARKER
from zerostart.distributed.world import World
from zerostart.errors import ConfigError, WriteError

__all__ = ["Publication", "agreed_place", "publishing"]


@dataclass(frozen=True)
class Publication:
    """What is being saved: everything is written below ``directory``, which all ranks see.

    ``document`` of rank 0 becomes the marker.
    """

    directory: Path
    document: dict[str, Any] = field(default_factory=dict)

    def add_digests(self, digests: Mapping[str, str], folder: str = ".") -> None:
        """Note the digests of all tensors in the safetensors files of ``folder`` (a path from there)."""
        self.document.setdefault("digests", {}).setdefault(folder, {}).update(digests)


def agreed_place(path: str | os.PathLike[str], world: World, doing: str = "saving to") -> Path:
    """The directory ``path`` as it is from everywhere, for the first rank's working directory; collective.

    ``doing`` is what is done with it, in words. Inside a phase, as a rank may fail by itself. Raises
    ConfigError where a rank means another one, before anything is made.
    """
    given = os.fspath(path) if isinstance(path, str | os.PathLike) else ""
    if not given:
        raise ConfigError(f"{doing} {path!r}: give the path of a directory")
    return world.broadcast_object(lambda: expanded(given).absolute(), f"{doing} {given}")


@contextmanager
def publishing(path: str | os.PathLike[str], world: World, *, marker: str = MARKER) -> Iterator[Publication]:
    """A directory beside ``path`` in which all ranks write, and which takes its place at the end; collective.

    On leaving the ranks agree that all went well; then everything is synced (each rank has synced the files
    that it wrote), the marker is written, and the directory put in its place, before any rank goes on. After
    an error on any rank everything is removed, and ``path`` is as before. Files at ``path`` that were no part
    of an earlier save stay there. Raises WriteError, or what the body raised, on every rank.
    """
    staging: Staging | None = None

    def begin() -> str:
        nonlocal staging
        staging = Staging(path, marker)
        return str(staging.directory)

    with world.phase("saving to a directory"):
        path = agreed_place(path, world)
        try:
            directory = Path(world.broadcast_object(begin, "making a directory to save to"))
            publication = Publication(directory)
            with world.phase("writing the files"), told(Path(path), "nothing was saved"):
                if not directory.is_dir():
                    raise WriteError(
                        f"{directory}: rank {world.rank} does not see the directory that rank 0 made; save "
                        "to a file system that all ranks share"
                    )
                yield publication
            if staging is not None:
                staging.complete(publication.document)
        except BaseException:
            if staging is not None:
                staging.discard()
            raise
