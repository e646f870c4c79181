"""Reading a cache of encoded items: no encoder, no file but its own, one item at a time.

A cache is a directory whose marker (``zerostart.json``) says what it was made of, and lists its files::

    items-00000.safetensors ...   the tensors of ``per_file`` items each, named NUMBER.KEY
    prompts.safetensors           what the encoders make of single texts, named KEY OF THE TEXT.KEY
    index.safetensors             for each item its file, where its tensors begin, their kind and digest,
                                  the row of the media that it is of, and the number that it was drawn by

An item is of a *kind* that many share: names, dtypes and shapes of its tensors. So the index of 100,000
items is a few megabytes, and no header of a file of items is ever read.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from io import FileIO
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from zerostart.checkpoint.catalog import DTYPE_BITS
from zerostart.checkpoint.formats.safetensors import read_header
from zerostart.checkpoint.manifest import documents, lies_at
from zerostart.errors import CheckpointError, CheckpointNotFoundError, ConfigError, ReadError
from zerostart.recipe import torch_dtype

#: Of the format. A cache of version 1 does not say which rows its items are of: it cannot grow.
VERSION, _OLDER = 2, 1
INDEX_FILE, PROMPTS_FILE = "index.safetensors", "prompts.safetensors"
#: What differs in length between the examples of one batch; all else has to be alike.
_TEXT = frozenset({"prompt_embeds", "prompt_embeds_mask"})

#: The cache in the output directory of a run.
FOLDER = "cache"

#: Name, dtype in safetensors' spelling, and shape of each tensor of an item, in the order of the names.
Kind = tuple[tuple[str, str, tuple[int, ...]], ...]


def items_file(number: int) -> str:
    """The name of a file of items."""
    return f"items-{number:05d}.safetensors"


def text_key(text: str) -> str:
    """The stable key of a text in the file of texts."""
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def is_of_cache(name: str) -> bool:
    """Whether ``name`` in an output directory is its cache, or was left of making it."""
    return (
        name == FOLDER
        or re.fullmatch(rf"\.{FOLDER}\.(encoding|lock|[0-9a-f]{{12}}\.(saving|replaced))", name) is not None
    )


def read_manifest(directory: Path) -> dict[str, Any] | None:
    """What the marker of a complete cache says of it; None where there is no cache.

    Raises VerifyError for a marker that this version of zerostart does not know, ConfigError for that of a
    directory that is something else.
    """
    found = documents(directory) if directory.is_dir() else []
    caches = [document for document in found if isinstance(document.get("cache"), dict)]
    if found and not caches:
        raise ConfigError(
            f"cache.directory {directory} holds a saved model, not a cache; name another directory"
        )
    return caches[0] if caches else None


@dataclass(frozen=True)
class _Index:
    """Numbers of kinds [items], first tensors [items], offsets [tensors], digests [items, 16], files [items].

    ``rows`` [items, 16] and ``numbers`` [items] are None in a cache of the older version.
    """

    kinds: NDArray[np.int64]
    firsts: NDArray[np.int64]
    offsets: NDArray[np.int64]
    digests: NDArray[np.uint8]
    files: NDArray[np.int64]
    rows: NDArray[np.uint8] | None
    numbers: NDArray[np.int64] | None

    def of(self, chosen: Sequence[int]) -> _Index:
        at = np.array(chosen, dtype=np.int64)
        rows = None if self.rows is None else self.rows[at]
        numbers = None if self.numbers is None else self.numbers[at]
        kinds, firsts = self.kinds[at], self.firsts[at]
        # Offsets stay as they are: `firsts` points into all of them.
        return _Index(kinds, firsts, self.offsets, self.digests[at], self.files[at], rows, numbers)


@dataclass(frozen=True)
class Entry:
    """Where an item is: file and offsets in it, its kind, digest, row, and the number it was drawn by."""

    file: int
    kind: Kind
    offsets: list[int]
    digest: bytes
    row: bytes
    number: int


@dataclass(frozen=True)
class Share:
    """The next ``rows * orders`` items of a cache, order by order, of which an epoch has ``rows * repeats``.

    It goes over the rows ``repeats`` times, each time with the next order of their tags.
    """

    rows: int
    repeats: int = 1
    orders: int = 1


class CachedItems:
    """The items of the cache in ``directory``, over which an epoch goes ``repeats`` times.

    With ``shares`` it goes over each as that says, one share after the other. Example ``i`` of an epoch is
    item ``i`` in the first order of its tags, and ``in_epoch`` says by which number it is had in another.

    What an item is: tensors on the CPU named as diffusers' pipelines name them, ``latents`` ([C, H, W] of a
    picture, [C, F, H, W] of a video, not packed), ``prompt_embeds`` [L, D], and what else its transformer
    takes. It may be read by several processes at once; none holds more than the item that it reads.
    """

    _index: _Index

    def __init__(
        self,
        directory: str | os.PathLike[str],
        repeats: int = 1,
        chosen: Sequence[int] | None = None,
        shares: Sequence[Share] = (),
    ) -> None:
        """``chosen``: these of its items alone, in this order.

        Raises CheckpointNotFoundError where no cache is, ReadError for a file that is not as written, and
        ConfigError where there are not as many items as the ``shares`` have.
        """
        self.directory = Path(directory)
        while True:
            document = read_manifest(self.directory)
            if document is None:
                raise CheckpointNotFoundError(
                    f"{self.directory}: there is no cache here; make it with zerostart cache"
                )
            try:
                self._open(document)
                break
            except ReadError:
                # The marker is still the one that was opened: the file is damaged, and was not replaced
                # meanwhile.
                if self.is_of(read_manifest(self.directory)):
                    raise
                # Another process has put another one there meanwhile.
        if chosen is not None:
            self._index, self._count = self._index.of(chosen), len(chosen)
        self.shares = tuple(shares) or (Share(self._count, repeats),)
        if (given := sum(share.rows * share.orders for share in self.shares)) != self._count:
            raise ConfigError(
                f"the cache {self.directory} has {self._count} items, and media stands for {given}: put what "
                "media names back, or name another cache.directory"
            )

    def is_of(self, document: Mapping[str, object] | None) -> bool:
        """Whether this is the cache that ``document`` describes: nobody has changed it since."""
        return document is not None and self._document == document

    def _open(self, document: dict[str, Any]) -> None:
        self._document = document
        # A save that was killed, or is not over, may have its files in a folder of this name still.
        self._save = {"save": document.get("save")}
        found = document["cache"]
        if found.get("version") not in (VERSION, _OLDER):
            raise CheckpointError(
                f"{self.directory} is a cache of version {found.get('version')!r}, but this version of "
                f"zerostart reads version {VERSION}: {self._remedy()}"
            )
        self.facts: Mapping[str, object] = found["facts"]
        self.texts: tuple[str, ...] = tuple(found["prompts"])
        self._count, self._per_file = int(found["items"]), int(found["per_file"])
        self._kinds: list[Kind] = [
            tuple((name, dtype, tuple(shape)) for name, dtype, shape in kind) for kind in found["kinds"]
        ]
        self._sizes = {name: int(described["bytes"]) for name, described in document["files"].items()}
        # One `stat` for each file at the start finds a truncated copy hours before the epoch reaches it.
        self._check_sizes()
        self._index = self._read_index()

    @property
    def rows(self) -> list[bytes] | None:
        """The key of each item's row of the media (``MediaItems.keys``); None where it does not say."""
        return None if self._index.rows is None else [row.tobytes() for row in self._index.rows]

    @property
    def next_file(self) -> int:
        """The lowest number that no file of items has, nor any before it."""
        # By the highest that is there: files that lost all their items leave their numbers unused.
        numbers = [re.fullmatch(r"items-(\d+)\.safetensors", name) for name in self._sizes]
        return max((int(found[1]) + 1 for found in numbers if found), default=0)

    def entry(self, number: int) -> Entry:
        """Where item ``number`` is, in a cache that says which rows its items are of."""
        index = self._index
        assert index.rows is not None, "whoever calls this has looked"
        assert index.numbers is not None, "the same"
        kind, first = self._kinds[index.kinds[number]], int(index.firsts[number])
        return Entry(
            int(index.files[number]),
            kind,
            index.offsets[first : first + len(kind)].tolist(),
            index.digests[number].tobytes(),
            index.rows[number].tobytes(),
            int(index.numbers[number]),
        )

    def __len__(self) -> int:
        return sum(share.rows * share.repeats for share in self.shares)

    def in_epoch(self, place: int, epoch: int) -> int:
        """The number of example ``place`` as ``epoch`` has it: ``len(self)`` more for each further order."""
        share, _, inner = self._share_at(place)
        # `repeats` orders are used up in an epoch, and the next one goes on from there, round and round.
        order = (epoch * share.repeats + inner // share.rows) % share.orders
        return place + order * len(self)

    def _share_at(self, place: int) -> tuple[Share, int, int]:
        first = 0
        for share in self.shares:
            if place < share.rows * share.repeats:
                return share, first, place
            place -= share.rows * share.repeats
            first += share.rows * share.orders
        raise IndexError(place)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """Item ``index``. Raises IndexError, and ReadError, naming the file, for what is not as written."""
        # The reverse of `in_epoch`: which order, and which example of the epoch.
        order, place = divmod(index, len(self))
        share, start, inner = self._share_at(place)
        if not 0 <= order < share.orders:
            raise IndexError(f"item {index} of {len(self)}")
        # Items lie order by order; repeats are the same rows again, hence the remainder.
        number = start + order * share.rows + inner % share.rows
        kind, first = self._kinds[self._index.kinds[number]], int(self._index.firsts[number])
        path = self._path(items_file(int(self._index.files[number])))
        hashed = hashlib.blake2b(digest_size=16)
        item: dict[str, torch.Tensor] = {}
        with _opened(path) as handle:
            for (name, dtype, shape), offset in zip(
                kind, self._index.offsets[first : first + len(kind)].tolist(), strict=True
            ):
                item[name] = _tensor(handle.fileno(), path, offset, dtype, shape)
                hashed.update(tensor_bytes(item[name]))
        if hashed.digest() != self._index.digests[number].tobytes():
            raise ReadError(
                f"{path}: item {number} has other contents than were written: the file is damaged; "
                f"{self._remedy()}"
            )
        return item

    def digest(self) -> str:
        """A digest of all items: equal for equal ones, wherever they lie."""
        counts: object = [(share.rows, share.repeats, share.orders) for share in self.shares]
        if len(self.shares) == 1 and self.shares[0].orders == 1:
            # Of one data set as ever: checkpoints of its runs have this digest.
            counts = (self._count, self.shares[0].repeats)
        hashed = hashlib.blake2b(repr(counts).encode(), digest_size=16)
        # Digests of contents in the order of the items; where these lie (files, offsets) is left out.
        hashed.update(self._index.digests.tobytes())
        return hashed.hexdigest()

    def shapes(self) -> Sequence[Hashable]:
        """For each item the names and shapes of what has to be alike in a batch: all but texts."""
        keys = [tuple((name, shape) for name, _, shape in kind if name not in _TEXT) for kind in self._kinds]
        kinds = self._index.kinds.tolist()
        found: list[Hashable] = []
        start = 0
        for share in self.shares:  # an item's orders differ in their texts alone
            found += [keys[kind] for kind in kinds[start : start + share.rows]] * share.repeats
            start += share.rows * share.orders
        return found

    def prompt(self, text: str = "") -> dict[str, torch.Tensor]:
        """What the encoders make of ``text`` alone, by the keys that it has in items.

        Raises ConfigError for a text that was not asked for when the cache was made, and ReadError.
        """
        if text not in self.texts:
            raise ConfigError(
                f"{self.directory} has no embeddings of the text {text!r}; name it in cache.prompts, and run "
                "zerostart cache again: its items stay"
                if self.texts
                else f"{self.directory} has no embeddings of text alone: its encoders take pictures as well"
            )
        # Between its header and its bytes another run may have put another file there: once more, then.
        path = self._path(PROMPTS_FILE)
        found = _embeddings(path, text) or _embeddings(path := self._path(PROMPTS_FILE), text)
        if found is None:
            raise ReadError(
                f"{path}: the embeddings of the text {text!r} have other contents than were written: "
                f"the file is damaged; {self._remedy()}"
            )
        return found

    def _check_sizes(self) -> None:
        for name, size in self._sizes.items():
            path = self._path(name)
            try:
                found = path.stat().st_size
            except OSError as error:
                raise ReadError(f"{path}: {error.strerror}; {self._remedy()}") from error
            if found != size:
                raise ReadError(f"{path} has {found} bytes, but {size} were written; {self._remedy()}")

    def _path(self, name: str) -> Path:
        return lies_at(self.directory, self._save, name)

    def _remedy(self) -> str:
        return f"remove {self.directory}, and the next run makes it again"

    def _read_index(self) -> _Index:
        path = self._path(INDEX_FILE)
        entries, _, _ = read_header(path)
        with _opened(path) as handle:
            found = {
                e.name: _tensor(handle.fileno(), path, e.offset, e.dtype, e.shape).numpy() for e in entries
            }
        kinds = found["kinds"]
        lengths = np.array([len(kind) for kind in self._kinds], dtype=np.int64)
        if len(kinds) != self._count or (len(kinds) and int(kinds.max()) >= len(lengths)):
            raise ReadError(f"{path} is not the index of this cache; {self._remedy()}")
        # Offsets of all items follow one another: an item has as many as its kind has tensors.
        ends = np.cumsum(lengths[kinds])
        if len(found["offsets"]) != (int(ends[-1]) if len(ends) else 0):
            raise ReadError(f"{path} is not the index of this cache; {self._remedy()}")
        # Version 1: files of equally many items, one after the other.
        files = found.get("files", np.arange(self._count) // self._per_file)
        rows, numbers = found.get("rows"), found.get("numbers")
        if any(one is not None and len(one) != self._count for one in (files, rows, numbers)):
            raise ReadError(f"{path} is not the index of this cache; {self._remedy()}")
        # The first tensor of an item is where those before it end.
        return _Index(kinds, ends - lengths[kinds], found["offsets"], found["digests"], files, rows, numbers)


def digest_of(tensors: Mapping[str, torch.Tensor]) -> str:
    """Of the bytes of contiguous tensors on the CPU, in the order of their names."""
    hashed = hashlib.blake2b(digest_size=16)
    # Only the bytes, in this order; names, dtypes and shapes are in the index beside it.
    for name in sorted(tensors):
        hashed.update(tensor_bytes(tensors[name]))
    return hashed.hexdigest()


def _embeddings(path: Path, text: str) -> dict[str, torch.Tensor] | None:
    """What a file of texts has of one of them; None where it is not what was written."""
    entries, metadata, _ = read_header(path)
    key = text_key(text)
    with _opened(path) as handle:
        found = {
            entry.name.removeprefix(f"{key}."): _tensor(
                handle.fileno(), path, entry.offset, entry.dtype, entry.shape
            )
            for entry in entries
            if entry.name.startswith(f"{key}.")
        }
    # Also None where the text is not in the file: then there is no digest to agree with.
    return found if metadata.get(key) == digest_of(found) else None


def _opened(path: Path) -> FileIO:
    try:
        return path.open("rb", buffering=0)
    except OSError as error:
        raise ReadError(f"{path}: cannot be read: {error.strerror}") from error


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous tensor on the CPU, where they lie."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def _tensor(handle: int, path: Path, offset: int, dtype: str, shape: Sequence[int]) -> torch.Tensor:
    """A tensor of a file. Raises ReadError."""
    count = prod(shape) * DTYPE_BITS[dtype] // 8
    data = torch.empty(count, dtype=torch.uint8, device="cpu")
    view, done = data.numpy().data, 0
    # A read may end early without an error, at a signal or at about 2 GiB.
    while done < count:
        try:
            got = os.preadv(handle, [view[done:]], offset + done)
        except OSError as error:
            raise ReadError(f"{path}: cannot be read: {error.strerror}") from error
        if got == 0:
            raise ReadError(f"{path} ends at byte {offset + done}, but more was written: the file is damaged")
        done += got
    return data.view(torch_dtype(dtype)).reshape(tuple(shape))
