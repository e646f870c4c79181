"""The formats that a conversion writes: each says which files its target consists of, as plain data."""

from __future__ import annotations

import importlib
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import torch

from zerostart.checkpoint.manifest import is_inside
from zerostart.checkpoint.paths import scheme_of, shown_url
from zerostart.checkpoint.write.images import Image, Room, Run
from zerostart.checkpoint.write.shards import SaveLayout
from zerostart.checkpoint.write.switching import CONTENT
from zerostart.errors import ConfigError
from zerostart.recipe.dtypes import spelling, torch_dtype
from zerostart.state.converting.beside import beside
from zerostart.state.converting.contents import Contents, Stored, opened

#: Types whose elements mean the same in another floating type; others are quantised.
PLAIN_FLOATS = ("F64", "F32", "BF16", "F16")


@dataclass(frozen=True)
class Options:
    """What is asked of a target beside its name."""

    #: Floating type of weights; None leaves each as it is.
    dtype: torch.dtype | None = None
    max_shard_size: int | str = "5GB"
    #: Of a ZeRO checkpoint: for how many ranks, and of which stage.
    world_size: int = 1
    zero_stage: int = 3


@dataclass
class Target:
    """What is written: files, the tensors whose elements are read into them, and what is left out."""

    images: list[Image] = field(default_factory=list)
    sources: list[Stored] = field(default_factory=list)
    #: Of each of ``sources``, the tensor of the safetensors files that it becomes; empty for none.
    names: list[str] = field(default_factory=list)
    #: Name, dtype in safetensors' spelling, and shape of the tensors that have digests.
    entries: list[tuple[str, str, Sequence[int]]] = field(default_factory=list)
    #: The same as safetensors files, where the format is of these.
    layout: SaveLayout | None = None
    #: Whether weights that are quantised in the source are not here.
    dequantised: bool = False
    #: Of a source without a configuration that of its model, by the names of files.
    settings: dict[str, bytes] = field(default_factory=dict)
    #: Parts of the source that the format does not hold, in words.
    left_out: list[str] = field(default_factory=list)
    #: Tensors that are written, and the bytes of their elements.
    tensors: int = 0
    nbytes: int = 0

    @property
    def checked(self) -> bool:
        """Whether files have checksums of what is read into them."""
        return any(image.checked for image in self.images)

    def source(self, tensor: Stored, name: str = "") -> int:
        """The number by which rows call a tensor, which is one of the files by ``name``, if that is given."""
        self.sources.append(tensor)
        self.names.append(name)
        return len(self.sources) - 1

    def room(self, tensor: Stored, dtype: torch.dtype, shape: Sequence[int] | None = None) -> Room:
        """A tensor of an archive with all elements of a stored one, in its order."""
        self.tensors += 1
        self.nbytes += tensor.numel * dtype.itemsize
        run = Run(self.source(tensor), 0, tensor.numel)
        return Room(dtype, tensor.shape if shape is None else shape, (run,))


class TargetFormat(ABC):
    """One format that a conversion writes."""

    #: The word of ``--to``.
    name: ClassVar[str]
    #: Whether it is a directory of safetensors, with an index by which readers find them.
    indexed: ClassVar[bool] = False

    @abstractmethod
    def target(self, contents: Contents, options: Options, scratch: Path) -> Target:
        """The files that ``contents`` become.

        The last of them is the one by which readers find the others. ``scratch`` is a directory for files
        that are removed again. Raises ConfigError for what cannot be written so, and OSError.
        """


#: By the word of ``--to``, the module of the class, which is imported when it is asked for.
_FORMATS = {
    "hf": ("hugging_face", "HuggingFace"),
    "dcp": ("distributed", "Distributed"),
    "zero": ("zero", "Zero"),
    "universal": ("universal", "Universal"),
    "original": ("hugging_face", "Original"),
}


def target_format(name: str) -> TargetFormat:
    """The format called ``name``. Raises ConfigError where none is."""
    if name not in _FORMATS:
        raise ConfigError(f"to={name!r} is none of the formats that are written: {', '.join(_FORMATS)}")
    module, kind = _FORMATS[name]
    made: TargetFormat = getattr(importlib.import_module(f"zerostart.state.converting.{module}"), kind)()
    return made


