"""Average the trained weights in shards: each rank averages its optimizer's elements.

With mixed precision these are the fp32 masters. The arithmetic is that of diffusers' ``EMAModel``, element by
element. Frozen parameters have no average.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import nn

from zerostart.distributed.world import World
from zerostart.engines import Member, Shard, SteppedTensor
from zerostart.live.model import LiveModel
from zerostart.live.training import LiveTraining, StateTensor, member_shard
from zerostart.state.saving.contents import TensorOverrides
from zerostart.training.config.configuration import EmaConfig

#: Key of averages in a training checkpoint.
KEY = "ema"
#: Elements averaged at once, which need as much temporary memory.
_CHUNK_ELEMENTS = 1 << 22


@dataclass(frozen=True)
class _Averaged:
    """Consecutive elements of a parameter that this rank steps, and their average."""

    name: str
    stepped: SteppedTensor
    member: Member
    shard: Shard  # of the parameter
    average: torch.Tensor

    @property
    def source(self) -> Shard:
        return member_shard(self.member, self.shard, self.stepped.tensor)


class Ema:
    """The average of one run; it starts from the weights at its creation."""

    def __init__(
        self, config: EmaConfig, model: nn.Module, optimizer: torch.optim.Optimizer | None, world: World
    ) -> None:
        """``model`` and ``optimizer`` are those for ``zerostart.save_state``."""
        training = LiveTraining(model, optimizer, world)
        self.config = config
        self.updates = 0
        # A tied name is saved with the average of the parameter that it shares.
        self._ties = training.ties
        self._averaged = [
            self._average(step, member, training) for step in training.steps for member in step.members
        ]

    def _average(self, stepped: SteppedTensor, member: Member, training: LiveTraining) -> _Averaged:
        name = training.name_of(member.parameter)
        shard = training.shards[name]
        storage = member_shard(member, shard, stepped.tensor).storage
        # In bf16 small differences would be rounded away.
        kind = torch.promote_types(storage.dtype, torch.float32)
        device = storage.device if self.config.place == "device" else torch.device("cpu")
        average = storage.detach().to(device, kind, copy=True)
        return _Averaged(name, stepped, member, shard, average)

    @torch.no_grad()
    def update(self) -> None:
        """Move the average towards the weights after an optimizer step; each rank by itself."""
        self.updates += 1
        weight = 1 - self.config.decay_of(self.updates)
        for one in self._averaged:
            # An engine may have moved the weights to other memory.
            storage = one.source.storage.detach()
            for first in range(0, storage.numel(), _CHUNK_ELEMENTS):
                average = one.average[first : first + _CHUNK_ELEMENTS]
                now = storage[first : first + _CHUNK_ELEMENTS].to(average.device, average.dtype)
                # diffusers' order of operations: the same bits.
                average.sub_((average - now).mul_(weight))

    @property
    def averages(self) -> list[StateTensor]:
        """The averages of a training checkpoint, to be written or filled."""
        return [
            StateTensor(one.name, KEY, replace(one.source, storage=one.average)) for one in self._averaged
        ]

    @property
    def overrides(self) -> TensorOverrides:
        """The averages, to be saved instead of the weights."""
        return TensorOverrides({one.name: one.shard for one in self.averages}, self._ties)

    @contextmanager
    def applied(self, model: nn.Module, world: World) -> Iterator[None]:
        """Replace the weights of ``model`` by the rounded average inside the block; collective.

        Nothing may be trained or saved in the block. After an error the run is over: masters are not
        restored.
        """
        # The model has the only copy of parameters that the optimizer steps itself.
        own = [(one, one.source.storage) for one in self._averaged if one.stepped.is_parameter]
        # On the host: the device may have no room for a copy.
        copies = [(storage, storage.detach().to("cpu", copy=True)) for _, storage in own]
        _write_weights({one.name: (one.source, one.average) for one in self._averaged}, model, world)
        try:
            yield
        finally:
            with torch.no_grad():
                # No collective, so also after an error.
                for storage, copy in copies:
                    storage.copy_(copy)
        # Stepped masters need no copy: the model has their rounded values.
        masters = {
            one.name: (one.source, one.source.storage.detach())
            for one in self._averaged
            if not one.stepped.is_parameter
        }
        _write_weights(masters, model, world)


@torch.no_grad()
def _write_weights(values: dict[str, tuple[Shard, torch.Tensor]], model: nn.Module, world: World) -> None:
    live = LiveModel(model, world)
    # A parameter that is still gathered from the last forward would hide its shard.
    live.drop_gathered()
    # In the same order on every rank: each may need a sum over the ranks below.
    trained = [name for name, parameter in live.parameters.items() if parameter.requires_grad]
    # ZeRO 1 and 2: ranks step parts of parameters that each has whole.
    parts = [n for n, (share, _) in values.items() if share.layout.numel != live.shards[n].layout.numel]
    # All ranks take part, also one that steps nothing of a parameter.
    mine = torch.tensor([name in parts for name in trained], dtype=torch.int64, device="cpu")
    divided = world.all_reduce_sum(mine, "looking for weights that ranks step in parts").tolist()
    for name, count in zip(trained, divided, strict=True):
        target = live.shards[name].storage
        if count:
            target.copy_(_joined(live.shards[name], values.get(name), world))
        elif name in values and values[name][1].numel():
            target.copy_(values[name][1])


def _joined(whole: Shard, value: tuple[Shard, torch.Tensor] | None, world: World) -> torch.Tensor:
    joined = torch.zeros(whole.storage.numel(), dtype=torch.float32, device=whole.storage.device)
    if value is not None:
        share, elements = value
        for start, count, place in share.layout.runs():
            joined[start : start + count] = elements[place : place + count]
    # The parts of ranks do not overlap, so the sum is exact.
    if torch.distributed.is_initialized():
        torch.distributed.all_reduce(joined)
    return joined
