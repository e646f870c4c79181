"""Support several dtypes and masters from the checkpoint in DeepSpeed's ZeRO-3 optimizer.

With a marked parameter the optimizer becomes a subclass: each sub-group has one dtype, masters are read from
the checkpoint, and its constructor needs less memory (``zero3_start.py``).
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
from zerostart.upstream.deepspeed.zero3_partitions import (
    log_changed_masters,
    refresh_master,
    require_version,
)
from zerostart.upstream.guard import Function, Use, demand, find_misfits
from zerostart.upstream.patches import RefCountedPatches, Ticket, enter_on_import, wrap

if TYPE_CHECKING:
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

    from zerostart.upstream.types import ParameterGroup, ZeroParameter

#: Reads this rank's shares of parameters into 1-D fp32 tensors. Collective, in the same order.
Reader = Callable[[Sequence[tuple[str, torch.Tensor]]], None]
#: Makes the partitions of groups contiguous in their buffer, which may have other partitions.
Arrange = Callable[[Sequence[Sequence[torch.Tensor]], Sequence[torch.Tensor]], None]

Buffer = tuple[torch.dtype, object]

_ATTRIBUTE = "_zerostart_mark"
_OPTIMIZER = "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3"
_MODULE = "deepspeed.runtime.zero.partition_parameters"
_GATHER = Use(_MODULE, "_no_gather_coalesced", "experts of a single rank begin at a multiple of 16 bytes")
TOUCHED = (
    Use(
        _OPTIMIZER,
        "_get_trainable_parameter_groups, __init__",
        "the optimizer of marked parameters becomes our subclass",
    ),
    Use(
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
    ),
)


@dataclass(frozen=True)
class Zero3Mark:
    """Name of a parameter, reader of its master, and arranger of its load's partitions."""

    name: str
    reader: Reader | None
    arrange: Arrange | None
    tickets: tuple[Ticket, ...]
    load: object = None


@functools.cache
def require_stage3() -> type[DeepSpeedZeroOptimizer_Stage3]:
    """Return the class of the ZeRO-3 optimizer; raises UnsupportedVersionError."""
    require_version()
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
    """Make the optimizer of ``parameter`` our subclass."""
    require_stage3()
    tickets = (_patches.ticket(), _aligned.ticket())
    setattr(parameter, _ATTRIBUTE, Zero3Mark(name, reader, arrange, tickets, load))


def _enter(stack: ExitStack) -> None:
    wrap(stack, require_stage3(), "_get_trainable_parameter_groups", _get_groups)


def _get_groups(original: Function, optimizer: Any) -> object:
    groups: list[ParameterGroup] = original(optimizer)
    if any(hasattr(p, _ATTRIBUTE) for group in groups for p in group["params"]):
        base: type = type(optimizer)
        optimizer.__class__ = _subclass(base)
        groups = optimizer.split_by_buffer(groups)
        optimizer.arrange_partitions(groups)
    return groups


_patches = RefCountedPatches(_enter)

#: Alignment of addresses in bytes that TMA requires (CUDA's programming guide).
_ALIGNMENT = 16


def _align(stack: ExitStack, module: ModuleType) -> None:
    if not find_misfits((_GATHER,)):
        wrap(stack, module, "_no_gather_coalesced", _gather_aligned)