@dataclass(frozen=True)
class Asked:
    """A conversion as it is asked for, wherever it goes to."""

    source: str | os.PathLike[str]
    format: TargetFormat
    options: Options
    #: Whether what is left out is an error, and whether all but weights is left out, untold.
    strict: bool = False
    weights_alone: bool = False
    #: Whether a model that is there is replaced, as saves do.
    replaces: bool = False

    def contents(self) -> Contents:
        """What lies at the source. Raises what opening it raises."""
        return opened(self.source, self.weights_alone)

    def target(self, contents: Contents, scratch: Path) -> Target:
        """What is written. Raises ConfigError for what cannot be, and for what ``strict`` refuses."""
        target = self.format.target(contents, self.options, scratch)
        if self.strict and target.left_out:
            raise ConfigError(
                f"{shown_url(os.fspath(self.source))} has what {self.format.name} does not hold: "
                f"{', '.join(target.left_out)}; convert without strict to leave it out"
            )
        seen: set[str] = set()
        for name in (image.name for image in target.images):  # which may have that of a tensor, anybody's
            if not is_inside(name) or name in seen:
                raise ConfigError(f"{self.format.name} cannot be written: no new file can be called {name!r}")
            seen.add(name)
        return target

    def beside(self, contents: Contents, target: Target) -> Iterator[tuple[str, Path | bytes]]:
        """What comes along with the weights, by name; see ``beside.py``."""
        yield from target.settings.items()
        yield from beside(contents, self.options.dtype, target.dequantised)

    def check_free(
        self,
        contents: Contents,
        target: Target,
        place: str,
        taken: Callable[[str], Callable[[], bytes] | None],
    ) -> None:
        """Raise ConfigError where somebody's files have the names that are needed at ``place``.

        ``taken`` gives what reads the file of a name; None for a name that nothing has, or that a conversion
        has given which is gone on from. A configuration that is what would be written is nobody's loss.
        """
        names = [image.name for image in target.images]
        if target.layout is not None:
            names += [f"{target.layout.stem}.safetensors", target.layout.index_name]
        known = next((name for name in names if taken(name)), None) or next(
            (
                name
                for name, item in self.beside(contents, target)
                if target.layout is not None and name in CONTENT and (there := taken(name))
                if there() != (item if isinstance(item, bytes) else item.read_bytes())
            ),
            None,
        )
        if known is None:
            return
        read = {_folder(file) for catalog in contents.catalogs for file in catalog.storage.files}
        if place in read:
            raise ConfigError(f"{shown_url(place)} has what is converted, and keeps it: name another place")
        if not self.replaces:
            raise ConfigError(
                f"{shown_url(place)}/{known} is there already; convert to an empty directory, or to a new one"
            )


def _folder(file: str) -> str:
    return file.rpartition("/")[0] if scheme_of(file) else os.path.realpath(Path(file).parent)


def kept_dtype(stored: Stored, dtype: torch.dtype | None) -> str:
    """The dtype in the files of a weight, in safetensors' spelling."""
    return stored.dtype if dtype is None or stored.dtype not in PLAIN_FLOATS else spelling(dtype)


def kept_torch_dtype(stored: Stored, dtype: torch.dtype | None) -> torch.dtype:
    """The same as torch has it. Raises CheckpointError for one that torch has not."""
    return torch_dtype(kept_dtype(stored, dtype), stored.name)


def check_dtype(dtype: object) -> None:
    """Raise ConfigError unless weights can be stored in ``dtype``, or it is None."""
    if dtype is not None and not (isinstance(dtype, torch.dtype) and spelling(dtype) in PLAIN_FLOATS):
        raise ConfigError(f"dtype={dtype!r} is not a floating type that weights are stored in")


def optimizer_left_out(contents: Contents) -> list[str]:
    """What of an optimizer a format loses that has weights alone, and what no format has."""
    found = [f"{key} of {_count(by)}" for key, by in contents.states.items()]
    found += [f"{key} of {_count(by)}" for key, by in contents.numbers.items()]
    if contents.groups:
        found.append(f"settings of {len(contents.groups)} parameter groups")
    return [*found, *others_left_out(contents)]


def others_left_out(contents: Contents) -> list[str]:
    """What no format has but the one that it lies in."""
    return [_OTHERS.get(kind, kind) for kind in contents.others]


_OTHERS = {
    "gradient": "gradients of a window of accumulation",
    "random": "random states of the ranks",
    "extra": "extra",
    "schedule": "state of the schedule of learning rates",
    "scale": "state of what scales the loss",
    "own": "what the optimizer keeps beside states of parameters",
    "modules": "what modules keep beside tensors",
    "around": "buffers of what is around the model",
}


def _count(names: Iterable[str]) -> str:
    number = len(list(names))
    return f"{number} {'parameter' if number == 1 else 'parameters'}"
