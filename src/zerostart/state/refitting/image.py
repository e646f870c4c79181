"""The image: the safetensors file that a save of the model would write, as the address space of a refit.

Trainer ranks know where in it their shards go, by the plan of a save; workers know which bytes of it fill
their parameters, by the plan of a load. So neither knows how the other is sharded. The file need not exist.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NoReturn

from zerostart.checkpoint.catalog import Catalog
from zerostart.checkpoint.storage import Storage
from zerostart.checkpoint.strict_json import load_json
from zerostart.checkpoint.write.shards import SaveLayout, plan_shards
from zerostart.errors import CheckpointError, ConfigError, ReadError

#: Name, dtype in safetensors' spelling, and shape of a tensor.
Entry = tuple[str, str, Sequence[int]]
#: The one file of an image.
FILE = "model.safetensors"
#: Changes with what a serialised image means, and with the digests that both sides compare.
FORMAT = 2


@dataclass(frozen=True)
class Image:
    """A safetensors file: names, dtypes and shapes, and the place of each byte.

    Offsets count bytes from the beginning of the file, its header included.
    """

    #: In the order of the trainer's checkpoint, which is that in which a loader is given them.
    entries: tuple[Entry, ...]

    @classmethod
    def of(cls, entries: Iterable[Entry]) -> Image:
        """The image of ``entries``, the same for everybody who has them.

        Raises CheckpointError for a tensor that safetensors cannot store, ConfigError for more tensors than
        one file takes.
        """
        image = cls(tuple((name, dtype, tuple(shape)) for name, dtype, shape in entries))
        if len(image.layout.files) != 1:
            raise ConfigError(
                f"the model has {len(image.entries)} tensors, more than one image takes; this is a limit of "
                "zerostart"
            )
        return image

    @cached_property
    def layout(self) -> SaveLayout:
        """Where every byte is."""
        return plan_shards(self.entries, 1 << 62, FILE.removesuffix(".safetensors"))

    @property
    def header(self) -> bytes:
        """What the file begins with."""
        return self.layout.files[0].header

    @property
    def nbytes(self) -> int:
        """Bytes of the whole file."""
        return self.layout.files[0].size

    def catalog(self) -> Catalog:
        """The tensors as those of a checkpoint; its storage gives no bytes, which come by a transport."""
        # In the order of the entries: engines get the tensors in that order from a checkpoint, too.
        tensors = {name: self.layout.tensors[name] for name, _, _ in self.entries}
        return Catalog("", ImageStorage((FILE,), (self.nbytes,)), tensors)

    @cached_property
    def fingerprint(self) -> str:
        """The same for images of the same tensors, in the same order, alone."""
        return hashlib.blake2b(self.to_bytes(), digest_size=16).hexdigest()

    def to_bytes(self) -> bytes:
        """The entries as JSON."""
        document = {"format": FORMAT, "tensors": [[n, d, list(s)] for n, d, s in self.entries]}
        return json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Image:
        """What ``to_bytes`` gave; raises CheckpointError for anything else."""
        document = load_json(data, "a refit", "image")
        tensors = document.get("tensors")
        if document.get("format") != FORMAT or not isinstance(tensors, list):
            raise CheckpointError(
                f"the image has the format {document.get('format')!r}, not {FORMAT}: trainer and workers run "
                "different versions of zerostart; install the same one"
            )
        return cls.of(_entry(row) for row in tensors)


def _entry(row: object) -> Entry:
    if isinstance(row, list) and len(row) == 3:
        name, dtype, shape = row
        sizes = isinstance(shape, list) and all(type(size) is int for size in shape)
        if isinstance(name, str) and isinstance(dtype, str) and sizes:
            return name, dtype, tuple(shape)
    raise CheckpointError(f"the image has a tensor that is no [name, dtype, shape]: {row!r:.100}")


@dataclass(frozen=True)
class ImageStorage(Storage):
    """Stands for the file, which need not exist: plans that are made of it run with a transport's reader."""

    def reader(self, *, cold: bool = False, direct: bool = False) -> NoReturn:
        """Raise ReadError: nothing is stored."""
        raise ReadError("an image has no bytes of its own; they come by a transport")
