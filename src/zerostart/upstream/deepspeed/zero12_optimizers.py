"""Let DeepSpeed's optimizers of ZeRO stages 1 and 2 use the flat buffers of a load."""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import logging
import sys
import weakref
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

from zerostart.upstream.deepspeed.zero3_partitions import import_deepspeed, log_changed_masters, update_master
from zerostart.upstream.deepspeed.zero12_groups import TOUCHED as GROUPING
from zerostart.upstream.deepspeed.zero12_groups import (
    FlatBufferMark,
    Keeper,
    RunReader,
    grouping,
    mark_of,
    set_mark,
)
from zerostart.upstream.guard import Function, Use, find_misfits
from zerostart.upstream.patches import RefCountedPatches, patch, wrap
from zerostart.upstream.torch.byte_sums import lanes_of, to_signed
from zerostart.upstream.types import Arguments, Keywords

if TYPE_CHECKING:
    from deepspeed.runtime.base_optimizer import ZeROOptimizer
    from deepspeed.runtime.engine import DeepSpeedEngine

logger = logging.getLogger("zerostart")


class Adoption:
    """Construction of one optimizer, some of whose parameters are marked."""

    flatten: str
    #: Attribute with the groups that the constructor has reached.
    listed: str

    def __init__(self, optimizer: ZeROOptimizer, arguments: dict[str, Any]) -> None:
        from deepspeed.runtime.utils import is_optimized_parameter

        self.optimizer = optimizer
        self.arguments = arguments
        self.client = getattr(arguments["init_optimizer"], "param_groups", [])
        self.groups = [[p for p in group["params"] if is_optimized_parameter(p)] for group in self.client]
        self.flats: list[torch.Tensor | None] = [None] * len(self.groups)
        ours = any(mark_of(p) for group in self.groups for p in group)
        if ours and arguments.get("zenflow_config") is not None:
            logger.warning(
                "ZenFlow orders parameters in its own way: DeepSpeed flattens them itself, with a "
                "second copy of the model, and fp32 masters start from the parameters in their "
                "present precision"
            )
            ours = False
        self.concerned = ours

    def rules(self) -> tuple[bool, bool]:
        """Return whether the optimizer deals parameters round robin, and aligns each."""
        return False, False

    def ranks(self) -> list[dist.ProcessGroup]:
        """Return the process group that partitions each group."""
        from deepspeed.utils import groups

        experts = groups._get_expert_data_parallel_group_dict()
        world, parted = self.arguments["dp_process_group"], self.arguments["has_moe_layers"]
        return [experts[group["name"]] if parted and group.get("moe") else world for group in self.client]

    def adopt(self) -> None:
        """Sort the parameters in their buffers into the optimizer's order."""
        # A group's padding depends on how many ranks share it.
        partitions = [dist.get_world_size(group=ranks) for ranks in self.ranks()]
        keepers: list[Keeper] = []
        for own_mark in (mark_of(p) for group in self.groups for p in group):
            if own_mark is not None and own_mark.keeper not in keepers:
                keepers.append(own_mark.keeper)
        for keeper in keepers:
            # A keeper has a buffer only for groups that are completely in its load.
            buffers = keeper.adopt(self.groups, partitions, *self.rules())
            pairs = zip(self.flats, buffers, strict=True)
            self.flats = [new if new is not None else old for old, new in pairs]
        pairs_of_groups = enumerate(zip(self.flats, self.groups, strict=True))
        stock = [n for n, (flat, group) in pairs_of_groups if flat is None and any(map(mark_of, group))]
        if stock:
            logger.warning(
                "parameter groups %s hold parameters that zerostart did not load, or that were "
                "changed since: DeepSpeed flattens these groups itself",
                stock,
            )

    def current(self) -> torch.Tensor | None:
        """Return the buffer of the constructor's current group, or None."""
        # The constructor appends a group to its list, then flattens it.
        number = len(self.optimizer.__dict__.get(self.listed, ())) - 1
        return self.flats[number] if 0 <= number < len(self.flats) else None

    @contextlib.contextmanager
    def overrides(self) -> Iterator[None]:
        """Use our buffers inside, for the constructor."""
        original = getattr(self.optimizer, self.flatten)

        def flatten(tensors: Sequence[torch.Tensor], alignment: int, *args: Any, **kwargs: Any) -> object:
            flat = self.current()
            # If the predicted order is wrong, the optimizer makes its own copy.
            if flat is not None and _fits(flat, tensors, kwargs.get("param_padding"), alignment):
                return flat
            return original(tensors, alignment, *args, **kwargs)

        with patch(self.optimizer, self.flatten, flatten):
            yield

    def read_masters(self) -> None:
        """Read the masters of rounded parameters into this rank's partitions."""
        requests: dict[RunReader, list[tuple[str, int, torch.Tensor]]] = {}
        read: list[tuple[torch.Tensor, int, torch.Tensor]] = []
        for parameter, low, share in shares_of(self.optimizer):
            own_mark = mark_of(parameter)
            if own_mark is None or own_mark.reader is None or parameter.dtype == torch.float32:
                continue
            if share.dtype == torch.float32:
                requests.setdefault(own_mark.reader, []).append((own_mark.name, low, share))
                read.append((parameter, low, share))
        for reader, runs in requests.items():
            reader(runs)
        changed = []
        for parameter, low, share in read:
            own_mark = mark_of(parameter)
            assert own_mark is not None, "it was marked above"
            set_mark(parameter, replace(own_mark, reader=None))  # free what the reader refers to
            if update_master(share, parameter.detach().view(-1)[low : low + share.numel()]):
                changed.append(own_mark.name)
        log_changed_masters(changed)


