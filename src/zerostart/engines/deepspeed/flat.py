"""ZeRO stages 1 and 2: parameters as views into the optimizer's flat buffers.

A load knows the order in which DeepSpeed flattens parameters that are all trained, in one group, and uses it
from the start. If the optimizer has other groups (weight decay or not, frozen parameters), they are reordered
within the buffer, with bounded scratch memory.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from rich.filesize import decimal
from torch import nn

from zerostart.distributed.world import World, current_world
from zerostart.engines.flat_buffers import ALIGNMENT, FlatBufferShards, ParameterSet
from zerostart.engines.residence import HOST, Residence
from zerostart.errors import InsufficientMemoryError
from zerostart.geometry.layout import Parallelism
from zerostart.geometry.layout.layout import FlatGroup, FlatRules
from zerostart.transfer.meter import free_bytes
from zerostart.transfer.rearrange import reorder
from zerostart.upstream.deepspeed import zero12_optimizers as upstream
from zerostart.upstream.deepspeed.construction import restore_hooks
from zerostart.upstream.deepspeed.zero12_groups import RunReader


class FlatKeeper:
    """Moves the parameters of one load to the device and into an optimizer's order."""

    def __init__(self, device: torch.device) -> None:
        #: True if parameters are in host memory until the engine starts; equal on all ranks.
        self.waits = False
        self.optimizer: weakref.ref[Any] | None = None
        self._device = device
        self._parameters: list[weakref.ref[nn.Parameter]] = []

    def add(self, parameter: nn.Parameter) -> None:
        """Add a parameter in one of the load's buffers."""
        self._parameters.append(weakref.ref(parameter))

    def bring(self) -> None:
        """See ``zerostart.upstream.deepspeed.zero12_groups.Keeper``: each buffer in one piece, collectively.

        Raises InsufficientMemoryError where the device still has no room for them.
        """
        if not self.waits:
            return
        # One buffer at a time: its last parameter frees the host's copy.
        waiting = [members for members in self._members().values() if members[0].device != self._device]
        nbytes = sum(members[0].untyped_storage().nbytes() for members in waiting)
        with current_world().phase("moving the parameters to the device"):
            free = free_bytes(self._device)
            if free is not None and nbytes > free:
                raise InsufficientMemoryError(
                    f"{decimal(nbytes)} of parameters wait in host memory, but {self._device} has only "
                    f"{decimal(free)} free; free memory there before deepspeed.initialize, or use "
                    "zero_stage=3"
                )
            for members in waiting:
                buffer = _entire(members[0]).to(self._device)
                for parameter in members:
                    place = int(parameter.storage_offset())
                    parameter.data = buffer[place : place + parameter.numel()].view(parameter.shape)

    def _members(self) -> dict[tuple[int, torch.dtype], list[nn.Parameter]]:
        """The parameters that are left, by the buffer in which they lie."""
        buffers: dict[tuple[int, torch.dtype], list[nn.Parameter]] = {}
        for parameter in (reference() for reference in self._parameters):
            if parameter is not None and parameter.is_contiguous():
                place = (parameter.untyped_storage().data_ptr(), parameter.dtype)
                buffers.setdefault(place, []).append(parameter)
        return buffers

    def adopt(
        self,
        groups: Sequence[Sequence[torch.Tensor]],
        partitions: Sequence[int],
        round_robin: bool,
        aligned: bool,
    ) -> list[torch.Tensor | None]:
        """Reorder each buffer for the optimizer's groups; deleted parameters are skipped.

        See ``upstream.deepspeed.zero12_groups.Keeper``.
        """
        rules = [FlatRules(count, round_robin, aligned) for count in partitions]
        flats: list[torch.Tensor | None] = [None] * len(groups)
        for members in self._members().values():
            ids = {id(parameter) for parameter in members}
            # DeepSpeed copies a group with a foreign parameter, as no buffer holds all of it.
            wholly = [n for n, group in enumerate(groups) if group and ids.issuperset(map(id, group))]
            if wholly:
                arranged = _arrange(members, [(groups[n], rules[n]) for n in wholly])
                for number, flat in zip(wholly, arranged, strict=False):
                    flats[number] = flat
        return flats


