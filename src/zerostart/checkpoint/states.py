"""Whether the files of a catalog are still what they were, and the same on every machine."""

from __future__ import annotations

from zerostart.checkpoint.catalog import Catalog, TensorEntry
from zerostart.checkpoint.files import FileState
from zerostart.checkpoint.source import read_files
from zerostart.errors import CheckpointNotFoundError, ReadError

__all__ = ["check_unchanged", "states_here"]


def states_here(catalog: Catalog) -> tuple[FileState, ...]:
    """The states of the files of another machine's catalog on this one, which may have copies of its own.

    Raises CheckpointNotFoundError for a file that is not here, ReadError for a copy whose header says
    anything else.
    """
    states = [FileState.at(path) for path in catalog.files]
    for path, state in zip(catalog.files, states, strict=True):
        if state is None:
            raise CheckpointNotFoundError(f"{path} is not there on this machine, and it is where rank 0 runs")
    copies = [number for number, state in enumerate(states) if state != catalog.states[number]]
    expected: dict[int, list[TensorEntry]] = {number: [] for number in copies}
    for entry in catalog.tensors.values():
        if entry.file in expected:
            expected[entry.file].append(entry)
    read = read_files([catalog.files[number] for number in copies], copies)
    for number, (entries, _, state) in zip(copies, read, strict=True):
        if state.size != catalog.sizes[number] or entries != expected[number]:
            raise ReadError(
                f"{catalog.files[number]} on this machine is not the file that rank 0 has: its header or its "
                "length differs; copy the checkpoint to every machine again"
            )
        states[number] = state
    return tuple(state for state in states if state is not None)


def check_unchanged(catalog: Catalog) -> None:
    """Raise ReadError if a file is not as it was when its header was read.

    One that was replaced is still read as it was by who has opened it; but not where machines have copies of
    their own, of which one may be what it was replaced by.
    """
    for number, (path, before) in enumerate(zip(catalog.files, catalog.states, strict=True)):
        now = FileState.at(path)
        if now == before:
            continue
        replaced = now is None or now.number != before.number
        if not replaced or number in catalog.copied:
            raise ReadError(
                f"{path} was changed during the load (it {before.changed_to(now)}), and what was read may be "
                "a mixture; load again when nobody writes to it"
            )
