"""Saves that all ranks write together, of which readers see the whole or nothing."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zerostart.checkpoint.manifest import MARKER
from zerostart.checkpoint.paths import expanded
from zerostart.checkpoint.write.staging import Staging, write_errors
from zerostart.distributed.world import World
from zerostart.errors import ConfigError, WriteError


@dataclass(frozen=True)
class Publication:
    """What is being saved: everything is written below ``directory``, which all ranks see.

    ``document`` of rank 0 becomes the one that says what was saved. ``names`` are those that weights have in
    the end, by those that they were written under; the same on all ranks once all is in its place.
    """

    directory: Path
    document: dict[str, Any] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)

    @contextmanager
    def written(self, world: World, name: str) -> Iterator[None]:
        """A phase in which a rank writes there; what the system answers is a WriteError on all."""
        with world.phase(name), write_errors(self.directory.parents[1], "nothing was saved"):
            yield

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
def publishing(
    path: str | os.PathLike[str], world: World, *, marker: str = MARKER, by_document: bool | None = None
) -> Iterator[Publication]:
    """A directory within ``path`` in which all ranks write; at the end its files get their names; collective.

    On leaving the ranks agree that all went well; then everything is synced (each rank has synced the files
    that it wrote) and gets its names (``Staging``, which has ``marker`` and ``by_document``), before any rank
    goes on. After an error on any rank all that was written is removed, and ``path`` is as before. Raises
    WriteError, or what the body raised, on every rank.
    """
    staging: Staging | None = None

    def begin() -> str:
        nonlocal staging
        staging = Staging(path, marker, by_document)
        return str(staging.directory)

    def complete() -> dict[str, str]:
        assert staging is not None, "the first rank has it"
        return staging.complete(publication.document)

    with world.phase("saving to a directory"):
        path = agreed_place(path, world)
        try:
            directory = Path(world.broadcast_object(begin, "making a directory to save to"))
            publication = Publication(directory)
            with publication.written(world, "writing the files"):
                if not directory.is_dir():
                    raise WriteError(
                        f"{directory}: rank {world.rank} does not see the directory that rank 0 made; save "
                        "to a file system that all ranks share"
                    )
                yield publication
            publication.names.update(world.broadcast_object(complete, "giving the files their names"))
        except BaseException:
            if staging is not None:
                staging.discard()
            raise
