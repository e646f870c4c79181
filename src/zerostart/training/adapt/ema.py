"""An exponential moving average of what is trained, in shards: each rank averages what its optimizer steps.

Of mixed precision it follows the fp32 masters. The arithmetic is that of diffusers' ``EMAModel``, element by
element, so that no rank needs what another has. Parameters that are not trained have no average, and are what
they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import nn

from zerostart.distributed.world import World
from zerostart.engines import Member, Shard, Stepped
from zerostart.live.model import LiveModel
from zerostart.live.training import LiveTraining, StateTensor, member_shard
from zerostart.state.saving.contents import TensorOverrides
from zerostart.training.config.configuration import EmaConfig

#: What averages are called in a training checkpoint.
KEY = "ema"
#: Elements that are averaged at once: what this takes beside them is as many.
_CHUNK = 1 << 22


@dataclass(frozen=True)
class _Followed:
    """One run of elements of a parameter that this rank steps, and the average of it."""

    name: str
    stepped: Stepped
    member: Member
    shard: Shard  # of the parameter, whose storage may be another
    average: torch.Tensor

    @property
    def source(self) -> Shard:
        return member_shard(self.member, self.shard, self.stepped.tensor)


class Ema:
    """The average of one run, from when it is made on; as the weights are then."""

    def __init__(
        self, config: EmaConfig, model: nn.Module, optimizer: torch.optim.Optimizer | None, world: World
    ) -> None:
        """``model`` and ``optimizer`` are as ``zerostart.save_state`` takes them."""
        training = LiveTraining(model, optimizer, world)
        self.config = config
        self.updates = 0
        # A tied name is saved with the average of the parameter that it shares.
        self._ties = training.ties
        self._followed = [
            self._follow(step, member, training) for step in training.steps for member in step.members
        ]

    def _follow(self, stepped: Stepped, member: Member, training: LiveTraining) -> _Followed:
        name = training.name_of(member.parameter)
        shard = training.shards[name]
        storage = member_shard(member, shard, stepped.tensor).storage
        # In bf16 a small difference times 1 - decay would be rounded away.
        kind = torch.promote_types(storage.dtype, torch.float32)
        # `host` costs a copy of the weights over the bus at each update, and no device memory.
        device = storage.device if self.config.place == "device" else torch.device("cpu")
        # A copy also where dtype and device are the same already: the optimizer writes into the other.
        average = storage.detach().to(device, kind, copy=True)
        return _Followed(name, stepped, member, shard, average)

    @torch.no_grad()
    def update(self) -> None:
        """Let the average follow the weights, after a step of the optimizer; every rank by itself."""
        self.updates += 1
        # Counted first: updates have numbers from 1, and a resumed run goes on with the number it had.
        left = 1 - self.config.decay_of(self.updates)
        for one in self._followed:
            # Asked for at each update: an engine may have put the weights into other memory since.
            storage = one.source.storage.detach()
            # In pieces, since the difference takes as much memory as what is averaged at once.
            for first in range(0, storage.numel(), _CHUNK):
                average = one.average[first : first + _CHUNK]
                now = storage[first : first + _CHUNK].to(average.device, average.dtype)
                # In this order, as diffusers does: the same bits.
                average.sub_((average - now).mul_(left))

    @property
    def averages(self) -> list[StateTensor]:
        """The averages, for a training checkpoint: to be written, or to be filled."""
        return [
            StateTensor(one.name, KEY, replace(one.source, storage=one.average)) for one in self._followed
        ]

    @property
    def overrides(self) -> TensorOverrides:
        """The averages, to be saved in the place of the weights."""
        return TensorOverrides({one.name: one.shard for one in self.averages}, self._ties)

    @contextmanager
    def applied(self, model: nn.Module, world: World) -> Iterator[None]:
        """Inside, the weights of ``model`` are the average, rounded to what the model is held in; collective.

        Nothing is to be trained, or saved, there. After an error the run is over: what ranks write together
        is not put back, for the others may be waiting elsewhere.
        """
        # What the optimizer steps itself has its only copy in the model.
        own = [(one, one.source.storage) for one in self._followed if one.stepped.is_parameter]
        # On the host: the device may have no room for the weights a second time.
        copies = [(storage, storage.detach().to("cpu", copy=True)) for _, storage in own]
        _put({one.name: (one.source, one.average) for one in self._followed}, model, world)
        try:
            yield
        finally:
            with torch.no_grad():
                # By every rank for itself, and so also after an error.
                for storage, copy in copies:
                    storage.copy_(copy)
        # Where masters are stepped the model's own values are theirs, rounded: they are rounded again, and
        # need no copy.
        masters = {
            one.name: (one.source, one.source.storage.detach())
            for one in self._followed
            if not one.stepped.is_parameter
        }
        _put(masters, model, world)


@torch.no_grad()
def _put(values: dict[str, tuple[Shard, torch.Tensor]], model: nn.Module, world: World) -> None:
    live = LiveModel(model, world)
    # First: a parameter that is still gathered from the last forward would be used in the place of its shard.
    live.drop_gathered()
    # The same names in the same order on every rank, for each may need a sum over the ranks below.
    trained = [name for name, parameter in live.parameters.items() if parameter.requires_grad]
    # Where ranks step parts of what each has whole, a part is not all that has to be written.
    parts = [n for n, (share, _) in values.items() if share.layout.numel != live.shards[n].layout.numel]
    # All ranks take part for each of these, also one that steps nothing of it.
    mine = torch.tensor([name in parts for name in trained], dtype=torch.int64, device="cpu")
    divided = world.all_reduce_sum(mine, "looking for weights that ranks step in parts").tolist()
    for name, count in zip(trained, divided, strict=True):
        target = live.shards[name].storage
        if count:
            target.copy_(_joined(live.shards[name], values.get(name), world))
        elif name in values and values[name][1].numel():
            target.copy_(values[name][1])


def _joined(whole: Shard, value: tuple[Shard, torch.Tensor] | None, world: World) -> torch.Tensor:
    # Every rank has all elements here (ZeRO 1 and 2 step parts of whole parameters); in fp32, as averages and
    # masters are.
    joined = torch.zeros(whole.storage.numel(), dtype=torch.float32, device=whole.storage.device)
    if value is not None:
        share, elements = value
        for start, count, place in share.layout.runs():
            joined[start : start + count] = elements[place : place + count]
    # Runs of ranks do not overlap and the rest is zero: the sum is the whole, to the bit.
    if torch.distributed.is_initialized():
        torch.distributed.all_reduce(joined)
    return joined
