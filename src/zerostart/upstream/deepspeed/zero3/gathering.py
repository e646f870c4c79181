"""Private parts of DeepSpeed: what is looked at, and aligned, when ZeRO-3 parameters are gathered.

Changes in place that would be lost are errors. A partitioned parameter is an empty placeholder: what is
written into it outside of ``GatheredParameters`` goes nowhere. Inside, a change counts on ``modifier_rank``
alone; without one, and on another rank, it is dropped when the parameter is partitioned again. DeepSpeed
looks for the second kind if ``enable_sanity_checks`` is set, by version counters, which a change through
``.data`` leaves alone.

Of models that zerostart loaded, parameters are looked at when they have been gathered and before they are
partitioned again: the version counter, the memory, and the sum of the words, of large ones in blocks all over
them. On an accelerator, where the host would wait for that, only with ``enable_sanity_checks``; so are all
words summed, and the ranks agree before a step. A placeholder's version counter tells of changes outside;
DeepSpeed itself puts other memory into a parameter, and never counts it up.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from zerostart.errors import ConfigError
from zerostart.upstream.guard import Use, misfit
from zerostart.upstream.patches import RefCountedPatches, replaced, when_imported

if TYPE_CHECKING:
    from deepspeed.runtime.zero.partition_parameters import GatheredParameters

    from zerostart.upstream.deepspeed.types import ZeroParameter

_GATHERED = "deepspeed.runtime.zero.partition_parameters:GatheredParameters"
_WATCH = Use(
    _GATHERED,
    "__enter__, _exit",
    "parameters are looked at before and after: a change that would be lost is an error that names them",
)
_MODULE = "deepspeed.runtime.zero.partition_parameters"
_GATHER = Use(
    _MODULE,
    "_no_gather_coalesced",
    "experts that one rank has alone begin at a multiple of 16 bytes, which grouped kernels want",
)
TOUCHED = (_WATCH, _GATHER)
_ATTRIBUTE, _INSIDE = "_zerostart_version", "_zerostart_gathered"
#: Integers as wide as an element.
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
#: Words of a large parameter that are summed, of each of so many blocks: a few milliseconds.
_BLOCK, _BLOCKS = 1 << 10, 1 << 9
_REMEDY = (
    "Change it on one rank inside zerostart.gathered(model, name, modifier_rank=...) or "
    "deepspeed.zero.GatheredParameters(parameter, modifier_rank=...)"
)


def note(parameters: Iterable[torch.Tensor]) -> None:
    """Take what the ZeRO-3 ``parameters`` are now for unchanged."""
    for parameter in parameters:
        # With its identity: attributes may go from one parameter to another.
        setattr(parameter, _ATTRIBUTE, (id(parameter), parameter._version))


def is_gathered(parameter: torch.Tensor) -> bool:
    """Whether the ZeRO-3 ``parameter`` is inside a ``GatheredParameters`` that is being watched."""
    return getattr(parameter, _INSIDE, 0) > 0


def note_loaded(module: torch.nn.Module, _: object = None) -> None:
    """A hook after ``load_state_dict``: placeholders were given placeholders, as DeepSpeed's resuming does.

    Anything else does not fit into one, which is torch's own error.
    """
    note(parameter for parameter in module.parameters() if hasattr(parameter, _ATTRIBUTE))


def _lost(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Those of the ``parameters`` that were changed in place since they were noted."""
    # Without a note the identity is 0, which no object has: such parameters are never found changed.
    noted = ((p, getattr(p, _ATTRIBUTE, (0, 0))) for p in parameters)
    return [p for p, (which, version) in noted if which == id(p) and version != p._version]


def check_outside(parameters: Iterable[torch.Tensor], call: Callable[[torch.Tensor], str]) -> None:
    """Raise ConfigError for parameters that were changed outside; ``call`` says what one is called.

    Told once: they count as unchanged then, which is what their partitions are.
    """
    changed = _lost(parameters)
    note(changed)
    _raise_outside([call(parameter) for parameter in changed])


