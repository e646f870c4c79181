"""Private parts of DeepSpeed's ZeRO stage 1 and 2 optimizers: how one takes our flat buffers when it is made.

What both optimizers share; ``zerostart.upstream.deepspeed.zero12.optimizers`` has each.
"""

from __future__ import annotations

import abc
import contextlib
import itertools
import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from zerostart.upstream.deepspeed.state.masters import follow, tell_changed
from zerostart.upstream.deepspeed.zero12.marks import Keeper, RunReader, marked, remark
from zerostart.upstream.patches import replaced
from zerostart.upstream.registry import PatchPoint, Use
from zerostart.upstream.versions import DEEPSPEED

logger = logging.getLogger("zerostart")

TOUCHED = (
    Use(
        library=DEEPSPEED,
        owner="deepspeed.runtime.utils",
        names=("is_optimized_parameter",),
        why="which parameters of a group the optimizers take",
    ),
    Use(
        library=DEEPSPEED,
        owner="deepspeed.utils.groups",
        names=("_get_expert_data_parallel_group_dict",),
        why="the ranks among which a group of experts is partitioned",
    ),
)


class Adoption(abc.ABC):
    """The construction of one optimizer over parameters of which some carry a mark."""

    #: The method that flattens a group.
    flatten: PatchPoint

    def __init__(self, optimizer: Any, arguments: dict[str, Any]) -> None:
        from deepspeed.runtime.utils import is_optimized_parameter

        self.optimizer = optimizer
        self.arguments = arguments
        self.client = getattr(arguments["init_optimizer"], "param_groups", [])
        self.groups = [[p for p in group["params"] if is_optimized_parameter(p)] for group in self.client]
        self.flats: list[torch.Tensor | None] = [None] * len(self.groups)
        ours = any(marked(p) for group in self.groups for p in group)
        if ours and arguments.get("zenflow_config") is not None:
            logger.warning(
                "ZenFlow lays parameters out in an order of its own: DeepSpeed flattens them itself, with a "
                "second copy of the model, and fp32 masters start from the parameters as they are held"
            )
            ours = False
        self.concerned = ours

    def rules(self) -> tuple[bool, bool]:
        """Whether the optimizer deals parameters round robin, and aligns each of them."""
        return False, False

    def ranks(self) -> list[Any]:
        """Of each group the process group that partitions it: an expert group has its own."""
        from deepspeed.utils import groups

        experts = groups._get_expert_data_parallel_group_dict()
        world, parted = self.arguments["dp_process_group"], self.arguments["has_moe_layers"]
        return [experts[group["name"]] if parted and group.get("moe") else world for group in self.client]

    def adopt(self) -> None:
        """Bring the parameters into the optimizer's order, in the buffers where they lie."""
        partitions = [dist.get_world_size(group=ranks) for ranks in self.ranks()]
        keepers: list[Keeper] = []
        for found in (marked(p) for group in self.groups for p in group):
            if found is not None and found.keeper not in keepers:
                keepers.append(found.keeper)
        for keeper in keepers:
            taken = keeper.adopt(self.groups, partitions, *self.rules())
            self.flats = [new if new is not None else old for old, new in zip(self.flats, taken, strict=True)]
        left = [n for n, flat in enumerate(self.flats) if flat is None and any(map(marked, self.groups[n]))]
        if left:
            logger.warning(
                "parameter groups %s hold parameters that were not loaded by zerostart, or not as they are "
                "now: DeepSpeed flattens these groups itself",
                left,
            )

    def current(self) -> torch.Tensor | None:
        """The buffer of the group that the constructor is at, None if it has to make one."""
        number = len(self.made()) - 1
        return self.flats[number] if 0 <= number < len(self.flats) else None

    @abc.abstractmethod
    def made(self) -> list[Any]:
        """The groups that the constructor has come to."""

    @contextlib.contextmanager
    def overrides(self) -> Iterator[None]:
        """Have the object take our buffers, for the time of its constructor."""
        (name,) = self.flatten.names
        original = getattr(self.optimizer, name)

        def flatten(tensors: Sequence[torch.Tensor], alignment: int, *args: Any, **kwargs: Any) -> Any:
            flat = self.current()
            if flat is not None and _fits(flat, tensors, kwargs.get("param_padding"), alignment):
                return flat
            return original(tensors, alignment, *args, **kwargs)

        with replaced(self.flatten, self.optimizer, name, flatten):
            yield

    @contextlib.contextmanager
    def cleaned_up(self) -> Iterator[None]:
        """If the body fails, leave no hook and no buffer behind, and the client's optimizer as it was."""
        before = [list(group["params"]) for group in self.client]
        try:
            yield
        except BaseException:
            for hook in self.optimizer.__dict__.get("_grad_acc_hooks", []):
                hook.remove()
            for parameter in (p for group in self.groups for p in group):
                if getattr(parameter, "_hp_mapping", None) is not None:
                    parameter._hp_mapping = None
            for group, parameters in zip(self.client, before, strict=True):
                group["params"] = parameters
            # The traceback holds the object: what it made is not to live as long.
            self.optimizer.__dict__.clear()
            raise

    def read_masters(self) -> None:
        """Read the masters of rounded parameters into this rank's partitions."""
        wanted: dict[RunReader, list[tuple[str, int, torch.Tensor]]] = {}
        read: list[tuple[Any, int, torch.Tensor]] = []
        for parameter, low, share in shares_of(self.optimizer):
            found = marked(parameter)
            if found is None or found.reader is None or parameter.dtype == torch.float32:
                continue
            if share.dtype == torch.float32:
                wanted.setdefault(found.reader, []).append((found.name, low, share))
                read.append((parameter, low, share))
        for reader, runs in wanted.items():
            reader(runs)
        changed = []
        for parameter, low, share in read:
            found = marked(parameter)
            assert found is not None, "it was marked above"
            remark(parameter, replace(found, reader=None))  # what is behind the reader can go
            if follow(share, parameter.detach().view(-1)[low : low + share.numel()]):
                changed.append(found.name)
        tell_changed(changed)


def shares_of(optimizer: Any) -> Iterator[tuple[Any, int, torch.Tensor]]:
    """Of each parameter of a finished optimizer this rank's share of its master, as a 1-D view.

    With the element of the parameter's row-major order that the share begins with; a share may be empty.
    ``_hp_mapping``, which DeepSpeed leaves on parameters, is no way to it: with ``round_robin_gradients`` and
    without padding it takes the parameters in the order before they were dealt.
    """
    groups: list[tuple[list[Any], list[int], torch.Tensor]]
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
    """Where each of ``parameters`` begins when they lie one after another."""
    return [0, *itertools.accumulate(p.numel() for p in parameters)][: len(parameters)]


def _fits(
    flat: torch.Tensor, tensors: Sequence[torch.Tensor], padding: Sequence[int] | None, alignment: int
) -> bool:
    """Whether ``flat`` is what flattening ``tensors`` would give, in size and in the place of each."""
    end = 0
    for tensor, pad in zip(tensors, padding or [0] * len(tensors), strict=True):
        if tensor.data_ptr() != flat.data_ptr() + end * flat.element_size() or tensor.dtype != flat.dtype:
            return False
        end += tensor.numel() + pad
    return end + -end % alignment == flat.numel()