def _gather_aligned(original: Function, params: Iterable[ZeroParameter]) -> Any:
    """Copy gathered experts whose address a kernel would refuse.

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


_aligned = RefCountedPatches(lambda stack: enter_on_import(stack, _MODULE, _align))


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
        # It decides on loss scaling and offload buffers. DeepSpeed uses the first parameter's.
        self.dtype = max(by_dtype, key=lambda dtype: by_dtype[dtype])
        self.main_buffer = max((b for b in elements if b[0] == self.dtype), key=lambda b: elements[b])
        return split

    def arrange_partitions(self, groups: list[ParameterGroup]) -> None:
        # On NVMe, partitions have no common buffer.
        if self.params_in_nvme_and_cpu or not starting.is_known():
            return
        every: list[Any] = [p for p in self.module.parameters() if hasattr(p, "ds_tensor")]
        for load in dict.fromkeys(_buffer_of(group["params"][0])[1] for group in groups):
            own = [group["params"] for group in groups if _buffer_of(group["params"][0])[1] == load]
            marks = [_mark_of(p) for params in own for p in params]
            arrange = next((m.arrange for m in marks if m is not None and m.arrange is not None), None)
            if arrange is None:
                continue
            own.sort(key=lambda params: params[0].dtype != self.dtype)
            parts = [[p.ds_tensor for p in params] for params in own]
            largest = max((partition for part in parts for partition in part), key=torch.Tensor.numel)
            if starting.can_use(largest, self.offload_param):
                arrange(parts, [p.ds_tensor for p in every if _buffer_of(p)[1] == load])

    def _create_fp16_partitions_with_defragmentation(self, groups: list[ParameterGroup]) -> None:
        with starting.skip_defragment() if starting.is_known() else contextlib.nullcontext():
            super()._create_fp16_partitions_with_defragmentation(groups)

    def _has_other_buffers(self) -> bool:
        return any(_buffer_of(group[0]) != self.main_buffer for group in self.fp16_groups)

    def _get_parameter_partitions(self) -> list[torch.Tensor]:
        # ``defragment`` asserts one dtype and contiguous memory.
        return [p.ds_tensor for g in self.fp16_groups for p in g if _buffer_of(p) == self.main_buffer]

    def _set_fp16_partitioned_groups_flat(self) -> None:
        offset = 0
        for group in self.fp16_groups:
            numel = sum(p.partition_numel() for p in group)
            if _buffer_of(group[0]) == self.main_buffer:
                self.fp16_partitioned_groups_flat.append(self.lp_param_buffer.narrow(0, offset, numel))
                offset += numel
            else:
                self.fp16_partitioned_groups_flat.append(starting.flatten([p.ds_tensor for p in group]))

    def _create_param_groups_fp16_flat_cpu_memory(self) -> None:
        if not self.params_in_nvme_and_cpu and starting.is_known():
            parts = [[p.ds_tensor for p in group["params"]] for group in self.trainable_param_groups]
            flats = [starting.join_contiguous(part) for part in parts]
            if all(f is not None and starting.can_use(f, True) for f in flats):
                self.param_groups_fp16_flat_cpu_memory += [f for f in flats if f is not None]
                return
        super()._create_param_groups_fp16_flat_cpu_memory()
        for number, group in enumerate(self.trainable_param_groups):
            dtype = group["params"][0].dtype
            if dtype != self.dtype:
                buffer = self.param_groups_fp16_flat_cpu_memory[number]
                # DeepSpeed makes all in one dtype.
                flat = torch.empty(buffer.numel(), dtype=dtype, device="cpu", pin_memory=buffer.is_pinned())
                self.param_groups_fp16_flat_cpu_memory[number] = flat

    def offload_states(self, *args: object, **kwargs: object) -> None:
        if self._has_other_buffers():
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
        # Only swapping and ZenFlow write to these zero gradients.
        unread = starting.is_known() and not (self.swap_optimizer or self.zenflow)
        largest = max(sum(p.ds_numel for p in group) for group in self.fp16_partitioned_groups)
        with starting.SharedZeroGradients(largest) if unread else contextlib.nullcontext():
            super().initialize_optimizer_states()
        # Masters on NVMe are in memory one sub-group at a time.
        for number, group in enumerate(self.fp16_groups):
            if self._swappable_optimizer_subgroup(number) and any(map(_reader, group)):
                self._optimizer_states_and_gradient_swap_in(number)
                self._read_masters([number])
                self._optimizer_states_and_gradient_swap_out(number)

    def create_reduce_and_remove_grad_hooks(self) -> None:
        trained = [p for group in self.fp16_groups for p in group if _mark_of(p) is not None]
        with starting.skip_gathers(trained) if starting.is_known() else contextlib.nullcontext():
            super().create_reduce_and_remove_grad_hooks()

    def _read_masters(self, numbers: Sequence[int]) -> None:
        # Other masters have no more bits than the parameter.
        if self.master_weights_and_grads_dtype != torch.float32:
            return
        requests: dict[Reader, list[tuple[str, torch.Tensor]]] = {}
        pairs: list[tuple[ZeroParameter, torch.Tensor]] = []
        for number in numbers:
            flat = self.fp32_partitioned_groups_flat[number].detach()
            offset = 0
            for parameter in self.fp16_groups[number]:
                share = flat.narrow(0, offset, parameter.partition_numel())
                offset += share.numel()
                reader = _reader(parameter)
                if reader is not None:
                    requests.setdefault(reader, []).append((_name(parameter), share))
                    pairs.append((parameter, share))
        # Collective: one call for each load, in the order of the groups.
        for reader, shares in requests.items():
            reader(shares)
        for parameter, _ in pairs:
            setattr(parameter, _ATTRIBUTE, replace(getattr(parameter, _ATTRIBUTE), reader=None))
        # A master that does not round to its parameter's value belongs to an edited parameter.
        changed = [_name(parameter) for parameter, share in pairs if refresh_master(share, parameter)]
        log_changed_masters(changed)


def _mark_of(parameter: object) -> Zero3Mark | None:
    mark: Zero3Mark | None = getattr(parameter, _ATTRIBUTE, None)
    return mark


def _buffer_of(parameter: torch.Tensor) -> Buffer:
    mark = _mark_of(parameter)
    return parameter.dtype, None if mark is None else mark.load


def _reader(parameter: object) -> Reader | None:
    mark = _mark_of(parameter)
    return None if mark is None else mark.reader


def _name(parameter: object) -> str:
    mark: Zero3Mark = getattr(parameter, _ATTRIBUTE)
    return mark.name
