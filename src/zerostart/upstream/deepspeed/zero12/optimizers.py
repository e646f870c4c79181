"""Private parts of DeepSpeed's ZeRO stage 1 and 2 optimizers: their construction over our flat buffers.

See ``zerostart.upstream.deepspeed.zero12.buffers``, which has the way in. The overrides live on the one
object that is constructed, and end with its constructor, also when that fails.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from zerostart.upstream.deepspeed.zero12.adoption import Adoption
from zerostart.upstream.patches import replaced
from zerostart.upstream.registry import Lasts, Otherwise, PatchPoint
from zerostart.upstream.shapes import Shape
from zerostart.upstream.versions import DEEPSPEED

_ZERO_OPTIMIZER = "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer"
_BF16_OPTIMIZER = "deepspeed.runtime.bf16_optimizer:BF16_Optimizer"
_ZERO = PatchPoint(
    library=DEEPSPEED,
    owner=_ZERO_OPTIMIZER,
    names=("__init__",),
    attributes=(
        "bit16_groups",
        "cpu_offload",
        "master_weights_and_grads_dtype",
        "parallel_partitioned_bit16_groups",
        "round_robin_bit16_groups",
        "round_robin_bit16_offsets",
        "single_partition_of_fp32_groups",
    ),
    why="the flat buffer of the load is taken as its own, and masters are read from the checkpoint",
    lasts=Lasts.MODEL,
    otherwise=Otherwise.STOCK,
    shapes=(
        Shape(
            f"{_ZERO_OPTIMIZER}.__init__",
            takes=(
                "init_optimizer",
                "dp_process_group",
                "round_robin_gradients",
                "parameter_alignment",
                "has_moe_layers",
                "zenflow_config",
            ),
            has=(
                "self.nccl_start_alignment_factor = 2",
                "is_optimized_parameter(P)",
                "self.bit16_groups.append(G)",
                "A = 16 // math.gcd(16, E) if self.parameter_alignment else 1",
                "self._round_robin_reorder(...)",
                "self.flatten_dense_tensors_aligned(self.round_robin_bit16_groups[I], A, use_cpu_data=False, "
                "param_padding=P)",
                "self.bit16_groups_flat.append(F)",
                "self._update_model_bit16_weights(I)",
                "P = self.get_data_parallel_partitions(self.bit16_groups_flat[I], I)",
                "self.parallel_partitioned_bit16_groups.append(P)",
                "self.single_partition_of_fp32_groups.append(M)",
                "self._grad_acc_hooks = []",
                "self.initialize_optimizer_states()",
            ),
        ),
    ),
)
_BFLOAT16 = PatchPoint(
    library=DEEPSPEED,
    owner=_BF16_OPTIMIZER,
    names=("__init__",),
    attributes=("bf16_groups", "fp32_groups_flat_partition"),
    why="the same for stage 1 in bf16 with gradients in fp32",
    lasts=Lasts.MODEL,
    otherwise=Otherwise.STOCK,
    shapes=(
        Shape(
            f"{_BF16_OPTIMIZER}.__init__",
            takes=("init_optimizer", "dp_process_group", "has_moe_layers"),
        ),
        Shape(
            f"{_BF16_OPTIMIZER}._setup_for_real_optimizer",
            has=(
                "is_optimized_parameter(P)",
                "self.bf16_groups.append(G)",
                "self._flatten_dense_tensors_aligned(self.bf16_groups[I], A)",
                "self._update_storage_to_flattened_tensor(..., tensor_list=self.bf16_groups[I])",
                "self.fp32_groups_flat_partition.append(M)",
                "self._grad_acc_hooks = []",
            ),
        ),
    ),
)
_FLATTEN = PatchPoint(
    library=DEEPSPEED,
    owner=_ZERO_OPTIMIZER,
    names=("flatten_dense_tensors_aligned",),
    why="of the one optimizer: gives the buffer in which the parameters lie already",
    lasts=Lasts.CONSTRUCTION,
    otherwise=Otherwise.STOCK,
    shapes=(
        Shape(
            f"{_ZERO_OPTIMIZER}.flatten_dense_tensors_aligned",
            leads=("tensor_list", "alignment"),
            takes=("param_padding",),
        ),
    ),
)
_FLATTEN_BFLOAT16 = PatchPoint(
    library=DEEPSPEED,
    owner=_BF16_OPTIMIZER,
    names=("_flatten_dense_tensors_aligned",),
    why="of the one optimizer: the same",
    lasts=Lasts.CONSTRUCTION,
    otherwise=Otherwise.STOCK,
    shapes=(
        Shape(
            f"{_BF16_OPTIMIZER}._flatten_dense_tensors_aligned",
            leads=("tensor_list", "alignment"),
        ),
    ),
)
_MEMORY = PatchPoint(
    library=DEEPSPEED,
    owner="deepspeed.accelerator.abstract_accelerator:DeepSpeedAccelerator",
    names=("available_memory",),
    why="a group that is flat already needs no memory, and so does not go by way of the CPU",
    lasts=Lasts.CONSTRUCTION,
    otherwise=Otherwise.STOCK,
    shapes=(
        Shape(
            f"{_ZERO_OPTIMIZER}.__init__",
            has=(
                "self.bit16_groups.append(G)",
                "M = A.available_memory() if A.is_available() else 0",
                "F = A.is_available() and M >= N",
                "self.flatten_dense_tensors_aligned(...)",
            ),
            once=("X.available_memory()",),
        ),
    ),
)
_MASTERS = PatchPoint(
    library=DEEPSPEED,
    owner=_ZERO_OPTIMIZER,
    names=("__init__",),
    why="run in a mode of torch in which a partition that becomes a master of another dtype is not cloned",
    lasts=Lasts.CONSTRUCTION,
    otherwise=Otherwise.STOCK,
    shapes=(
        Shape(
            f"{_ZERO_OPTIMIZER}.__init__",
            has=(
                "self.parallel_partitioned_bit16_groups.append(P)",
                "M = self.parallel_partitioned_bit16_groups[I][R].detach().clone().to(device=self.device, "
                "dtype=self.master_weights_and_grads_dtype)",
                "self.single_partition_of_fp32_groups.append(M)",
            ),
            once=("X.clone(...)",),
        ),
    ),
)
_STATES = PatchPoint(
    library=DEEPSPEED,
    owner=_ZERO_OPTIMIZER,
    names=("initialize_optimizer_states",),
    why="of the one optimizer: gradients that it makes to drop them are left out",
    lasts=Lasts.CONSTRUCTION,
    otherwise=Otherwise.STOCK,
    shapes=(
        Shape(
            f"{_ZERO_OPTIMIZER}.initialize_optimizer_states",
            has=(
                "G = torch.zeros(...)",
                "self.single_partition_of_fp32_groups[I].grad = ...",
                "if isinstance(self.optimizer, torch.optim.Adagrad): ...",
                "if not self.cpu_offload: ...",
                "G.grad = None",
            ),
            lacks=("self.optimizer.step(...)",),
        ),
    ),
)
TOUCHED = (
    _ZERO,
    _BFLOAT16,
    _FLATTEN,
    _FLATTEN_BFLOAT16,
    _MEMORY,
    _MASTERS,
    _STATES,
)


def enter_constructors(stack: ExitStack) -> None:
    """Replace the constructors of both optimizers, for parameters with our mark, until ``stack`` ends."""
    from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    for point, owner, kind in ((_ZERO, DeepSpeedZeroOptimizer, _Zero), (_BFLOAT16, BF16_Optimizer, _BF16)):
        new = _constructor(owner.__init__, kind)
        stack.enter_context(replaced(point, owner, "__init__", new))


def _constructor(original: Any, kind: type[Adoption]) -> Any:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def construct(self: Any, *args: Any, **kwargs: Any) -> None:
        bound = signature.bind(self, *args, **kwargs)
        bound.apply_defaults()
        adoption = kind(self, bound.arguments)
        if not adoption.concerned:
            original(self, *args, **kwargs)
            return
        with adoption.cleaned_up(), torch.no_grad():
            adoption.adopt()
            with torch.enable_grad(), adoption.overrides():
                original(self, *args, **kwargs)
            adoption.read_masters()

    return construct


class _Zero(Adoption):
    """``DeepSpeedZeroOptimizer``."""

    flatten = _FLATTEN

    def rules(self) -> tuple[bool, bool]:
        return bool(self.arguments["round_robin_gradients"]), bool(self.arguments["parameter_alignment"])

    def made(self) -> list[Any]:
        return list(self.optimizer.__dict__.get("bit16_groups", ()))

    @contextlib.contextmanager
    def overrides(self) -> Iterator[None]:
        """A group that is flat already does not go by way of the CPU, and nothing is made to be dropped."""
        from deepspeed.accelerator import get_accelerator

        accelerator = get_accelerator()
        original = accelerator.available_memory

        def available_memory(*args: Any, **kwargs: Any) -> Any:
            return original(*args, **kwargs) if self.current() is None else sys.maxsize

        with (
            replaced(_MEMORY, accelerator, "available_memory", available_memory),
            super().overrides(),
            _Uncopied(self.optimizer),
            self._without_gradients(),
        ):
            yield

    @contextlib.contextmanager
    def _without_gradients(self) -> Iterator[None]:
        """Leave out gradients of zero that are dropped at once.

        ``initialize_optimizer_states`` gives the masters gradients for the sake of Adagrad, whose states
        come with its construction; without offload they go when it ends.
        """
        optimizer, original = self.optimizer, self.optimizer.initialize_optimizer_states

        def initialize() -> None:
            if optimizer.cpu_offload or isinstance(optimizer.optimizer, torch.optim.Adagrad):
                original()

        with replaced(_STATES, optimizer, "initialize_optimizer_states", initialize):
            yield


class _Uncopied(TorchFunctionMode):
    """Inside, masters of another dtype are made of the partition itself.

    The constructor takes ``partition.detach().clone().to(...)``, and the clone matters only where ``to``
    returns it: it is half as big as the masters of bf16 parameters, and lives beside them.
    """

    def __init__(self, optimizer: Any) -> None:
        super().__init__()
        self._optimizer = optimizer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.clone and not kwargs and self._becomes_a_master(args[0]):
            return args[0]
        return func(*args, **(kwargs or {}))

    def _becomes_a_master(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` is a partition of the group that the constructor is at."""
        partitions = self._optimizer.__dict__.get("parallel_partitioned_bit16_groups") or [[]]
        return tensor.dtype != self._optimizer.master_weights_and_grads_dtype and any(
            tensor.data_ptr() == part.data_ptr() and tensor.shape == part.shape for part in partitions[-1]
        )


class _BF16(Adoption):
    """``BF16_Optimizer``: stage 1 in bf16 with gradients accumulated in fp32."""

    flatten = _FLATTEN_BFLOAT16

    def made(self) -> list[Any]:
        return list(self.optimizer.__dict__.get("bf16_groups", ()))