def check_step(
    parameters: Iterable[torch.Tensor], group: dist.ProcessGroup, call: Callable[[torch.Tensor], str]
) -> None:
    """``check_outside`` before a step, of what this rank has changed.

    With ``enable_sanity_checks`` collective, and the same on all ranks; else the step of the others, which
    waits for this rank, fails as it ends. Raises ConfigError.
    """
    parameters = list(parameters)
    changed = _lost(parameters)
    note(changed)
    names = [call(parameter) for parameter in changed]
    if (size := dist.get_world_size(group)) > 1 and any(map(_is_strict, parameters)):
        # Collective only where all ranks agree that it is: the flag is of the configuration, alike on all.
        told: list[list[str]] = [[] for _ in range(size)]
        dist.all_gather_object(told, names, group=group)
        names = list(dict.fromkeys(name for theirs in told for name in theirs))
    _raise_outside(names)


def _is_strict(parameter: object) -> bool:
    return bool(getattr(parameter, "ds_enable_sanity_checks", False))


def _is_watched(parameter: torch.Tensor) -> bool:
    """Whether zerostart loaded it, and looking at it costs little or is asked for."""
    on_host = parameter.data.device.type == "cpu"
    return hasattr(parameter, _ATTRIBUTE) and (on_host or _is_strict(parameter))


def _raise_outside(names: Sequence[str]) -> None:
    if names:
        raise ConfigError(
            f"{_listed(names)} changed in place while partitioned (ZeRO-3): the change is lost, "
            f"and the partitions are unchanged. {_REMEDY}"
        )


def watching(call: Callable[[torch.Tensor], str]) -> RefCountedPatches:
    """What watches ``GatheredParameters`` while it is held, of parameters that were noted.

    ``call`` says what a parameter is called.
    """

    def enter(stack: ExitStack) -> None:
        later = stack.enter_context(ExitStack())
        module, _, _ = _GATHERED.partition(":")
        stack.callback(when_imported(module, functools.partial(_watch_edits, later, call)))

    return RefCountedPatches(enter)


def _watch_edits(stack: ExitStack, call: Callable[[torch.Tensor], str], module: ModuleType) -> None:
    if misfit((_WATCH,)):
        return
    gathered: type[GatheredParameters] = module.__dict__["GatheredParameters"]
    enter, leave = gathered.__enter__, gathered._exit

    @functools.wraps(enter)
    def entered(self: GatheredParameters) -> object:
        result = enter(self)
        if self.enabled:
            _count(self.params, 1)
            # After the gathering: before it there are no contents to take a print of.
            watched = [p for p in self.params if _is_watched(p)]
            outside = {id(p) for p in _lost(watched)}
            self._zerostart_before = [(p, _print(p), id(p) in outside) for p in watched]
        return result

    @functools.wraps(leave)
    def exit_(self: GatheredParameters, *exc: object) -> object:
        before = getattr(self, "_zerostart_before", None)
        if before is not None:
            _count(self.params, -1)
        # An error inside is on its way on this rank maybe alone: a collective would wait for the others.
        if not before or (exc and exc[0] is not None):
            return leave(self, *exc)
        # Before the parameters are partitioned: afterwards what was written is gone.
        wrong = _judged(self, before)
        result = leave(self, *exc)
        # Partitioning has replaced their data, which counts as unchanged from here on.
        note(parameter for parameter, _, _ in before)
        for parameters, why in wrong:
            if parameters:
                names = [call(parameter) for parameter in parameters]
                raise ConfigError(f"{_listed(names)} changed {why}. {_REMEDY}")
        return result

    stack.enter_context(replaced(gathered, "__enter__", entered))
    stack.enter_context(replaced(gathered, "_exit", exit_))


def _count(parameters: Iterable[torch.Tensor], more: int) -> None:
    for parameter in parameters:
        setattr(parameter, _INSIDE, getattr(parameter, _INSIDE, 0) + more)


