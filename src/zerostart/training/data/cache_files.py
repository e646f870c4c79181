"""Writing a cache: files of items beside its place, each whole or not there, and putting them in place.

While it is made a cache is the directory ``.NAME.encoding`` beside its place ``NAME``, with a document of
what it is being made of. Each file of items is written by one rank, and has its name once it is on the
disk, so that a run that is killed loses no more than the files that were under way: the next one with the
same document goes on with those that are missing. Which items a file has follows from their number and the
size of the first one alone, so that files are the same bytes however many ranks there are.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from zerostart.checkpoint.catalog import TORCH_NAMES
from zerostart.checkpoint.strict_json import read_json
from zerostart.checkpoint.write.folders import sync_directory, write_whole
from zerostart.checkpoint.write.shards import plan_shards
from zerostart.checkpoint.write.staging import write_errors
from zerostart.distributed.world import World
from zerostart.errors import WriteError, ZerostartError
from zerostart.state.saving.writing import Publication, publishing
from zerostart.training.data.cache_facts import CacheUpdate
from zerostart.training.data.cached import (
    INDEX_FILE,
    PROMPTS_FILE,
    VERSION,
    CachedItems,
    Entry,
    Kind,
    digest_of,
    items_file,
    read_manifest,
    tensor_bytes,
    text_key,
)
from zerostart.training.loop.locks import hold

#: A small cache is in some files at least, so that several ranks have something to do.
_FILES = 64
_FEWEST = 4
_PLAN = "plan.json"
_NO_LIMIT = 1 << 62

Tensors = Mapping[str, torch.Tensor]


def items_of_a_file(count: int, size: int, limit: int) -> int:
    """How many of ``count`` items go into a file of about ``limit`` bytes, where the first has ``size``."""
    # A sixty-fourth of all, for many ranks to have turns; at least a few items, for files not to be tiny;
    # never more bytes than a rank is to hold.
    return max(1, min(max(_FEWEST, count // _FILES), limit // max(size, 1)))


@dataclass(frozen=True)
class Draft:
    """Items of a cache that are being made, ``per_file`` of them in each file; the first file is ``first``.

    ``numbers`` are those that the items are drawn by.
    """

    directory: Path
    numbers: Sequence[int]
    per_file: int
    first: int = 0

    @property
    def count(self) -> int:
        """How many items there are."""
        return len(self.numbers)

    @property
    def files(self) -> int:
        """How many files of items there are when it is complete."""
        # Rounded up: the last file may be shorter.
        return -(-self.count // self.per_file)

    def items(self, file: int) -> range:
        """The places of a file's items among all that are made."""
        return range(file * self.per_file, min((file + 1) * self.per_file, self.count))

    def missing(self) -> list[int]:
        """The numbers of the files that are not there yet."""
        return [file for file in range(self.files) if not self._described(file).is_file()]

    def name(self, file: int) -> int:
        """The number in the name of a file."""
        return self.first + file

    def write(self, file: int, items: Sequence[Tensors | str]) -> None:
        """Write a file of items; of one that there is none of, a text says why. Raises WriteError."""
        # Tensors are named by the numbers of the draws, which stay; places change from one draft to the next.
        numbers = [self.numbers[place] for place in self.items(file)]
        made = [(n, item) for n, item in zip(numbers, items, strict=True) if not isinstance(item, str)]
        named = {f"{n:08d}.{key}": t for n, item in made for key, t in item.items()}
        with write_errors(
            self.directory, "what is complete of the cache stays: start again, and it goes on from there"
        ):
            offsets, described = _write_tensors(self.directory / items_file(self.name(file)), named)
            # The description is written last: a file of items is there when its description is.
            document = {
                **described,
                "items": [
                    {"failed": item} if isinstance(item, str) else _described(f"{n:08d}.", item, offsets)
                    for n, item in zip(numbers, items, strict=True)
                ],
            }
            part = self.directory / f"{items_file(self.name(file))}.json.part"
            write_whole(self._described(file), json.dumps(document).encode(), part)
            sync_directory(self.directory)

    def drop(self) -> None:
        """Remove all of it."""
        shutil.rmtree(self.directory, ignore_errors=True)

    def described(self, file: int) -> dict[str, Any]:
        """What ``write`` has noted of a file. Raises ReadError and CheckpointError."""
        return read_json(self._described(file), "description of a file of a cache")

    def _described(self, file: int) -> Path:
        return self.directory / f"{items_file(self.name(file))}.json"

    def failures(self) -> dict[int, str]:
        """Why there are no items at these places, when all files are there. Raises as ``described`` does."""
        return {
            place: item["failed"]
            for file in range(self.files)
            for place, item in zip(self.items(file), self.described(file)["items"], strict=True)
            if "failed" in item
        }


