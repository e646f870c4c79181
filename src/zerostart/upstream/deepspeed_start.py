"""Private parts of DeepSpeed: memory that the ZeRO-3 optimizer's constructor takes beside what it keeps.

Known for the versions in ``upstream.deepspeed.SUPPORTED`` (runtime/zero/stage3.py, runtime/zero/utils.py).
Five parts of it are run with an eye on what they allocate:

- ``defragment`` copies the partitions into a new buffer on the host, and that one to the device. Partitions
  that lie next to each other already (``joined``) are such a buffer.
- ``_create_param_groups_fp16_flat_cpu_memory`` pins a second copy of partitions on the host. The same.
- ``_create_fp32_partitions`` converts a sub-group (by default all of a rank's share) to fp32, on the device
  where the result goes to the host, and keeps a clone: for a moment there are two masters.
- ``initialize_optimizer_states`` makes a gradient buffer as large as the largest sub-group. Where no states
  are swapped, nobody reads it.
- ``create_reduce_and_remove_grad_hooks`` gathers every parameter, whole, in order to hang a hook on it. One
  that runs after a gradient is accumulated needs no data (``ungathered``).
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import os
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

__all__ = ["Converted", "Unread", "defragmenting", "joined", "known", "takes", "ungathered"]

logger = logging.getLogger("zerostart")

#: What the overrides build on, by method, as its source says it.
_LINES = {
    "_create_fp16_partitions_with_defragmentation": (
        "self.lp_param_buffer = defragment(parameter_partitions)",
        "self._create_param_groups_fp16_flat_cpu_memory()",
    ),
    "_create_fp32_partitions": (
        "converted = self.fp16_partitioned_groups_flat[i].to(self.device,",
        "self.fp32_partitioned_groups_flat.append(converted.clone().detach())",
    ),
    "initialize_optimizer_states": (
        "gradient_buffer = torch.zeros(int(largest_numel), dtype=gradient_dtype, device=self.device)",
        "self.fp32_partitioned_groups_flat[i].grad = gradient_buffer.narrow(0, 0, num_elements)",
    ),
    "create_reduce_and_remove_grad_hooks": (
        "param.all_gather()\n",
        "register_grad_hook(param, reduce_partition_and_remove_grads)",
        "param.partition()\n",
    ),
}
#: Elements that are converted at a time where a device does it for the host.
_CHUNK = 1 << 22


@functools.cache
def known() -> bool:
    """Whether the optimizer's constructor does what is described above; warns once if it does not."""
    import deepspeed
    from deepspeed.runtime.zero import stage3

    module: Any = stage3
    optimizer = module.DeepSpeedZeroOptimizer_Stage3
    strange = [] if hasattr(module, "defragment") else ["defragment"]
    if "param.register_post_accumulate_grad_hook(hook)" not in _source(module, "register_grad_hook"):
        strange.append("register_grad_hook")
    for name, lines in _LINES.items():
        source = _source(optimizer, name)
        if not all(line in source for line in lines):
            strange.append(name)
    if strange:
        logger.warning(
            "DeepSpeed %s: %s of its ZeRO-3 optimizer is not as zerostart knows it. deepspeed.initialize "
            "runs as it is, and takes up to twice the memory that it keeps",
            deepspeed.__version__,
            ", ".join(strange),
        )
    return not strange


def _source(owner: Any, name: str) -> str:
    try:
        return inspect.getsource(getattr(owner, name))
    except (AttributeError, OSError, TypeError):
        return ""


def takes(partition: torch.Tensor, offloaded: bool) -> bool:
    """Whether the optimizer can keep a parameter buffer of the kind that ``partition`` lies in.

    On the accelerator, any. On the host it wants page-locked memory where there is an accelerator, and frees
    what DeepSpeed's own allocator of such memory (``DS_PIN_MEMORY_BACKEND=native``) made.
    """
    from deepspeed.accelerator import get_accelerator

    if not offloaded:
        return True
    if os.environ.get("DS_PIN_MEMORY_BACKEND", "torch").strip().lower() == "native":
        return False
    on_host = partition.device.type == "cpu"
    return on_host and (get_accelerator().device_name() == "cpu" or partition.is_pinned())


def joined(partitions: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """The run of one storage that 1-D tensors of one dtype make up together; None if they do not."""
    if not partitions:
        return None
    first = partitions[0]
    place = first.storage_offset()
    for partition in partitions:
        same = partition.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not same or partition.dtype != first.dtype or partition.storage_offset() != place:
            return None
        place += partition.numel()
    numel = place - first.storage_offset()
    return first.detach().as_strided((numel,), (1,), first.storage_offset())


@contextlib.contextmanager
def defragmenting() -> Iterator[None]:
    """Inside, ``defragment`` leaves partitions where they are if they need not be moved."""
    from deepspeed.runtime.zero import stage3

    module: Any = stage3
    original = module.defragment

    @functools.wraps(original)
    def defragment(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        whole = joined(tensors)
        return original(tensors) if whole is None else whole

    module.defragment = defragment
    try:
        yield
    finally:
        module.defragment = original


@contextlib.contextmanager
def ungathered(parameters: Sequence[Any]) -> Iterator[None]:
    """Inside, those of the ZeRO-3 ``parameters`` that are partitioned stay so, and are not gathered.

    Where there are secondary partitions they are, since these are made when a parameter is partitioned.
    """
    spared = [
        p for p in parameters if p.ds_status.name == "NOT_AVAILABLE" and p.ds_zero_param_process_group is None
    ]
    methods = [(p, p.all_gather, p.partition) for p in spared]
    for parameter in spared:
        parameter.all_gather = parameter.partition = _nothing
    try:
        yield
    finally:
        for parameter, all_gather, partition in methods:
            parameter.all_gather, parameter.partition = all_gather, partition


def _nothing() -> None:
    pass


class Converted(TorchFunctionMode):
    """Inside, ``x.to(...).clone()`` makes one new tensor and not two, in pieces."""

    def __init__(self) -> None:
        super().__init__()
        self._made: torch.Tensor | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.clone and self._made is not None and args[0] is self._made:
            made, self._made = self._made, None
            return made
        if func is torch.Tensor.to and args[0].dim() == 1:
            source = args[0]
            like = func(source[:0], *args[1:], **kwargs)
            if (like.dtype, like.device) != (source.dtype, source.device):
                self._made = like.new_empty(source.numel())
                for start in range(0, source.numel(), _CHUNK):
                    self._made[start : start + _CHUNK].copy_(source[start : start + _CHUNK])
                return self._made
        return func(*args, **kwargs)


class Unread(TorchFunctionMode):
    """Inside, the first ``torch.zeros(n)`` is one zero, seen n times: enough for what is never written."""

    def __init__(self) -> None:
        super().__init__()
        self._done = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.zeros and not self._done:
            self._done = True
            return torch.zeros(1, **(kwargs or {})).expand(*args)
        return func(*args, **(kwargs or {}))
