"""Forecast the memory that FSDP2 takes after a load.

Source: ``torch/distributed/fsdp/_fully_shard``, torch 2.11 to 2.15. The sharded parameters are trained in the
dtype in which they are held, and the optimizer's states have that dtype too. While the model runs, the root's
own parameters remain gathered from the forward into the backward. A unit's parameters are gathered into one
buffer and copied out of it; the buffer is freed when the next unit has been gathered. In the backward the
next unit is gathered before the present one is finished. Gradients of a unit are copied into one buffer,
freed, and reduce-scattered; that buffer is freed when the next unit has its gradients. Gathered parameters
and travelling gradients have the dtype of the policy. Without a policy for gradients they keep their dtype,
and from torch 2.15 on have that of the shards.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from torch import nn

from zerostart.engines.forecast import MemoryInputs, MemoryPeak, ParameterBytes
from zerostart.engines.fsdp2.settings import FSDP2Settings
from zerostart.engines.fsdp2.units import find_blocks
from zerostart.upstream.torch.fsdp2 import are_reduced_as_shards


@dataclass(frozen=True)
class Units:
    """Elements that FSDP2 gathers and reduces at once."""

    #: Elements of the root's own unit.
    root: int
    #: Elements of the root whose gradients come first, because it uses them after its units: all except its
    #: first parameter, or that one if it is tied.
    late: int
    #: Elements of the largest other unit.
    largest: int
    #: Elements of all units.
    total: int
    #: Ranks that share a parameter.
    shares: int
    #: True if all units remain gathered.
    kept: bool
    #: Bytes of a gathered element.
    itemsize: int
    #: Bytes of an element of gradients on their way.
    reduced: int
    offloaded: bool

    @classmethod
    def of(cls, model: nn.Module, settings: FSDP2Settings, shares: ParameterBytes, world_size: int) -> Units:
        """Compute the units of ``model`` after a load."""
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        sizes = shares.gathers.elements
        left, largest = dict(sizes), 0
        for block in find_blocks(model, settings.wrap):
            inside = {names[id(p)] for p in block.parameters()} & left.keys()
            largest = max(largest, sum(left.pop(name) for name in inside))
        policy = settings.mp_policy
        computing = (policy.param_dtype if policy is not None else None) or shares.dtype
        reducing = policy.reduce_dtype if policy is not None else None
        reducing = reducing or (shares.dtype if are_reduced_as_shards() else computing)
        of_root = list(left.values())
        return cls(
            root=sum(of_root),
            late=sum(of_root[1:] or of_root),
            largest=largest,
            total=sum(sizes.values()),
            shares=settings.shape(world_size)[1],
            kept=settings.reshard_after_forward is False,
            itemsize=computing.itemsize,
            reduced=reducing.itemsize,
            offloaded=settings.offloaded,
        )


def after_load(inputs: MemoryInputs, units: Units) -> list[MemoryPeak]:
    """Forecast the creation of an optimizer and the first step."""
    shares, target = inputs.shares, inputs.target
    gradients = shares.trained * shares.dtype.itemsize
    states = inputs.optimizer.states * gradients
    inner = gradients * (units.total - units.root) // max(1, units.total)
    itemsize = units.itemsize
    gathered = itemsize * (units.total if units.kept else units.root)
    flat = itemsize * (units.shares > 1)  # the buffer that a unit is gathered into, and gloo's copy of it
    copied = flat * (1 + target.copies)
    root, unit = units.root, units.largest
    forward = {"gathered parameters": gathered + (0 if units.kept else flat * root) + copied * unit}
    # The next unit is gathered already, and the buffer of the one before is still being reduced.
    of_unit = {
        "gathered parameters": gathered + (0 if units.kept else (itemsize + flat) * unit),
        "incoming gradient": itemsize * (unit + units.late),
        "buckets": units.reduced * unit,
    }
    of_root = {
        "gathered parameters": itemsize * root,
        "incoming gradient": itemsize * root,
        "buckets": units.reduced * unit,
    }
    updated = shares.largest if units.offloaded or not target.accelerator else shares.trained
    update = inputs.scratch(units.offloaded) * updated * shares.dtype.itemsize
    peak = functools.partial(inputs.peak, units.offloaded)
    return [
        peak("initialize", {}, {}),
        peak("step", {}, forward),
        peak("step", {"gradients": 0 * gradients if units.kept else inner}, of_unit),
        peak("step", {"gradients": gradients}, of_root),
        peak("step", {"gradients": gradients, "optimizer state": states, "scratch": update}, {}),
    ]