def shares_of(optimizer: ZeROOptimizer) -> Iterator[tuple[torch.Tensor, int, torch.Tensor]]:
    """Yield each parameter, the first element of this rank's share, and its master as a 1-D view.

    ``_hp_mapping`` has the wrong order with ``round_robin_gradients``.
    """
    groups: list[tuple[list[torch.Tensor], list[int], torch.Tensor]]
    if hasattr(optimizer, "round_robin_bit16_groups"):
        o = optimizer
        parts = (o.round_robin_bit16_groups, o.round_robin_bit16_offsets, o.single_partition_of_fp32_groups)
        groups = list(zip(*parts, strict=True))
    else:
        flats = optimizer.fp32_groups_flat_partition
        groups = [(g, _ends(g), flat) for g, flat in zip(optimizer.bf16_groups, flats, strict=True)]
    for (parameters, offsets, master), ranks in zip(groups, optimizer.real_dp_process_group, strict=True):
        begin = dist.get_rank(group=ranks) * master.numel()
        for parameter, offset in zip(parameters, offsets, strict=True):
            low = min(max(begin - offset, 0), parameter.numel())
            high = max(low, min(begin + master.numel() - offset, parameter.numel()))
            at = max(offset + low - begin, 0) if low < high else 0
            yield parameter, low, master.detach()[at : at + high - low]


def _ends(parameters: Sequence[torch.Tensor]) -> list[int]:
    return [0, *itertools.accumulate(p.numel() for p in parameters)][: len(parameters)]


def _fits(
    flat: torch.Tensor, tensors: Sequence[torch.Tensor], padding: Sequence[int] | None, alignment: int
) -> bool:
    end = 0
    for tensor, pad in zip(tensors, padding or [0] * len(tensors), strict=True):
        if tensor.data_ptr() != flat.data_ptr() + end * flat.element_size() or tensor.dtype != flat.dtype:
            return False
        end += tensor.numel() + pad
    return end + -end % alignment == flat.numel()


TOUCHED = (
    Use(
        "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer",
        "__init__(*, init_optimizer, dp_process_group, round_robin_gradients, parameter_alignment, "
        "has_moe_layers, zenflow_config), flatten_dense_tensors_aligned(tensor_list, alignment, *, "
        "param_padding), initialize_optimizer_states, .bit16_groups, .cpu_offload, "
        ".master_weights_and_grads_dtype, .parallel_partitioned_bit16_groups, .round_robin_bit16_groups, "
        ".round_robin_bit16_offsets, .single_partition_of_fp32_groups",
        "the flat buffer of the load is taken as its own",
        source=(
            "__init__: self.parallel_partitioned_bit16_groups[i][partition_id].detach().clone().to(",
            "__init__: available_memory = accelerator.available_memory()",
            "initialize_optimizer_states: if not self.cpu_offload:",
        ),
    ),
    Use(
        "deepspeed.runtime.bf16_optimizer:BF16_Optimizer",
        "__init__(*, init_optimizer, dp_process_group, has_moe_layers), "
        "_flatten_dense_tensors_aligned(tensor_list, alignment), _setup_for_real_optimizer, .bf16_groups, "
        ".fp32_groups_flat_partition",
        "the same for stage 1 in bf16 with gradients in fp32",
    ),
    Use(
        "deepspeed.accelerator.abstract_accelerator:DeepSpeedAccelerator",
        "available_memory",
        "a group that is flat already needs no memory",
    ),
    Use(
        "deepspeed.runtime.utils", "is_optimized_parameter", "which parameters of a group the optimizers take"
    ),
    Use(
        "deepspeed.utils.groups",
        "_get_expert_data_parallel_group_dict",
        "the ranks among which a group of experts is partitioned",
    ),
)