def _arrange(
    members: Sequence[nn.Parameter], groups: Sequence[tuple[Sequence[torch.Tensor], FlatRules]]
) -> list[torch.Tensor]:
    """Reorder one buffer in place for several groups; return [] if impossible."""
    itemsize, dtype = members[0].itemsize, members[0].dtype
    step = max(1, ALIGNMENT // itemsize)
    targets: dict[int, int] = {}
    flats: list[tuple[int, FlatGroup]] = []
    end = 0
    for group, rules in groups:
        # Groups begin aligned, as in the optimizer's own buffers.
        start = end + -end % step
        flat = rules.group([p.numel() for p in group], itemsize)
        targets |= {id(p): start + offset for p, offset in zip(group, flat.offsets, strict=True)}
        flats.append((start, flat))
        end = start + flat.numel
    for parameter in members:
        if id(parameter) not in targets:
            # Parameters of no group (frozen, or of other optimizers) come after all groups.
            targets[id(parameter)] = end + -end % step
            end = targets[id(parameter)] + parameter.numel()
    # Without room for so many groups DeepSpeed flattens by itself.
    places = [(parameter, targets[id(parameter)] * itemsize) for parameter in members]
    base = reorder(members[0].untyped_storage(), places, end * itemsize)
    if base is None:
        return []
    wholes = [base.view(dtype)[start : start + flat.numel] for start, flat in flats]
    for whole, (_, flat) in zip(wholes, flats, strict=True):
        # After the move, which may leave other elements here.
        for low, high in flat.gaps():
            whole[low:high].zero_()
    return wholes


def _entire(parameter: torch.Tensor) -> torch.Tensor:
    """All of the buffer in which a parameter lies, 1-D."""
    storage = parameter.untyped_storage()
    room = storage.nbytes() // parameter.itemsize
    return torch.empty(0, dtype=parameter.dtype, device=parameter.device).set_(storage, 0, (room,), (1,))


class FlatShards(FlatBufferShards):
    """Makes parameters in flat buffers that the optimizers of stages 1 and 2 accept.

    ``cut`` removes the experts or slices of other ranks from a model; their owners all read them.
    """

    waits = True

    def __init__(
        self,
        world: World,
        zero_stage: int,
        rules: FlatRules,
        exchange: bool | None,
        parallelism: Parallelism,
        cut: Callable[[nn.Module], None] | None = None,
    ) -> None:
        super().__init__(world, zero_stage, rules, exchange, parallelism)
        self._keeper = FlatKeeper(self.device)
        self._cut = cut

    def agree_on_residence(self, model: nn.Module, names: Sequence[str]) -> Residence:
        """Agree where the buffers are; without room on the device yet, on the host."""
        if self._cut is not None:
            self._cut(model)
        residence = super().agree_on_residence(model, names)
        self._keeper.waits = residence.name == HOST
        return residence

    def finish(self, model: nn.Module) -> int:
        """Exchange the buffers; new parameters sum gradients that are partial on each rank."""
        received = super().finish(model)
        restore_hooks(model)
        return received

    def make_parameter(
        self, old: nn.Parameter, whole: torch.Tensor, name: str, members: ParameterSet
    ) -> nn.Parameter:
        """As it is everywhere, with a mark for the engine."""
        new = super().make_parameter(old, whole, name, members)
        self._keeper.add(new)
        upstream.mark(new, name, self._keeper)
        return new


def offer_runs(model: nn.Module, rounded: Collection[str], reader: RunReader) -> None:
    """Let the optimizer read the fp32 masters of the parameters ``rounded``."""
    for name, parameter in model.named_parameters():
        if name in rounded:
            upstream.offer(parameter, reader)
