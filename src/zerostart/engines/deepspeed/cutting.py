"""This rank's part of what ranks share in a model: slices of tensors, then experts, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch.distributed as dist
from torch import nn

from zerostart.distributed.world import World
from zerostart.engines.deepspeed.settings import DeepSpeedSettings
from zerostart.geometry.layout import Parallelism

#: Leaves this rank's part in a model, None where ranks share nothing; the ranks that partition each
#: parameter then, None for all.
Cutter = tuple[Callable[[nn.Module], None] | None, dist.ProcessGroup | None]


def cutter(world: World, settings: DeepSpeedSettings, parallelism: Parallelism, partitioned: bool) -> Cutter:
    """What leaves this rank's experts or slices in a model. Collective.

    ``partitioned``: they are partitioned further, and not kept whole.
    """
    from zerostart.engines.deepspeed.experts import expert_cutter
    from zerostart.engines.deepspeed.tensors import tensor_cutter

    cuts, owners = list[Callable[[nn.Module], None]](), None
    if parallelism.mesh.tensor_parallel > 1:
        cut, owners = tensor_cutter(world, parallelism, settings.tensors, settings.tp_plan)
        cuts.append(cut)
    if parallelism.mesh.expert_parallel > 1:
        cuts.append(expert_cutter(world, parallelism, partitioned))
    return partial(_cut_all, cuts) if cuts else None, owners


def _cut_all(cuts: Sequence[Callable[[nn.Module], None]], model: nn.Module) -> None:
    for cut in cuts:
        cut(model)