def _described(prefix: str, item: Tensors, offsets: Mapping[str, int]) -> dict[str, Any]:
    names = sorted(item)
    kind = [[name, _spelling(item[name]), list(item[name].shape)] for name in names]
    return {"kind": kind, "offsets": [offsets[prefix + name] for name in names], "digest": digest_of(item)}


def _spelling(tensor: torch.Tensor) -> str:
    return TORCH_NAMES[str(tensor.dtype).removeprefix("torch.")]


def _write_tensors(
    path: Path, tensors: Tensors, metadata: Mapping[str, str] | None = None
) -> tuple[dict[str, int], dict[str, object]]:
    """Write a safetensors file; gives the offset of each tensor in it, and the file's length and hash.

    It gets its name when its bytes are on the disk; nothing is put together in memory. Raises OSError.
    """
    entries = ((name, _spelling(t), tuple(t.shape)) for name, t in tensors.items())
    layout = plan_shards(entries, _NO_LIMIT, metadata=metadata)
    (file,) = layout.files
    hashed = hashlib.sha256(file.header)
    part = path.with_name(f"{path.name}.part")
    with part.open("wb", buffering=0) as handle:
        _write(handle, memoryview(file.header))
        # As they lie in the file, so that it is written and hashed in one pass, tensor by tensor.
        for entry in sorted(layout.tensors.values(), key=lambda entry: (entry.offset, entry.name)):
            data = tensor_bytes(tensors[entry.name])
            hashed.update(data)
            _write(handle, data)
        os.fsync(handle.fileno())
    # Synced first and renamed then: a name in the directory means that the bytes are there, also after a
    # power cut.
    part.replace(path)
    offsets = {entry.name: entry.offset for entry in layout.tensors.values()}
    return offsets, {"bytes": file.size, "sha256": hashed.hexdigest()}


def _write(handle: Any, data: memoryview) -> None:
    while data:
        # Unbuffered writes may take a part only (at most about 2 GiB on Linux).
        data = data[handle.write(data) :]


