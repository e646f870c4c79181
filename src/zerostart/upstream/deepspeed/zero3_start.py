"""Save temporary memory in the constructor of DeepSpeed's ZeRO-3 optimizer."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import sys
import weakref
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from zerostart.upstream.deepspeed.zero3_partitions import mark_leaves
from zerostart.upstream.guard import Function, Use, demand, find_misfits
from zerostart.upstream.patches import RefCountedPatches, patch, wrap
from zerostart.upstream.types import Arguments, Keywords

if TYPE_CHECKING:
    from deepspeed.runtime.engine import DeepSpeedEngine

logger = logging.getLogger("zerostart")

_DEFRAGMENT = Use(
    "deepspeed.runtime.zero.stage3",
    "defragment",
    "contiguous partitions are not moved",
)
_MEMORY = Use(
    "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3",
    "_create_fp32_partitions, initialize_optimizer_states, create_reduce_and_remove_grad_hooks",
    "the optimizer's constructor takes less memory",
    source=(
        "_create_fp16_partitions_with_defragmentation: defragment(parameter_partitions)",
        "_create_fp32_partitions: .append(converted.clone().detach())",
        "initialize_optimizer_states: torch.zeros(int(largest_numel), dtype=gradient_dtype, ",
        "create_reduce_and_remove_grad_hooks: register_grad_hook(param, reduce_partition_and_remove_grads)",
    ),
)
_BEGINNING = Use(
    "deepspeed.runtime.engine:DeepSpeedEngine",
    "_configure_zero_optimizer(optimizer), _configure_distributed_model(model)",
    "the model is not printed at the start of ZeRO-3, and small frozen parts stay whole",
)
#: Number of elements to convert at a time.
_CHUNK = 1 << 22


@functools.cache
def is_known() -> bool:
    """Return True if the optimizer's constructor is as expected; otherwise warn once."""
    wrong = find_misfits((_DEFRAGMENT, _MEMORY))
    if wrong:
        logger.warning(
            "%s. deepspeed.initialize starts unpatched at ZeRO-3, and takes up to twice the "
            "memory that it keeps",
            wrong,
        )
    return not wrong


def can_use(partition: torch.Tensor, offloaded: bool) -> bool:
    """Return True if the optimizer can use the buffer of ``partition`` as its own."""
    from deepspeed.accelerator import get_accelerator

    if not offloaded:
        return True
    if os.environ.get("DS_PIN_MEMORY_BACKEND", "torch").strip().lower() == "native":
        return False
    on_host = partition.device.type == "cpu"
    return on_host and (get_accelerator().device_name() == "cpu" or partition.is_pinned())


