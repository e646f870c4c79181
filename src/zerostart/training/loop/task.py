"""Tasks, by name: data, model, loss and output of a training, without its loop."""

from __future__ import annotations

import importlib
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Span:
    """The examples ``start`` to ``end`` of a data set, of each of its ``rounds`` of ``each`` examples."""

    start: int
    end: int
    rounds: int = 1
    each: int = 0

    def __len__(self) -> int:
        return (self.end - self.start) * self.rounds


class Part:
    """Some spans of other examples, one after the other."""

    def __init__(self, items: Items, *spans: Span) -> None:
        self._items = items
        self._spans = spans

    def __len__(self) -> int:
        return sum(map(len, self._spans))

    def _among_all(self, place: int) -> int:
        """The number among all examples of that at ``place`` here. Raises IndexError."""
        for span in self._spans:
            if 0 <= place < len(span):
                # Round after round of the same places; from one round to the next there are ``each`` examples
                # in the whole.
                before, inner = divmod(place, span.end - span.start)
                return before * span.each + span.start + inner
            place -= len(span)
        raise IndexError(place)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if index < 0 or not len(self):
            raise IndexError(index)
        # Numbers beyond the length are of further versions, here as in the whole: only the length is another.
        version, place = divmod(index, len(self))
        return self._items[version * len(self._items) + self._among_all(place)]

    def in_epoch(self, place: int, epoch: int) -> int:
        """The number that gets example ``place`` in ``epoch``, where each epoch has versions of its own."""
        version = in_epoch(self._items, self._among_all(place), epoch) // len(self._items)
        return place + version * len(self)

    def digest(self) -> str:
        """A digest of the whole data set and of which part this is."""
        told = (
            f":{span.start}:{span.end}{f':{span.rounds}' if span.rounds > 1 else ''}" for span in self._spans
        )
        return f"{self._items.digest()}{''.join(told)}"

    def shapes(self) -> Sequence[Hashable]:
        """The keys of this part's examples, see ``Items.shapes``."""
        every = self._items.shapes()
        return [every[self._among_all(place)] for place in range(len(self))]


def in_epoch(items: Items, place: int, epoch: int) -> int:
    """The number by which example ``place`` of ``items`` is had in ``epoch``, as items with versions say.

    Numbers from ``len(items)`` on are of second versions, and so on; most items have one.
    """
    chosen: Callable[[int, int], int] | None = getattr(items, "in_epoch", None)
    return place if chosen is None else chosen(place, epoch)