@contextlib.contextmanager
def drafted(
    place: Path, plan: Mapping[str, Any], update: CacheUpdate, world: World
) -> Iterator[tuple[Draft, bool]]:
    """The draft of items of the cache at ``place``, and whether a killed run has left some; collective.

    ``plan``, with the new rows of ``update``, has all that its bytes follow from, with ``per_file`` and
    ``first``; what was made by another one is removed. Inside no other process may have the draft. Raises
    WriteError, where one has it, too, or has made another cache of it since this one looked.
    """
    directory, numbers = _beside(place, "encoding"), update.draw_numbers
    # Which rows, and by which numbers: a draft of other rows of the same count is not one to go on with.
    rows = repr([(update.keys[row], number) for row, number in zip(update.new_rows, numbers, strict=True)])
    plan = {**plan, "rows": hashlib.blake2b(rows.encode(), digest_size=16).hexdigest()}
    # Held by rank 0 alone, for all ranks, until they are done with the draft.
    stack = contextlib.ExitStack()

    def begin() -> bool:
        with write_errors(place, "nothing was encoded"):
            place.parent.mkdir(parents=True, exist_ok=True)
            _lock(stack, place)
            # Only under the lock: what this process saw of the cache may be older.
            _check_unchanged(place, update)
            # A plan that cannot be read is like none: the draft is begun anew.
            with contextlib.suppress(ZerostartError):
                if directory.is_dir() and read_json(directory / _PLAN, "plan of a cache") == plan:
                    return True
            shutil.rmtree(directory, ignore_errors=True)
            directory.mkdir(parents=True)
            # The plan goes first into the empty directory: files of items without one would be of an unknown
            # cache.
            data = json.dumps(plan, indent=1).encode()
            write_whole(directory / _PLAN, data, directory / f"{_PLAN}.part")
            sync_directory(directory)
            return False

    # The lock outlasts the caller's body, in which the draft is made and published.
    with stack:
        goes_on = world.broadcast_object(begin, "making a directory for the cache")
        yield Draft(directory, numbers, int(plan["per_file"]), int(plan["first"])), goes_on


def _beside(place: Path, what: str) -> Path:
    # Renames and hard links into the cache need one file system, which a link's own directory may not be on.
    real = Path(os.path.realpath(place))
    return real.with_name(f".{real.name}.{what}")


def _lock(stack: contextlib.ExitStack, place: Path, wait: bool = False) -> None:
    """Until ``stack`` ends, or this process, no other one makes the cache at ``place``, or adds to it.

    Raises WriteError where one does, unless its end is to be waited for.
    """
    refusal = (
        f"another process is making the cache {place}, or adding texts to it: start again when it has ended, "
        "or name another cache.directory"
    )
    hold(stack, _beside(place, "lock"), refusal, wait)


def _check_unchanged(place: Path, update: CacheUpdate) -> None:
    """Raise WriteError where the cache is not the one any more of which ``update`` says what stays.

    Whoever calls this has its lock: nobody changes it from now on.
    """
    document, before = read_manifest(place), update.cached
    same = document is None if before is None else before.is_of(document)
    if not same:
        raise WriteError(f"another process has changed the cache {place} during this run: start again")


def publish(
    place: Path,
    update: CacheUpdate,
    draft: Draft | None,
    facts: Mapping[str, Any],
    prompts: Mapping[str, Tensors],
    world: World,
) -> None:
    """Put what a cache has already, and a draft that is complete, in its place; collective.

    With it goes what the encoders make of single texts. Without a draft no other process may be making the
    cache. Raises WriteError, on every rank; cache and draft are as they were then.
    """
    with contextlib.ExitStack() as stack, publishing(place, world, by_document=True) as publication:
        if world.rank == 0:
            # With a draft this process has had the lock since `drafted`.
            if draft is None:
                _lock(stack, place, wait=True)
                _check_unchanged(place, update)
            _fill(publication, update, draft, facts, prompts)
    if world.rank == 0 and draft is not None:
        # After the publication: until then its files are the only ones, afterwards second names of the
        # cache's.
        draft.drop()


def publish_prompts(place: Path, added: Mapping[str, Tensors], world: World) -> None:
    """Give the cache at ``place`` further texts, and leave all else in it as it is; collective.

    Texts that other runs have added meanwhile stay. Raises WriteError, on every rank; the cache is as it was
    then.
    """
    with contextlib.ExitStack() as stack, publishing(place, world, by_document=True) as publication:
        if world.rank == 0:
            _lock(stack, place, wait=True)
            # Inside `publishing`, which ends first: the lock outlasts the moment at which files get their
            # names.
            there = CachedItems(place)
            prompts = {text: there.prompt(text) for text in there.texts} | dict(added)
            # Read under the lock: another run may have added texts since this one began.
            document = read_manifest(place) or {}
            publication.document["files"] = dict(
                document["files"]
            )  # which stay, where they are not made anew
            cache = {**document["cache"], "prompts": list(prompts)}
            publication.document["cache"] = cache
            _write_prompts(publication, prompts)