def join_contiguous(partitions: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Join 1-D tensors that are contiguous in one storage without a copy; None for others."""
    if not partitions:
        return None
    first = partitions[0]
    place = first.storage_offset()
    for partition in partitions:
        # Adjacent addresses are not enough: no view spans two storages.
        same = partition.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not same or partition.dtype != first.dtype or partition.storage_offset() != place:
            return None
        place += partition.numel()
    numel = place - first.storage_offset()
    return first.detach().as_strided((numel,), (1,), first.storage_offset())


def flatten(partitions: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return one buffer of the partitions, which become views of it."""
    run = join_contiguous(partitions)
    if run is not None:
        return run
    flat = torch.cat([partition.data for partition in partitions])
    offset = 0
    for partition in partitions:
        partition.data = flat.narrow(0, offset, partition.numel())
        offset += partition.numel()
    return flat


@contextlib.contextmanager
def skip_defragment() -> Iterator[None]:
    """Skip ``defragment`` inside the block if the partitions are contiguous."""
    from deepspeed.runtime.zero import stage3

    with ExitStack() as stack:
        wrap(stack, stage3, "defragment", _defragment)
        yield


def _defragment(original: Function, tensors: Sequence[torch.Tensor]) -> Any:
    whole = join_contiguous(tensors)
    return original(tensors) if whole is None else whole


@contextlib.contextmanager
def skip_gathers(parameters: Sequence[Any]) -> Iterator[None]:
    """Skip gathers of ``parameters`` inside the block, except with secondary partitions."""
    spared = [
        p for p in parameters if p.ds_status.name == "NOT_AVAILABLE" and p.ds_zero_param_process_group is None
    ]
    with ExitStack() as stack:
        for parameter in spared:
            for name in ("all_gather", "partition"):
                stack.enter_context(patch(parameter, name, lambda: None))
        yield


class FuseToClone(TorchFunctionMode):
    """Make one new tensor, not two, for ``x.to(...).clone()``."""

    def __init__(self) -> None:
        super().__init__()
        self._made: torch.Tensor | None = None

    def __torch_function__(
        self, func: Function, types: object, args: Arguments = (), kwargs: Keywords | None = None
    ) -> object:
        kwargs = kwargs or {}
        if func is torch.Tensor.clone and self._made is not None and args[0] is self._made:
            made, self._made = self._made, None
            return made
        if func is torch.Tensor.to and args[0].dim() == 1:
            source = args[0]
            like = func(source[:0], *args[1:], **kwargs)
            if (like.dtype, like.device) != (source.dtype, source.device):
                # In pieces, without a whole converted copy on the device.
                self._made = like.new_empty(source.numel())
                for start in range(0, source.numel(), _CHUNK):
                    self._made[start : start + _CHUNK].copy_(source[start : start + _CHUNK])
                return self._made
        return func(*args, **kwargs)


class SharedZeroGradients(TorchFunctionMode):
    """Make the first ``torch.zeros(numel)`` one expanded zero, which is never written to."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        self._numel = numel
        self._done = False

    def __torch_function__(
        self, func: Function, types: object, args: Arguments = (), kwargs: Keywords | None = None
    ) -> object:
        if func is torch.zeros and args == (self._numel,) and not self._done:
            self._done = True
            return torch.zeros(1, **(kwargs or {})).expand(*args)
        return func(*args, **(kwargs or {}))


# DeepSpeed prints the whole model at the start of ZeRO-3. Modules of DiffSynth-Studio fail to print.

_MODULE = "deepspeed.runtime.engine"
#: Models that remain whole on every rank while they are frozen.
_kept_whole: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def keep_whole(model: nn.Module) -> None:
    """Keep ``model`` whole in an engine at ZeRO-3, unless it is trained.

    Ranks may then call it unequally often.
    """
    _kept_whole.add(model)
    keep_printable(model)


def _hide(model: nn.Module, device: torch.device) -> None:
    """Make parameters buffers, and the model a leaf, which DeepSpeed neither partitions nor hooks."""
    for module in model.modules():
        for name in list(module._parameters):
            parameter = module._parameters.pop(name)
            module._buffers[name] = None if parameter is None else parameter.detach().to(device)
    mark_leaves([model])


def keep_printable(model: nn.Module) -> None:
    """Skip DeepSpeed's print of ``model`` and of modules that contain it."""
    if _MODULE in sys.modules:
        _printable.hold(model)


def _patch_start(stack: ExitStack) -> None:
    demand((_BEGINNING,))
    owner = sys.modules[_MODULE].__dict__["DeepSpeedEngine"]
    wrap(stack, owner, "_configure_zero_optimizer", _configure_quietly)
    wrap(stack, owner, "_configure_distributed_model", _take_model)


def _configure_quietly(original: Function, engine: DeepSpeedEngine, optimizer: object) -> object:
    kind = type(engine.module)
    with patch(kind, "__repr__", lambda _: f"{kind.__name__}()"):
        return original(engine, optimizer)


def _take_model(original: Function, engine: DeepSpeedEngine, model: nn.Module) -> object:
    if engine.zero_optimization_partition_weights():
        parts = [part for part in model.modules() if part in _kept_whole and part is not model]
        for part in parts:  # not the model itself: DeepSpeed needs a parameter
            if not any(parameter.requires_grad for parameter in part.parameters()):
                _hide(part, engine.device)
    return original(engine, model)


_printable = RefCountedPatches(_patch_start)
