"""Tasks: data, model, loss and output of a training, without its loop."""

from __future__ import annotations

import importlib
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeAlias

from zerostart.errors import ConfigError
from zerostart.training.config.sections import TaskConfig

if TYPE_CHECKING:
    import torch
    from torch import nn

    from zerostart.distributed.world import World
    from zerostart.training.config.configuration import TrainConfig


#: A batch: tensors, or lists of tensors of different shapes.
Batch: TypeAlias = "dict[str, Any]"
#: Combines examples to a batch.
Collator: TypeAlias = "Callable[[Sequence[dict[str, torch.Tensor]]], Batch]"


class Items(Protocol):
    """Examples to train on, the same on every rank, read on access."""

    def __len__(self) -> int:
        """Return the number of examples."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """Return example ``index``: tensors on the CPU."""

    def digest(self) -> str:
        """Return a digest of all examples, independent of their directory."""

    def shapes(self) -> Sequence[Hashable]:
        """Return a key for each example; equal keys can be in one batch."""


class Subset:
    """Some ranges of ``items``, one after the other."""

    def __init__(self, items: Items, ranges: Sequence[range]) -> None:
        self._items = items
        self._ranges = ranges
        self._numbers = list(chain.from_iterable(ranges))

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return self._items[self._numbers[index]]

    def digest(self) -> str:
        """Return a digest of the whole data set and the ranges."""
        return self._items.digest() + "".join(f":{one.start}:{one.stop}" for one in self._ranges)

    def shapes(self) -> Sequence[Hashable]:
        """Return the keys of this part's examples."""
        every = self._items.shapes()
        return [every[number] for number in self._numbers]


def split_off(
    items: Items, fraction: float, shares: Sequence[tuple[int, int]] = ()
) -> tuple[Items, Items | None]:
    """Split into training and held-out examples (None if ``fraction`` is 0): the last ones.

    ``shares`` are (number, repeats) of consecutive data sets, by default one that comes once. Of each at
    least one example is held out, and in none of its repeats. Raises ValueError if none is left.
    """
    if fraction == 0.0:
        return items, None
    trained, held, start = [], [], 0
    for count, times in shares or [(len(items), 1)]:
        trained_count = count - max(1, round(count * fraction))
        if trained_count < 1:
            raise ValueError(f"{fraction} leaves none of {count} to train on")
        rounds = (start + number * count for number in range(times))
        trained += [range(first, first + trained_count) for first in rounds]
        # Only once, not in each repeat.
        held.append(range(start + trained_count, start + count))
        start += count * times
    return Subset(items, trained), Subset(items, held)


class Task(ABC):
    """The data, the model, the loss of a batch and the output of one run.

    A user's class defines ``open``, ``items``, ``builder``, ``collator`` and ``loss``, and may override the
    rest. ``Settings`` has the keys of the section ``task``; ``sections`` are those of ``media``, ``cache``
    and ``samples`` that the task uses.
    """

    Settings: ClassVar[type[TaskConfig]] = TaskConfig
    sections: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, config: TrainConfig) -> None:
        self.config = config

    @classmethod
    def check(cls, config: TrainConfig) -> None:
        """Raise ValueError for a configuration that this task cannot run, before anything is read."""
        return

    @abstractmethod
    def open(self) -> None:
        """Read settings, such as the model's configuration, on each rank.

        Weights and data are read later. Raises ZerostartError.
        """

    @abstractmethod
    def items(self, world: World) -> Items:
        """Read and return all the data; collective. Raises ZerostartError."""

    def split(self, items: Items) -> tuple[Items, Items | None]:
        """Split ``items`` into training and held-out examples (None: none). Raises ConfigError."""
        return items, None

    def embedded(self, text: str) -> Mapping[str, torch.Tensor]:
        """Return the embeddings of ``text``, under the keys of examples; called after ``items``.

        Raises ConfigError for a text that was not encoded.
        """
        raise ConfigError(
            f"samples: no encoder has encoded the text {text!r}; name it in the prompts that are encoded"
        )

    @abstractmethod
    def builder(self) -> type[nn.Module] | Callable[[], nn.Module] | None:
        """Return the argument ``model`` of ``zerostart.load``."""

    @property
    def source(self) -> str:
        """The argument ``source`` of ``zerostart.load``."""
        return self.config.model.source

    @property
    def hidden_size(self) -> int | None:
        """Width of the model, from which engines choose buffer sizes; None: unknown."""
        return None

    def begin(self, model: nn.Module) -> None:
        """Prepare the loaded model, not yet wrapped by an engine, for training. Raises ConfigError."""
        return

    @abstractmethod
    def collator(self, seed: int) -> Collator:
        """Return the function that makes a batch of examples, without random draws (see ``drawn``).

        ``seed`` differs between ranks. Raises ConfigError.
        """

    @abstractmethod
    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Return the mean loss of one batch, []; ``model`` is wrapped by the engine.

        Every rank must call ``model`` equally often for any batch.
        """

    def drawn(self, batch: Batch, epoch: int) -> Batch:
        """Add the random draws of ``epoch`` (-1: held out) to ``batch`` (on the device).

        Draws should depend only on the seed of the run, the epoch and the example: then any number of ranks
        has the same.
        """
        return batch

    def saved_in(self, directory: Path) -> Path:
        """Return the path of the model within the output directory."""
        return directory

    def finish(self, directory: Path) -> None:
        """Write further files after the model is saved; on one rank. Raises ZerostartError."""
        return


#: The class of each task, or its module and name, which is imported on first use.
_TASKS: dict[str, str | type[Task]] = {
    "flow-matching": "zerostart.training.diffusion.flow:FlowMatching",
}


def register_task(name: str, task: type[Task]) -> None:
    """Register ``task`` for ``task.name: NAME`` of a configuration.

    Raises ConfigError for a name of another class, or one with a colon in it.
    """
    if ":" in name or not name:
        raise ConfigError(
            f"register_task: {name!r} is not a valid name for a task: it must not contain a colon"
        )
    if _TASKS.get(name, task) is not task:
        raise ConfigError(f"register_task: another task is named {name!r} already; choose another name")
    _TASKS[name] = task


def known_tasks() -> tuple[str, ...]:
    """Return the names of all registered tasks."""
    return tuple(_TASKS)


def task_class(name: str) -> type[Task]:
    """Return the task registered as ``name``, or the class that ``package.module:Class`` names.

    Modules in the working directory are found, too. Raises ConfigError if there is none.
    """
    target = _TASKS.get(name, name)
    if isinstance(target, type):
        return target
    module, colon, attribute = target.partition(":")
    if not colon:
        registered = ", ".join(sorted(_TASKS))
        raise ConfigError(
            f"{name!r} is unknown; choose one of {registered}, or package.module:Class of your own"
        )
    folder = str(Path.cwd())
    if folder not in sys.path:
        # At the end, so that installed modules come first.
        sys.path.append(folder)
    try:
        kind = getattr(importlib.import_module(module), attribute, None)
    except ImportError as error:
        raise ConfigError(f"{name!r}: the module {module} cannot be imported: {error}") from error
    if not (isinstance(kind, type) and issubclass(kind, Task)):
        raise ConfigError(f"{name!r} does not name a class derived from zerostart.training.Task")
    return kind
