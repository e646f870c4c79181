"""How much memory there is, and whether what is foreseen fits into it."""

from __future__ import annotations

from dataclasses import dataclass

from zerostart.distributed.machine import available_memory
from zerostart.distributed.world import default_device
from zerostart.engines.placements import RANKS_OF_A_MACHINE
from zerostart.errors import ConfigError
from zerostart.transfer.memory import device_bytes


@dataclass(frozen=True)
class Limits:
    """Bytes of one accelerator (``device``) and of one machine for all its ranks (``host``); None: unknown.

    ``found``: nobody gave them, they are this machine's. ``accelerator``: whether ranks compute on one.
    """

    device: int | None
    host: int | None
    accelerator: bool
    found: bool = False

    @classmethod
    def of(cls, device: int | None, host: int | None, world_size: int) -> Limits:
        """The limits that are given; where none is, those of this machine, if it could run all ranks.

        A given ``device`` means that ranks compute on accelerators, wherever the plan is made. Raises
        ConfigError for a limit that is not a number of bytes.
        """
        for name, value in (("device_memory", device), ("host_memory", host)):
            if value is not None and value < 1:
                raise ConfigError(f"{name}={value!r} must be a number of bytes")
        here = default_device()
        accelerator = device is not None or here.type != "cpu"
        if device is not None or host is not None:
            return cls(device, host, accelerator)
        if world_size > RANKS_OF_A_MACHINE:  # not the machines that it will run on
            return cls(None, None, accelerator)
        if accelerator:
            device = device_bytes(here)
        return cls(device, available_memory(), accelerator, found=True)


@dataclass(frozen=True)
class Fit:
    """Memory of one kind: ``where`` it is, the ``limit``, and the most that is ``needed``, in bytes.

    Of an accelerator the need is that of the rank that needs most; of a ``host`` that of all ``ranks`` on it.
    ``phase`` is the one in which it is needed. ``found``: the limit is this machine's, nobody gave it.
    """

    where: str
    limit: int
    needed: int
    phase: str
    ranks: int = 1
    found: bool = False

    @property
    def fits(self) -> bool:
        """Whether the need is within the limit."""
        return self.needed <= self.limit
