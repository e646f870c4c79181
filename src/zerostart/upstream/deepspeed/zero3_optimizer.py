"""Private parts of DeepSpeed's ZeRO-3 optimizer: several dtypes, and fp32 masters from the checkpoint.

If a parameter carries a mark, ``_get_trainable_parameter_groups`` turns the optimizer into a subclass with
our overrides: sub-groups of one dtype each, masters that are read again, less memory (``zero3_start.py``).
"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch

from zerostart.errors import EngineError
from zerostart.upstream.deepspeed import zero3_start as starting
from zerostart.upstream.deepspeed.zero3_partitions import follow_partition, require, tell_changed
from zerostart.upstream.guard import Function, Use, demand, misfit
from zerostart.upstream.patches import RefCountedPatches, Ticket, enter_when_imported, wrap

if TYPE_CHECKING:
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

    from zerostart.upstream.types import ParameterGroup, ZeroParameter

#: Fills 1-D fp32 tensors with this rank's shares of parameters, by name. Collective, in the same order.
Reader = Callable[[Sequence[tuple[str, torch.Tensor]]], None]
#: Brings the partitions of groups next to each other, in their buffer; others that may lie there come along.
Arrange = Callable[[Sequence[Sequence[torch.Tensor]], Sequence[torch.Tensor]], None]

Buffer = tuple[torch.dtype, object]

_ATTRIBUTE = "_zerostart_mark"
_OPTIMIZER = "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3"
_ENTRY = Use(
    _OPTIMIZER,
    "_get_trainable_parameter_groups, __init__",
    "the optimizer of marked parameters becomes our subclass",
)
_SUBCLASS = Use(
    _OPTIMIZER,
    "_get_parameter_partitions, _set_fp16_partitioned_groups_flat, "
    "_create_param_groups_fp16_flat_cpu_memory, _create_fp32_partitions, initialize_optimizer_states, "
    "create_reduce_and_remove_grad_hooks, offload_states, "
    "_create_fp16_partitions_with_defragmentation, _setup_for_real_optimizer, .dp_process_group, "
    ".dtype, .fp16_groups, .fp16_partitioned_groups, .fp16_partitioned_groups_flat, "
    ".fp32_partitioned_groups_flat, .lp_param_buffer, .master_weights_and_grads_dtype, .module, "
    ".offload_optimizer, .offload_param, .param_groups_fp16_flat_cpu_memory, .params_in_nvme_and_cpu, "
    ".swap_optimizer, .trainable_param_groups, _swappable_optimizer_subgroup, "
    "_optimizer_states_and_gradient_swap_in, _optimizer_states_and_gradient_swap_out",
    "overridden for several dtypes and masters of the checkpoint",
)
_MODULE = "deepspeed.runtime.zero.partition_parameters"
_GATHER = Use(
    _MODULE, "_no_gather_coalesced", "experts that one rank has alone begin at a multiple of 16 bytes"
)
TOUCHED = (_ENTRY, _SUBCLASS)


@dataclass(frozen=True)
class Mark:
    """The name of a parameter, the reader of its master, and what arranges partitions of its ``load``."""

    name: str
    reader: Reader | None
    arrange: Arrange | None
    held: tuple[Ticket, ...]
    load: object = None


@functools.cache
def require_stage3() -> type[DeepSpeedZeroOptimizer_Stage3]:
    """The class of the ZeRO-3 optimizer; raises UnsupportedVersionError if it is not as we know it."""
    require()
    demand(TOUCHED)
    from deepspeed.runtime.zero import stage3

    optimizer: type[DeepSpeedZeroOptimizer_Stage3] = stage3.DeepSpeedZeroOptimizer_Stage3
    return optimizer


def mark(
    parameter: torch.Tensor,
    name: str,
    reader: Reader | None,
    arrange: Arrange | None = None,
    load: object = None,
) -> None:
    """Have the optimizer that gets ``parameter`` take it by the rules of this module, while it lives."""
    require_stage3()
    held = (_held.ticket(), _aligned.ticket())
    setattr(parameter, _ATTRIBUTE, Mark(name, reader, arrange, held, load))


def _enter(stack: ExitStack) -> None:
    wrap(stack, require_stage3(), "_get_trainable_parameter_groups", _get_groups)


def _get_groups(original: Function, optimizer: Any) -> object:
    groups: list[ParameterGroup] = original(optimizer)
    # Without a mark it stays the stock optimizer, also while other models' marks keep this in place.
    if any(hasattr(p, _ATTRIBUTE) for group in groups for p in group["params"]):
        base: type = type(optimizer)
        optimizer.__class__ = _subclass(base)
        groups = optimizer.split_by_buffer(groups)
        optimizer.arrange_partitions(groups)
    return groups


_held = RefCountedPatches(_enter)

#: Alignment of addresses in bytes that TMA requires (CUDA's programming guide).
_ALIGNMENT = 16


def _align(stack: ExitStack, module: ModuleType) -> None:
    if not misfit((_GATHER,)):
        wrap(stack, module, "_no_gather_coalesced", _gather_aligned)


def _gather_aligned(original: Function, params: Iterable[ZeroParameter]) -> Any:
    """Copy gathered experts of loaded models that a kernel would refuse for their address.

    On one rank DeepSpeed gathers nothing: a parameter is a view of its one buffer of all partitions. After a
    small parameter such a view is not aligned, and ``torch._grouped_mm`` refuses it on CUDA.
    """
    params = list(params)
    handle = original(params)
    for parameter in params:
        experts = len(parameter.ds_shape) > 2 and _mark_of(parameter) is not None
        if experts and parameter.data.data_ptr() % _ALIGNMENT:
            parameter.data = parameter.data.clone()
    return handle


_aligned = RefCountedPatches(lambda stack: enter_when_imported(stack, _MODULE, _align))


@functools.cache
def _subclass(base: type) -> type:
    return type(base.__name__, (_Overrides, base), {"__module__": base.__module__})


_Optimizer: Any = object


class _Overrides(_Optimizer):  # type: ignore[misc]
    def split_by_buffer(self, groups: list[ParameterGroup]) -> list[ParameterGroup]:
        elements: Counter[Buffer] = Counter()
        split = []
        for group in groups:
            by_buffer: dict[Buffer, list[ZeroParameter]] = {}
            for parameter in group["params"]:
                by_buffer.setdefault(_buffer_of(parameter), []).append(parameter)
                elements[_buffer_of(parameter)] += parameter.ds_numel
            split += [{**group, "params": params} for params in by_buffer.values()]
        by_dtype: Counter[torch.dtype] = Counter()
        for (dtype, _), count in elements.items():
            by_dtype[dtype] += count
        # Stock takes the first parameter's; it decides on loss scaling and on the buffers of offloading.
        self.dtype = max(by_dtype, key=lambda dtype: by_dtype[dtype])
        self.main_buffer = max((b for b in elements if b[0] == self.dtype), key=lambda b: elements[b])
        return split

    def arrange_partitions(self, groups: list[ParameterGroup]) -> None:
        # On NVMe partitions come and go by themselves, and have no buffer of the load to lie in.
        if self.params_in_nvme_and_cpu or not starting.is_known():
            return
        every: list[Any] = [p for p in self.module.parameters() if hasattr(p, "ds_tensor")]
        for load in dict.fromkeys(_buffer_of(group["params"][0])[1] for group in groups):
            own = [group["params"] for group in groups if _buffer_of(group["params"][0])[1] == load]
            marks = [_mark_of(p) for params in own for p in params]
            arrange = next((m.arrange for m in marks if m is not None and m.arrange is not None), None)
            if arrange is None:
                continue
            own.sort(key=lambda params: params[0].dtype != self.dtype)  # Those of one buffer without a gap.
            parts = [[p.ds_tensor for p in params] for params in own]
            largest = max((partition for part in parts for partition in part), key=torch.Tensor.numel)
            if starting.takes(largest, self.offload_param):
                arrange(parts, [p.ds_tensor for p in every if _buffer_of(p)[1] == load])

    def _create_fp16_partitions_with_defragmentation(self, groups: list[ParameterGroup]) -> None:
        with starting.defragmenting() if starting.is_known() else contextlib.nullcontext():
            super()._create_fp16_partitions_with_defragmentation(groups)

    def _of_other_buffers(self) -> bool:
        return any(_buffer_of(group[0]) != self.main_buffer for group in self.fp16_groups)

    def _get_parameter_partitions(self) -> list[torch.Tensor]:
        # Of the main dtype and load only, so that ``defragment`` finds what it asserts.
        return [p.ds_tensor for g in self.fp16_groups for p in g if _buffer_of(p) == self.main_buffer]

    def _set_fp16_partitioned_groups_flat(self) -> None:
        offset = 0
        for group in self.fp16_groups:
            numel = sum(p.partition_numel() for p in group)
            if _buffer_of(group[0]) == self.main_buffer:
                self.fp16_partitioned_groups_flat.append(self.lp_param_buffer.narrow(0, offset, numel))
                offset += numel
            else:
                self.fp16_partitioned_groups_flat.append(starting.flattened([p.ds_tensor for p in group]))

    def _create_param_groups_fp16_flat_cpu_memory(self) -> None:
        if not self.params_in_nvme_and_cpu and starting.is_known():
            parts = [[p.ds_tensor for p in group["params"]] for group in self.trainable_param_groups]
            flats = [starting.joined(part) for part in parts]
            if all(f is not None and starting.takes(f, True) for f in flats):
                self.param_groups_fp16_flat_cpu_memory += [f for f in flats if f is not None]
                return
        super()._create_param_groups_fp16_flat_cpu_memory()
        for number, group in enumerate(self.trainable_param_groups):
            dtype = group["params"][0].dtype
            if dtype != self.dtype:
                buffer = self.param_groups_fp16_flat_cpu_memory[number]
                # Stock makes all in one dtype; pinned or not, as it has decided.
                other = torch.empty(buffer.numel(), dtype=dtype, device="cpu", pin_memory=buffer.is_pinned())
                self.param_groups_fp16_flat_cpu_memory[number] = other

    def offload_states(self, *args: object, **kwargs: object) -> None:
        if self._of_other_buffers():
            raise EngineError(
                "offload_states() moves ZeRO-3 parameters of one dtype and one load; this model mixes them"
            )
        super().offload_states(*args, **kwargs)

    def _create_fp32_partitions(self) -> None:
        with starting.FuseToClone() if starting.is_known() else contextlib.nullcontext():
            super()._create_fp32_partitions()
        swapped = self._swappable_optimizer_subgroup
        self._read_masters([n for n in range(len(self.fp16_groups)) if not swapped(n)])

    def initialize_optimizer_states(self) -> None:
        # What it gives the masters as gradients is zero, and never written to; swapping and ZenFlow write it.
        unread = starting.is_known() and not (self.swap_optimizer or self.zenflow)
        largest = max(sum(p.ds_numel for p in group) for group in self.fp16_partitioned_groups)
        with starting.SharedZeroGradients(largest) if unread else contextlib.nullcontext():
            super().initialize_optimizer_states()
        # Masters on NVMe exist in memory a sub-group at a time, between these two calls, as in a step.
        for number, group in enumerate(self.fp16_groups):
            if self._swappable_optimizer_subgroup(number) and any(map(_reader, group)):
                self._optimizer_states_and_gradient_swap_in(number)
                self._read_masters([number])
                self._optimizer_states_and_gradient_swap_out(number)

    def create_reduce_and_remove_grad_hooks(self) -> None:
        trained = [p for group in self.fp16_groups for p in group if _mark_of(p) is not None]
        with starting.ungathered(trained) if starting.is_known() else contextlib.nullcontext():
            super().create_reduce_and_remove_grad_hooks()

    def _read_masters(self, numbers: Sequence[int]) -> None:
        # Masters of less than fp32 hold nothing that the parameter does not.
        if self.master_weights_and_grads_dtype != torch.float32:
            return
        wanted: dict[Reader, list[tuple[str, torch.Tensor]]] = {}
        pairs: list[tuple[ZeroParameter, torch.Tensor]] = []
        for number in numbers:
            flat = self.fp32_partitioned_groups_flat[number].detach()
            offset = 0
            for parameter in self.fp16_groups[number]:
                share = flat.narrow(0, offset, parameter.partition_numel())
                offset += share.numel()
                reader = _reader(parameter)
                if reader is not None:
                    wanted.setdefault(reader, []).append((_name(parameter), share))
                    pairs.append((parameter, share))
        # Collective: one call for each load, in the order of the groups.
        for reader, shares in wanted.items():
            reader(shares)
        for parameter, _ in pairs:
            setattr(parameter, _ATTRIBUTE, replace(getattr(parameter, _ATTRIBUTE), reader=None))
        # A master that does not round to what the parameter holds is of a parameter that was edited since.
        changed = [_name(parameter) for parameter, share in pairs if follow_partition(share, parameter)]
        tell_changed(changed)


def _mark_of(parameter: object) -> Mark | None:
    found: Mark | None = getattr(parameter, _ATTRIBUTE, None)
    return found


def _buffer_of(parameter: torch.Tensor) -> Buffer:
    found = _mark_of(parameter)
    return parameter.dtype, None if found is None else found.load


def _reader(parameter: object) -> Reader | None:
    found = _mark_of(parameter)
    return None if found is None else found.reader


def _name(parameter: object) -> str:
    found: Mark = getattr(parameter, _ATTRIBUTE)
    return found.name
