"""Whether the files of a catalog are still what they were, and the same on every machine."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from zerostart.checkpoint.catalog import Catalog, TensorEntry
from zerostart.checkpoint.source import read_files
from zerostart.checkpoint.storage.files import FileState
from zerostart.checkpoint.storage.local import LocalFiles
from zerostart.errors import CheckpointNotFoundError, ReadError

#: Samples of a file, and bytes of each.
_SAMPLES, _SAMPLED = 9, 1 << 12


def states_of(catalog: Catalog) -> tuple[FileState | None, ...]:
    """What the files of a catalog were when their headers were read; () where they are no files."""
    return catalog.storage.states if isinstance(catalog.storage, LocalFiles) else ()


def seen_here(catalog: Catalog, states: Sequence[FileState | None], copied: Iterable[int]) -> Catalog:
    """The catalog with the ``states`` of its files on this machine; some other has ``copied`` for itself."""
    storage = catalog.storage
    assert isinstance(storage, LocalFiles), "what has states are files"
    return replace(catalog, storage=replace(storage, identities=tuple(states), copied=frozenset(copied)))


def states_here(catalog: Catalog) -> tuple[FileState, ...]:
    """The states of the files of another machine's catalog on this one, which may have copies of its own.

    Raises CheckpointNotFoundError for a file that is not here, ReadError for a copy whose header says
    anything else.
    """
    states = [FileState.at(path) for path in catalog.files]
    for path, state in zip(catalog.files, states, strict=True):
        if state is None:
            raise CheckpointNotFoundError(f"{path} is not there on this machine, and it is where rank 0 runs")
    known = states_of(catalog)
    copies = [number for number, state in enumerate(states) if state != known[number]]
    if catalog.assembled is not None:  # parts of files of many kinds: their lengths have to do
        _check_lengths(catalog, states)
        return tuple(state for state in states if state is not None)
    expected: dict[int, list[TensorEntry]] = {number: [] for number in copies}
    for entry in catalog.tensors.values():
        if entry.file in expected:
            expected[entry.file].append(entry)
    read = read_files([catalog.files[number] for number in copies], copies)
    for number, (entries, _, state) in zip(copies, read, strict=True):
        if state is None or state.size != catalog.sizes[number] or entries != expected[number]:
            raise ReadError(
                f"{catalog.files[number]} on this machine is not the file that rank 0 has: its header or its "
                "length differs; copy the checkpoint to every machine again"
            )
        states[number] = state
    return tuple(state for state in states if state is not None)


def samples_of(catalog: Catalog, files: Iterable[int]) -> dict[int, str]:
    """By number of the file, a digest of its length and of samples of its bytes, the same ones in any copy.

    Two checkpoints of one architecture have files of one length with one header; they differ everywhere.
    """
    return {number: _sample(catalog.files[number], catalog.sizes[number]) for number in sorted(files)}


def _sample(path: str, size: int) -> str:
    digest = hashlib.blake2b(size.to_bytes(8, "little"), digest_size=16)
    with Path(path).open("rb", buffering=0) as file:
        for sample in range(_SAMPLES):
            file.seek(max(0, size - _SAMPLED) * sample // (_SAMPLES - 1))
            digest.update(file.read(_SAMPLED))
    return digest.hexdigest()


def _check_lengths(catalog: Catalog, states: Sequence[FileState | None]) -> None:
    for path, size, state in zip(catalog.files, catalog.sizes, states, strict=True):
        if state is None or state.size != size:
            raise ReadError(
                f"{path} on this machine has another length than on rank 0's; copy the checkpoint to every "
                "machine again"
            )


def check_unchanged(catalog: Catalog) -> None:
    """Raise ReadError if a file is not as it was when its header was read.

    One that was replaced is still read as it was by who has opened it; but not where machines have copies of
    their own, of which one may be what it was replaced by.
    """
    storage = catalog.storage
    copied = storage.copied if isinstance(storage, LocalFiles) else frozenset()
    for number, before in enumerate(states_of(catalog)):
        path = catalog.files[number]
        now = FileState.at(path)
        if before is None or now == before:
            continue
        replaced = now is None or now.number != before.number
        if not replaced or number in copied:
            raise ReadError(
                f"{path} was changed during the load (it {before.changed_to(now)}), and what was read may be "
                "a mixture; load again when nobody writes to it"
            )
