"""Tasks, by name: data, model, loss and output of a training, without its loop."""

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


#: What a task makes of the examples of one batch: tensors, or lists of those that differ in shape.
Batch: TypeAlias = "dict[str, Any]"
#: From the examples of a batch to the batch.
Collator: TypeAlias = "Callable[[Sequence[dict[str, torch.Tensor]]], Batch]"


class Items(Protocol):
    """Examples to train on, the same on every rank; each is made when it is asked for."""

    def __len__(self) -> int:
        """How many there are."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """Example ``index``: tensors on the CPU."""

    def digest(self) -> str:
        """A digest of all examples: equal for equal data, wherever their files lie."""

    def shapes(self) -> Sequence[Hashable]:
        """A key for each example; those with the same key can be in one batch."""


class Part:
    """Some ranges of other examples, one after the other."""

    def __init__(self, items: Items, ranges: Sequence[range]) -> None:
        self._items = items
        self._ranges = ranges
        self._numbers = list(chain.from_iterable(ranges))

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        return self._items[self._numbers[index]]

    def digest(self) -> str:
        """A digest of the whole data set and of which part this is."""
        return self._items.digest() + "".join(f":{one.start}:{one.stop}" for one in self._ranges)

    def shapes(self) -> Sequence[Hashable]:
        """The keys of this part's examples."""
        every = self._items.shapes()
        return [every[number] for number in self._numbers]


def split_off(
    items: Items, fraction: float, repeats: int = 1, shares: Sequence[tuple[int, int]] = ()
) -> tuple[Items, Items | None]:
    """Split into ``(training, held out)``: the last ``fraction`` is held out; None if the fraction is 0.

    Where they come ``repeats`` times, one after the other, none that is held out is in any of these; of
    ``shares``, each so many examples and repeats, the last part of each is held out. At least one is held
    out, and at least one is left, of each: otherwise this raises ValueError.
    """
    if fraction == 0.0:
        return items, None
    trained, held, start = [], [], 0
    for count, times in shares or [(len(items) // repeats, repeats)]:
        kept = count - max(1, round(count * fraction))
        if kept < 1:
            raise ValueError(f"{fraction} leaves none of {count} to train on")
        rounds = (start + number * count for number in range(times))
        trained += [range(first, first + kept) for first in rounds]
        # Once, and not in each repeat: the loss on it would weigh the same several times.
        held.append(range(start + kept, start + count))
        start += count * times
    return Part(items, trained), Part(items, held)


class Task(ABC):
    """What is learnt, for one run: its data, its model, the loss of a batch, and what is saved.

    A class of one's own must give ``open``, ``items``, ``builder``, ``collator`` and ``loss``, and may give
    the rest. A task is made from the configuration of a run, on every rank; ``Settings`` has the keys of the
    section ``task``. ``sections`` are those of the sections ``media``, ``cache`` and ``samples`` that the
    task takes; others are refused by name.
    """

    Settings: ClassVar[type[TaskConfig]] = TaskConfig
    sections: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, config: TrainConfig) -> None:
        self.config = config

    @classmethod
    def check(cls, config: TrainConfig) -> None:
        """Raise ValueError for a configuration that this task cannot run; before anything is read."""
        return

    @abstractmethod
    def open(self) -> None:
        """Read what the run starts from, weights and data aside: settings, a tokenizer, a table's head.

        Every rank does by itself. Raises ZerostartError.
        """

    @abstractmethod
    def items(self, world: World) -> Items:
        """Read and return all the data; collective. Raises ZerostartError."""

    def split(self, items: Items) -> tuple[Items, Items | None]:
        """Split ``items`` into what is trained on and what is held out, if anything. Raises ConfigError."""
        return items, None

    def embedded(self, text: str) -> Mapping[str, torch.Tensor]:
        """The embeddings of ``text`` alone, under the keys of examples; called after ``items``.

        Raises ConfigError for a text of which they have made nothing.
        """
        raise ConfigError(
            f"samples: no encoder has encoded the text {text!r}; name it in the prompts that are encoded"
        )

    @abstractmethod
    def builder(self) -> type[nn.Module] | Callable[[], nn.Module] | None:
        """The model, as the argument ``model`` of ``zerostart.load``."""

    @property
    def source(self) -> str:
        """Where the weights are, as the argument ``source`` of ``zerostart.load``."""
        return self.config.model.source

    @property
    def hidden_size(self) -> int | None:
        """The width of the model, by which engines choose the sizes of buffers; None: not known."""
        return None

    def begin(self, model: nn.Module) -> None:
        """Called before training with the loaded model, not yet wrapped by an engine. Raises ConfigError."""
        return

    @abstractmethod
    def collator(self, seed: int) -> Collator:
        """How examples become a batch, without random draws of its own, which no checkpoint would have.

        ``seed`` is another one on each rank. Raises ConfigError.
        """

    @abstractmethod
    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Mean loss of one batch, []; ``model`` is as the engine wraps it.

        Every rank calls ``model`` equally often for a batch, whatever is in it.
        """

    def drawn(self, batch: Batch, epoch: int) -> Batch:
        """Add to ``batch`` (on the device) the random draws of its examples in ``epoch`` (-1: held out).

        It is to depend on the seed of the run, the epoch and the example alone, and so be the same however
        many ranks there are.
        """
        return batch

    def saved_in(self, directory: Path) -> Path:
        """Path of the model within the output directory."""
        return directory

    def finish(self, directory: Path) -> None:
        """Called when the model is saved, to write what else belongs in the output directory; on one rank.

        Raises ZerostartError.
        """
        return


#: Where the class of each task is; a module is imported when its task is first asked for.
_TASKS: dict[str, str | type[Task]] = {
    "flow-matching": "zerostart.training.diffusion.flow:FlowMatching",
}


def register_task(name: str, task: type[Task]) -> None:
    """Register ``task`` as the class that ``task.name: NAME`` of a configuration means.

    Raises :class:`ConfigError` for a name that is taken by another class, or one with a colon in it.
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
    """The task that is registered as ``name``, or the class that ``package.module:Class`` names.

    Modules beside which the run was started are found, too. Raises :class:`ConfigError` if there is none.
    """
    found = _TASKS.get(name, name)
    if isinstance(found, type):
        return found
    module, colon, attribute = found.partition(":")
    if not colon:
        known = ", ".join(sorted(_TASKS))
        raise ConfigError(f"{name!r} is unknown; choose one of {known}, or package.module:Class of your own")
    here = str(Path.cwd())
    if here not in sys.path:
        # At the end: nothing that is installed is hidden by a file that lies there.
        sys.path.append(here)
    try:
        kind = getattr(importlib.import_module(module), attribute, None)
    except ImportError as error:
        raise ConfigError(f"{name!r}: the module {module} cannot be imported: {error}") from error
    if not (isinstance(kind, type) and issubclass(kind, Task)):
        raise ConfigError(f"{name!r} does not name a class derived from zerostart.training.Task")
    return kind