def enter_constructors(stack: ExitStack) -> None:
    """Replace the constructors of both optimizers until ``stack`` ends."""
    from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    wrap(stack, DeepSpeedZeroOptimizer, "__init__", functools.partial(_construct, _Zero))
    wrap(stack, BF16_Optimizer, "__init__", functools.partial(_construct, _BF16))


def _construct(
    kind: type[Adoption], original: Function, optimizer: ZeROOptimizer, *args: Any, **kwargs: Any
) -> None:
    bound = inspect.signature(original).bind(optimizer, *args, **kwargs)
    bound.apply_defaults()
    adoption = kind(optimizer, bound.arguments)
    if not adoption.concerned:
        original(optimizer, *args, **kwargs)
        return
    # The constructor itself runs with gradients enabled.
    with torch.no_grad():
        adoption.adopt()
        with torch.enable_grad(), adoption.overrides():
            original(optimizer, *args, **kwargs)
        adoption.read_masters()


class _Zero(Adoption):
    flatten = "flatten_dense_tensors_aligned"
    listed = "bit16_groups"

    def rules(self) -> tuple[bool, bool]:
        return bool(self.arguments["round_robin_gradients"]), bool(self.arguments["parameter_alignment"])

    @contextlib.contextmanager
    def overrides(self) -> Iterator[None]:
        from deepspeed.accelerator import get_accelerator

        accelerator = get_accelerator()
        original = accelerator.available_memory

        def available_memory(*args: Any, **kwargs: object) -> object:
            # With less memory than a new buffer needs, the constructor would flatten on the CPU.
            return original(*args, **kwargs) if self.current() is None else sys.maxsize

        with (
            patch(accelerator, "available_memory", available_memory),
            super().overrides(),
            _SkipPartitionClone(self.optimizer),
            self._without_gradients(),
        ):
            yield

    @contextlib.contextmanager
    def _without_gradients(self) -> Iterator[None]:
        optimizer, original = self.optimizer, self.optimizer.initialize_optimizer_states

        def initialize() -> None:
            if optimizer.cpu_offload or isinstance(optimizer.optimizer, torch.optim.Adagrad):
                original()

        with patch(optimizer, "initialize_optimizer_states", initialize):
            yield


class _SkipPartitionClone(TorchFunctionMode):
    """Skip the clone of a partition before its conversion to the masters' dtype."""

    def __init__(self, optimizer: ZeROOptimizer) -> None:
        super().__init__()
        self._optimizer = optimizer

    def __torch_function__(
        self, func: Function, types: object, args: Arguments = (), kwargs: Keywords | None = None
    ) -> object:
        if func is torch.Tensor.clone and not kwargs and self._becomes_a_master(args[0]):
            return args[0]
        return func(*args, **(kwargs or {}))

    def _becomes_a_master(self, tensor: torch.Tensor) -> bool:
        partitions = self._optimizer.__dict__.get("parallel_partitioned_bit16_groups") or [[]]
        return tensor.dtype != self._optimizer.master_weights_and_grads_dtype and any(
            tensor.data_ptr() == part.data_ptr() and tensor.shape == part.shape for part in partitions[-1]
        )


class _BF16(Adoption):
    flatten = "_flatten_dense_tensors_aligned"
    listed = "bf16_groups"


_ENGINE = "deepspeed.runtime.engine:DeepSpeedEngine"
BUFFERS_TOUCHED = (
    Use(
        _ENGINE,
        "__init__(*, model, optimizer)",
        "buffers that wait on the host are brought to the device first",
    ),
    Use(
        _ENGINE,
        "_broadcast_model, .dist_backend",
        "parameters that hold the same bits on all ranks are not sent",
        source=("_broadcast_model: hasattr(p, 'ds_optim_param')",),
    ),
)