def split_off(
    items: Items, fraction: float, repeats: int = 1, shares: Sequence[tuple[int, int]] = ()
) -> tuple[Items, Items | None]:
    """Split into ``(training, held out)``: the last ``fraction`` is held out; None if the fraction is 0.

    Where they come ``repeats`` times, one after the other, none that is held out is in any of these; of
    ``shares``, each so many examples and repeats, the last part of each is held out. At least one is held
    out, and at least one is left, of each: else this raises ValueError.
    """
    if fraction == 0.0:
        return items, None
    trained, held, start = [], [], 0
    for count, times in shares or [(len(items) // repeats, repeats)]:
        # Of each share its own last part, in all of its repeats: an example that is held out is in no round
        # of those that are trained on.
        kept = count - max(1, round(count * fraction))
        if kept < 1:
            raise ValueError(f"{fraction} leaves none of {count} to train on")
        trained.append(Span(start, start + kept, times, count))
        # Once, and not in each repeat: the loss on it would weigh the same several times.
        held.append(Span(start + kept, start + count))
        start += count * times
    return Part(items, *trained), Part(items, *held)


class TaskData(ABC):
    """The data of a task. It must give ``open`` and ``items``; what follows them it may give.

    ``sections`` are those of the sections ``media``, ``cache`` and ``samples`` that the task takes,
    ``needs`` those of them that it cannot do without; others are refused by name. ``examples`` is what people
    call them; ``data_key`` the key of the configuration that says where the data are.
    """

    sections: ClassVar[frozenset[str]] = frozenset()
    needs: ClassVar[frozenset[str]] = frozenset()
    examples: ClassVar[str] = "items"
    data_key: ClassVar[str] = "task.source"

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

    def facts(self) -> dict[str, str]:
        """Short digests of what ``open`` has read, by readable names; the same on all ranks."""
        return {}

    def described(self, items: Items) -> str:
        """The size of ``items`` in words, for the log."""
        return f"{len(items):,} {self.examples}"

    def embedded(self, text: str) -> Mapping[str, torch.Tensor]:
        """The embeddings of ``text`` alone, under the keys of examples; called after ``items``.

        Raises ConfigError for a text of which they have made nothing.
        """
        raise ConfigError(
            f"samples: no encoder has encoded the text {text!r}; name it in the prompts that are encoded"
        )


class TaskModel(ABC):
    """The model of a task. It must give ``builder``; what follows it may give."""

    config: TrainConfig

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


class TaskBatches(ABC):
    """The batches of a task, and their loss. It must give ``collator``, ``seen`` and ``loss``.

    ``whole_steps`` has an epoch be whole steps, of batches whose examples have one shape (`Buckets`);
    without it all are shuffled together, and an epoch may end within a step. ``counted`` is the key in
    ``metrics.jsonl`` of what a step has seen, and its rate in short; ``weightless`` is what an error says
    where no held-out example counts.
    """

    whole_steps: ClassVar[bool] = True
    counted: ClassVar[tuple[str, str]] = ("items", "items/s")
    weightless: ClassVar[str] = "the held-out examples have no weight, so they have no loss"

    @abstractmethod
    def collator(self, seed: int) -> Collator:
        """How examples become a batch; ``seed`` is for what is drawn while that is done, one for each rank.

        A collator that draws has its generator as the attribute ``generator``. Raises ConfigError.
        """

    @abstractmethod
    def seen(self, batch: Batch) -> int:
        """The size of a batch, in the unit that ``counted`` names."""

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

    def weighed(self, batch: Batch) -> tuple[Batch, int]:
        """Prepare ``batch`` so that its mean loss is a number; return it, and its weight within the step.

        A step's loss is the mean of the batches' losses by their weights; 0 for one that counts for nothing.
        """
        return batch, self.seen(batch)


class TaskOutput:
    """The files that a task writes beside the weights; all methods have defaults."""

    def saved_in(self, directory: Path) -> Path:
        """Path of the model within the output directory."""
        return directory

    def beside(self, folder: Path) -> None:
        """Write files that belong beside the weights to ``folder``; on one rank. Raises ZerostartError."""
        return

    def finish(self, directory: Path) -> None:
        """Called when the model is saved, to write what else belongs in the output directory; on one rank.

        Raises ZerostartError.
        """
        return


class Task(TaskData, TaskModel, TaskBatches, TaskOutput):
    """What is learnt, for one run: its data, its model, the loss of a batch, and what is saved.

    A class of one's own must give ``open``, ``items``, ``builder``, ``collator``, ``seen`` and ``loss``, and
    may give the rest. A task is made from the configuration of a run, on every rank; ``Settings`` has the
    keys of the section ``task``.
    """

    Settings: ClassVar[type[TaskConfig]] = TaskConfig

    def __init__(self, config: TrainConfig) -> None:
        self.config = config

    @classmethod
    def check(cls, config: TrainConfig) -> None:
        """Raise ValueError for a configuration that this task cannot run; before anything is read."""
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
    found = _TASKS.get(name)
    if isinstance(found, type):
        return found
    path = found or name
    module, colon, attribute = path.partition(":")
    if not colon:
        known = ", ".join(sorted(_TASKS))
        raise ConfigError(f"{name!r} is unknown; choose one of {known}, or package.module:Class of your own")
    return _checked(name, getattr(_imported(name, module), attribute, None))


def _imported(name: str, module: str) -> Any:
    here = str(Path.cwd())
    if here not in sys.path:
        # At the end: nothing that is installed is hidden by a file that lies there.
        sys.path.append(here)
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(f"{name!r}: the module {module} cannot be imported: {error}") from error


def _checked(name: str, found: object) -> type[Task]:
    if not (isinstance(found, type) and issubclass(found, Task)):
        raise ConfigError(f"{name!r} does not name a class derived from zerostart.training.Task")
    return found