def _fill(
    publication: Publication,
    update: CacheUpdate,
    draft: Draft | None,
    facts: Mapping[str, Any],
    prompts: Mapping[str, Tensors],
) -> None:
    files = publication.document.setdefault("files", {})
    # Items that stay keep their files; their order in the index is that of the rows now, wherever they lie.
    made = {} if draft is None else _link_made(publication, update, draft)
    there = _name_cached(publication, update)
    # Rows that could not be encoded have no entry and leave no gap: items are numbered anew.
    entries = [found for row in range(len(update.items)) if (found := there.get(row) or made.get(row))]
    # Few kinds are shared by many items: an item has the number of its kind.
    kinds: dict[Kind, int] = {}
    of_items = [kinds.setdefault(entry.kind, len(kinds)) for entry in entries]

    def numbers(values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device="cpu")

    def digests(values: Sequence[bytes]) -> torch.Tensor:
        return torch.frombuffer(bytearray(b"".join(values)), dtype=torch.uint8).view(-1, 16)

    index = {
        "kinds": numbers(of_items),
        "offsets": numbers([offset for entry in entries for offset in entry.offsets]),
        "digests": digests([entry.digest for entry in entries]),
        "files": numbers([entry.file for entry in entries]),
        "rows": digests([entry.row for entry in entries]),
        "numbers": numbers([entry.number for entry in entries]),
    }
    # The index is small and always written whole; files of items are only ever added or no longer named.
    _, files[INDEX_FILE] = _write_tensors(publication.directory / INDEX_FILE, index)
    _write_prompts(publication, prompts)
    publication.document["cache"] = {
        "version": VERSION,
        "items": len(entries),
        "per_file": 1 if draft is None else draft.per_file,
        "kinds": list(kinds),
        "prompts": list(prompts),
        "facts": facts,
    }


def _link_made(publication: Publication, update: CacheUpdate, draft: Draft) -> dict[int, Entry]:
    found = {}
    for file in range(draft.files):
        described, name = draft.described(file), items_file(draft.name(file))
        _linked(draft.directory / name, publication.directory / name)
        publication.document["files"][name] = {key: described[key] for key in ("bytes", "sha256")}
        for place, item in zip(draft.items(file), described["items"], strict=True):
            if "failed" not in item:
                row = update.new_rows[place]
                kind = tuple((key, dtype, tuple(shape)) for key, dtype, shape in item["kind"])
                digest = bytes.fromhex(item["digest"])
                entry = (item["offsets"], digest, update.keys[row], draft.numbers[place])
                found[row] = Entry(draft.name(file), kind, *entry)
    return found


def _name_cached(publication: Publication, update: CacheUpdate) -> dict[int, Entry]:
    if update.cached is None:
        return {}
    place = update.cached.directory
    described = (read_manifest(place) or {})["files"]
    found = {row: update.cached.entry(item) for row, item in enumerate(update.items) if item is not None}
    for name in sorted({items_file(entry.file) for entry in found.values()}):
        publication.document["files"][name] = described[name]  # where it is
    return found


def _write_prompts(publication: Publication, prompts: Mapping[str, Tensors]) -> None:
    named = {f"{text_key(text)}.{key}": t for text, made in prompts.items() for key, t in made.items()}
    path = publication.directory / PROMPTS_FILE
    # In the header, since the index of items does not know texts.
    digests = {text_key(text): digest_of(made) for text, made in prompts.items()}
    _, described = _write_tensors(path, named, {"format": "pt", **digests})
    publication.document["files"][PROMPTS_FILE] = described


def _linked(old: Path, new: Path) -> None:
    try:
        os.link(old, new)
    except OSError:  # another file system (a place that is a mount point), or one without links
        shutil.copyfile(old, new)