@functools.cache
def is_known() -> bool:
    """Return True if DeepSpeed is as expected; otherwise warn once."""
    import_deepspeed()
    wrong = find_misfits((*TOUCHED, *BUFFERS_TOUCHED, *GROUPING))
    if wrong:
        logger.warning("%s. deepspeed.initialize will flatten the parameters of stages 1 and 2 itself", wrong)
    return not wrong


def mark(parameter: torch.Tensor, name: str, keeper: Keeper) -> None:
    """Let the optimizer of ``parameter`` use its flat buffer."""
    if is_known():
        set_mark(parameter, FlatBufferMark(name, keeper, None, _patches.ticket()))


def offer(parameter: torch.Tensor, reader: RunReader) -> None:
    """Read the fp32 master of a marked parameter with ``reader``."""
    own_mark = mark_of(parameter)
    if own_mark is not None:
        set_mark(parameter, replace(own_mark, reader=reader))


def _enter(stack: ExitStack) -> None:
    from deepspeed.runtime.engine import DeepSpeedEngine

    enter_constructors(stack)
    grouping.open()
    stack.callback(grouping.close)
    wrap(stack, DeepSpeedEngine, "_broadcast_model", _broadcast_model)
    wrap(stack, DeepSpeedEngine, "__init__", _construct_engine)


_patches = RefCountedPatches(_enter)


def _construct_engine(original: Function, engine: DeepSpeedEngine, *args: Any, **kwargs: Any) -> None:
    model = inspect.signature(original).bind(engine, *args, **kwargs).arguments.get("model")
    for keeper in _keepers(model):
        # Before the constructor checks devices. Collective.
        keeper.bring()
    original(engine, *args, **kwargs)
    if engine.optimizer is not None:
        for keeper in _keepers(model):
            # Weakly: a model may outlive its engine, which would be kept with all its buffers.
            keeper.optimizer = weakref.ref(engine.optimizer)


def _keepers(model: object) -> list[Keeper]:
    parameters = model.parameters() if isinstance(model, torch.nn.Module) else ()
    return list({id(m.keeper): m.keeper for p in parameters if (m := mark_of(p)) is not None}.values())


def _broadcast_model(original: Function, engine: DeepSpeedEngine) -> None:
    """Broadcast only parameters that differ; DeepSpeed skips ``ds_optim_param``."""
    sharing: dict[str | None, list[Any]] = {}
    if engine.dist_backend is not None:
        for parameter in engine.module.parameters():
            if mark_of(parameter) is not None and not hasattr(parameter, "ds_optim_param"):
                # The comparison is collective in the group of the broadcast.
                sharing.setdefault(_experts_of(parameter), []).append(parameter)
    spared = []
    for name, parameters in sharing.items():
        ranks = engine.seq_data_parallel_group if name is None else engine.expert_data_parallel_group[name]
        spared += select_equal(parameters, ranks)
    for parameter in spared:
        parameter.ds_optim_param = True
    try:
        original(engine)
    finally:
        for parameter in spared:
            # Only for this call: other code of DeepSpeed's reads the same attribute.
            del parameter.ds_optim_param


def _experts_of(parameter: Any) -> str | None:
    return None if getattr(parameter, "allreduce", True) else parameter.group_name


def select_equal(parameters: Sequence[torch.Tensor], group: dist.ProcessGroup) -> list[Any]:
    """Return the parameters with the same bits on all ranks of ``group``; collective."""
    if not parameters or dist.get_world_size(group=group) == 1:
        return list(parameters)
    own = torch.tensor([fingerprint(parameter) for parameter in parameters], device=parameters[0].device)
    extremes = torch.stack([own, ~own])  # ~ reverses the order: the least of it is the greatest.
    dist.all_reduce(extremes, op=dist.ReduceOp.MIN, group=group)
    same = (extremes[0] == ~extremes[1]).all(1).tolist()
    return [parameter for parameter, one in zip(parameters, same, strict=True) if one]


def fingerprint(tensor: torch.Tensor) -> list[int]:
    """Return two 64-bit sums over the bytes of a tensor in row-major order."""
    octets = tensor.detach().contiguous().view(-1).view(torch.uint8)
    return [to_signed(lane) for lane in lanes_of(octets)]
