"""Forecast the memory that training takes on each rank, by phase."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from zerostart.transfer.buffers import rounded_up

#: A number for each rank in question.
Array = npt.NDArray[np.int64]
#: Bytes by component; a number for each rank, or one for all.
Sizes = Mapping[str, Array | int]
#: Bytes of a single-precision element.
FP32 = 4


def pinned_by_torch(nbytes: Array | int) -> Array:
    """Return the bytes that torch's allocator takes for a page-locked buffer."""
    rounded: Array = np.vectorize(rounded_up, otypes=[np.int64])(np.asarray(nbytes))
    return rounded


@dataclass(frozen=True)
class OptimizerCost:
    """Memory of an optimizer, counted in copies of the trained elements."""

    name: str
    #: Copies that stay.
    states: int
    #: Copies on the host during an update.
    host_scratch: int = 0
    #: Copies on the device during an update.
    device_scratch: int = 0

    def scratch(self, on_host: bool) -> int:
        """Return the copies of updated elements that an update needs."""
        return self.host_scratch if on_host else self.device_scratch


@dataclass(frozen=True)
class Gathers:
    """Bytes that a rank gathers while a model runs, in the dtype of the weights.

    An expert counts as the part that one rank has of it before sharding.
    """

    #: Bytes of the largest parameter.
    largest: int
    #: Bytes of the largest set of parameters that one module holds directly.
    module: int
    #: Bytes of all trained parameters.
    total: int
    #: Elements of each parameter, by name.
    elements: Mapping[str, int]
    #: Bytes of ``total`` by the number of ranks that share them: those that have the same experts, or all.
    shared: Mapping[int, int]


@dataclass(frozen=True)
class ParameterBytes:
    """Bytes of parameters on each rank, by kind."""

    #: Elements that the optimizer updates.
    trained: Array
    #: Bytes of all shares whose home is the device.
    device: Array
    #: Bytes of all shares whose home is the host.
    host: Array
    #: Bytes of all shares whose home is NVMe.
    storage: Array
    #: Elements of the largest share of one parameter.
    largest: Array
    #: Bytes of the model's buffers, whole on every rank.
    buffers: int
    #: Dtype of most trained elements.
    dtype: torch.dtype
    gathers: Gathers


@dataclass(frozen=True)
class Hardware:
    """The hardware that the ranks run on."""

    #: Without one the device is the host, memory counts once it is written to, and gloo takes a copy of what
    #: a collective reduces or gathers.
    accelerator: bool
    world_size: int

    @property
    def copies(self) -> int:
        """Further copies of a message that a collective makes."""
        return 0 if self.accelerator or self.world_size == 1 else 1


@dataclass(frozen=True)
class MemoryPeak:
    """Bytes by component on host and device, at one moment of a phase."""

    phase: str
    host: Sizes = field(default_factory=dict)
    device: Sizes = field(default_factory=dict)

    def on(self, target: Hardware) -> MemoryPeak:
        """The moment with the device's memory on the host, if there is no accelerator."""
        if target.accelerator:
            return self
        names = dict.fromkeys((*self.device, *self.host))
        return MemoryPeak(self.phase, {n: self.host.get(n, 0) + self.device.get(n, 0) for n in names})


@dataclass(frozen=True)
class MemoryInputs:
    """Inputs of a memory forecast."""

    shares: ParameterBytes
    optimizer: OptimizerCost
    target: Hardware
    #: Bytes of a rank's flat buffers; 0 if the engine has none.
    flat_bytes: int = 0

    def scratch(self, on_host: bool) -> int:
        """Return the copies of updated elements that an update needs; ``on_host`` offloads the states."""
        return self.optimizer.scratch(on_host or not self.target.accelerator)

    def peak(self, on_host: bool, phase: str, states: Sizes, *device: Sizes) -> MemoryPeak:
        """Add ``states`` and ``device`` bytes to the parameters and buffers.

        ``on_host`` puts the states on the host.
        """
        parts: tuple[dict[str, Array | int], dict[str, Array | int]] = (
            {"parameters": self.shares.host},
            {"parameters": self.flat_bytes or self.shares.device, "buffers": self.shares.buffers},
        )
        for sizes, home in ((states, parts[0 if on_host else 1]), *((sizes, parts[1]) for sizes in device)):
            for name, size in sizes.items():
                home[name] = home.get(name, 0) + size
        return MemoryPeak(phase, *parts)


# Stage 0: everything is whole on every rank. DistributedDataParallel keeps its buckets next to the gradients
# (its default, ``gradient_as_bucket_view`` is False). DeepSpeed's ``BF16_Optimizer`` and ``FP16_Optimizer``
# keep fp32 masters and an fp32 gradient of each element. Not compared with measurements yet.


def replicated_peaks(inputs: MemoryInputs, masters: bool) -> list[MemoryPeak]:
    """Forecast ``initialize`` and the first step of stage 0.

    ``masters``: DeepSpeed's optimizers with fp32 masters train, and not DistributedDataParallel.
    """
    shares, target = inputs.shares, inputs.target
    gradients = shares.gathers.total
    trained = gradients // shares.dtype.itemsize
    mixed = masters and shares.dtype != torch.float32
    state_itemsize = FP32 if mixed else shares.dtype.itemsize
    buckets = gradients if not masters and target.world_size > 1 else 0
    resident: Sizes = {"master weights": FP32 * trained * mixed, "buckets": buckets}
    stepping: Sizes = {
        **resident,
        "gradients": gradients + FP32 * trained * mixed,
        "optimizer state": state_itemsize * trained * inputs.optimizer.states,
        "scratch": state_itemsize * trained * inputs.scratch(on_host=False),
    }
    return [inputs.peak(False, "initialize", resident), inputs.peak(False, "step", stepping)]