def _judged(
    context: GatheredParameters, before: Sequence[tuple[ZeroParameter, tuple[int, int, int], bool]]
) -> list[tuple[list[ZeroParameter], str]]:
    """Parameters whose change is lost, by how it came about, the same on all ranks; collective."""
    rank = dist.get_rank()
    rows = []
    for parameter, was, outside in before:
        source = context.src_rank_by_group.get(id(parameter.ds_process_group))
        now = _print(parameter)
        changed = now != was
        # Adapters are merged into frozen weights for a while, through ``.data``: that is meant to be lost.
        lost = changed if parameter.requires_grad else now[1] != was[1]
        rows.append([lost and source is None, changed and source not in (None, rank), False, outside])
        rows[-1][2] = changed and source == rank
    first = before[0][0]
    # One row for each parameter, four flags; the maximum over ranks is "any".
    flags = torch.tensor(rows, dtype=torch.int32, device=first.data.device)
    if dist.get_world_size(first.ds_process_group) > 1:
        dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=first.ds_process_group)
    inside, other, outside_ = list[object](), list[object](), list[Any]()
    for (parameter, *_), (nobody, elsewhere, here, before_) in zip(before, flags.tolist(), strict=True):
        if nobody:
            inside.append(parameter)
        # Where the modifier has changed it too, its values count: ranks may well have done the same.
        if elsewhere and not here:
            other.append(parameter)
        if before_:
            outside_.append(parameter)
    return [
        (inside, "inside GatheredParameters without modifier_rank: the change is lost"),
        (other, "inside GatheredParameters on a rank that is not modifier_rank, and not there: it is lost"),
        (outside_, "in place while partitioned (ZeRO-3): the change is lost"),
    ]


def _print(parameter: torch.Tensor) -> tuple[int, int, int]:
    """What tells that a gathered parameter has other contents."""
    data = parameter.data
    words = data.reshape(-1).view(_WORDS.get(data.itemsize, torch.int64))
    step = words.numel() // _BLOCKS
    if step > _BLOCK and not _is_strict(parameter):
        # Blocks at equal distances: an edit of a few elements may slip through, one of a tensor does not.
        words = words.as_strided((_BLOCKS, _BLOCK), (step, 1))
    return data.data_ptr(), parameter._version, int(words.sum(dtype=torch.int64))


def _listed(names: Sequence[str], shown: int = 5) -> str:
    rest = f" and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(names[:shown]) + rest + (" was" if len(names) == 1 else " were")


# Alignment. A parameter that one rank has alone is not gathered: it is a view of DeepSpeed's one buffer of
# all partitions, which lie there without a gap. Behind one of four elements in bf16 (the sinks of a small
# gpt_oss) all begin beside a multiple of 16 bytes, which ``torch._grouped_mm`` refuses on CUDA, of stock
# models as of ours. Of models that zerostart loaded, experts that lie so are copied when they are gathered,
# as on more ranks all are.

#: What TMA wants of an address (CUDA's programming guide), and so the kernels that copy by it.
BYTES = 16


def aligning(is_loaded: Callable[[object], bool]) -> RefCountedPatches:
    """What aligns gathered experts while it is held, of parameters for which ``is_loaded`` is true."""

    def enter(stack: ExitStack) -> None:
        later = stack.enter_context(ExitStack())
        stack.callback(when_imported(_MODULE, functools.partial(_align, later, is_loaded)))

    return RefCountedPatches(enter)


def _align(stack: ExitStack, is_loaded: Callable[[object], bool], module: ModuleType) -> None:
    if misfit((_GATHER,)):
        return
    name = "_no_gather_coalesced"
    stock = module.__dict__[name]

    @functools.wraps(stock)
    def gathered(params: Iterable[ZeroParameter]) -> Any:
        params = list(params)
        handle = stock(params)
        for parameter in params:
            experts = len(parameter.ds_shape) > 2 and is_loaded(parameter)
            if experts and parameter.data.data_ptr() % BYTES:
                parameter.data = parameter.data.clone()
        return handle

    stack.enter_context(replaced(module, name, gathered))
