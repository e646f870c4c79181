"""What of the offloaded models is resident: units of parameters, within a limit, evicted by what is next.

One window serves all offloaded models of a pipeline. What a unit's modules compute with is there from before
the forward of the first of them until room is needed for another; then that goes whose next use is farthest
off, as the last time through has shown.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from zerostart.errors import EngineError
from zerostart.loading.at_rest import AtRest
from zerostart.transfer import Arena

#: Uses that are remembered: several times through the layers of any model.
REMEMBERED = 1 << 14


@dataclass(eq=False)
class Unit:
    """Parameters that come and go together: by name, and the places of each in modules."""

    name: str
    parameters: Mapping[str, nn.Parameter]
    places: Mapping[str, list[tuple[nn.Module, str]]]
    source: AtRest
    users: int = 0
    resident: bool = False
    last: int = field(default=0, compare=False)

    @property
    def nbytes(self) -> int:
        """Bytes of the parameters."""
        return sum(p.numel() * p.element_size() for p in self.parameters.values())

    def bring(self, device: torch.device) -> None:
        """Put the values in the places; raises ReadError as ``AtRest.fetch`` does."""
        arena = Arena(device)
        kept = {n: arena.reserve(p.numel(), p.dtype) for n, p in self.parameters.items()}
        # A tensor that is made in inference mode could not be computed with out of it.
        with torch.inference_mode(False), torch.no_grad():
            flat = {n: arena.take(kept[n], p.numel(), p.dtype) for n, p in self.parameters.items()}
            self.source.fetch(flat)
            made = {n: nn.Parameter(t.view(self.parameters[n].shape), False) for n, t in flat.items()}
        self._put(made)
        self.resident = True

    def drop(self) -> None:
        """Leave the places as they were, without values."""
        self._put(self.parameters)
        self.resident = False

    def _put(self, tensors: Mapping[str, nn.Parameter]) -> None:
        for name, tensor in tensors.items():
            for module, leaf in self.places[name]:
                module._parameters[leaf] = tensor


class Window:
    """At most ``limit`` bytes of parameters on ``device``; ``highest`` is what there was at most."""

    def __init__(self, limit: int, device: torch.device) -> None:
        self.limit, self.device = limit, device
        self.used = self.highest = self.fetches = 0
        self._kept = self._least = self._wanted = 0
        self._resident: dict[Unit, None] = {}
        self._uses: deque[Unit] = deque(maxlen=REMEMBERED)
        self._clock = 0

    @property
    def free(self) -> int:
        """Bytes that are not for good somebody's."""
        return self.limit - self._kept

    def claim(self, kept: int, least: int, wanted: int, grows: bool) -> int:
        """Have a model share the window: ``kept`` bytes for good, ``least`` at once, ``wanted`` for ease.

        Returns by how many bytes the limit is too low for all that share it, unless it ``grows``.
        """
        self._kept += kept
        self._least = max(self._least, least)
        self._wanted = max(self._wanted, wanted)
        if grows:
            self.limit = self._kept + self._wanted
        return max(0, self._kept + self._least - self.limit)

    def cede(self, nbytes: int) -> int:
        """Leave ``nbytes`` of the limit to what rests on the device itself.

        Returns by how many bytes the limit is too low for it, and for all that share the window.
        """
        self.limit -= nbytes
        return max(0, self._kept + self._least - self.limit)

    def enter(self, unit: Unit) -> None:
        """Have ``unit`` resident until ``leave``. Raises EngineError where all that is there is in use."""
        if not self._uses or self._uses[-1] is not unit:
            self._uses.append(unit)
        self._clock += 1
        unit.last = self._clock
        if not unit.resident:
            self._make_room(unit)
            unit.bring(self.device)
            self._resident[unit] = None
            self.used += unit.nbytes
            self.highest = max(self.highest, self.used)
            self.fetches += 1
        unit.users += 1

    def leave(self, unit: Unit) -> None:
        """Let ``unit`` go when its room is needed."""
        unit.users -= 1

    def forget(self, unit: Unit) -> None:
        """Take ``unit`` out for good."""
        if unit in self._resident:
            self._evict(unit)
        self._uses = deque((used for used in self._uses if used is not unit), REMEMBERED)

    def _make_room(self, unit: Unit) -> None:
        while self.used + unit.nbytes > self.limit:
            idle = [one for one in self._resident if not one.users]
            if not idle:
                busy = ", ".join(one.name for one in self._resident)
                raise EngineError(
                    f"{unit.name} needs {unit.nbytes} bytes while {busy} are in use, which is {self.used} of "
                    f"the {self.limit} that device_memory_limit leaves to offloaded components; raise it"
                )
            self._evict(self._farthest(idle))

    def _evict(self, unit: Unit) -> None:
        unit.drop()
        del self._resident[unit]
        self.used -= unit.nbytes

    def _farthest(self, idle: list[Unit]) -> Unit:
        """The one of ``idle`` that was used last after what is asked for now, or not again at all."""
        uses = list(self._uses)
        now = uses[-1]
        before = next((n for n in range(len(uses) - 2, -1, -1) if uses[n] is now), None)
        ahead: dict[Unit, int] = {}
        if before is not None:
            for distance, unit in enumerate(uses[before + 1 : -1]):
                ahead.setdefault(unit, distance)
        never = len(uses)
        return max(idle, key=lambda unit: (ahead.get(unit, never), -unit.last))
