"""Swap files of DeepSpeed for ZeRO-3 parameters on NVMe."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from zerostart.errors import EngineError, WriteError
from zerostart.upstream.guard import Use, demand

if TYPE_CHECKING:
    from collections.abc import Sequence

    from deepspeed.runtime.zero.partition_parameters import Init, PartitionedParamStatus

    from zerostart.upstream.types import ZeroParameter, ZeroPartition

_SWAPPER = "deepspeed.runtime.swap_tensor.partitioned_param_swapper:AsyncPartitionedParameterSwapper"
TOUCHED = (
    Use(
        _SWAPPER,
        "synchronize_reads, get_path(param, *, must_exist), _io_aligned_numel(numel), swappable_tensor(*, "
        "numel), .dtype, .elements_per_buffer, .invalid_buffer, .param_id_to_numel",
        "where the swap file of a partition is, and how large",
    ),
    Use(
        _SWAPPER,
        "swap_in, remove_partition_and_release_buffers",
        "a partition on NVMe is compared with its master in one of the swap buffers",
    ),
)


def check_swapping() -> None:
    """Raise EngineError unless DeepSpeed's async_io operation can be built here."""
    demand(TOUCHED)
    from deepspeed.ops.op_builder import AsyncIOBuilder

    if not AsyncIOBuilder().is_compatible(verbose=False):
        raise EngineError(
            "offload_param to nvme needs DeepSpeed's async_io operation, which cannot be built here: "
            "libaio and its headers are missing. Install them (libaio-dev on Debian and Ubuntu, "
            "libaio-devel on Fedora), or offload to cpu"
        )


def swaps(init: Init, numel: int) -> bool:
    """Return True if ``zero.Init`` keeps a partition of ``numel`` elements on NVMe."""
    swapper = init.param_swapper
    return swapper is not None and bool(swapper.swappable_tensor(numel=numel))


def swap_file(init: Init, parameter: torch.Tensor, name: str, numel: int) -> torch.Tensor:
    """Map the swap file of a parameter as a 1-D tensor of ``numel`` elements."""
    swapper = init.param_swapper
    if parameter.dtype != swapper.dtype:
        raise EngineError(
            f"{name} is {parameter.dtype}, but the swap buffers of offload_param are "
            f"{swapper.dtype}: DeepSpeed swaps parameters of one dtype only. Pass dtype= to load "
            "all of them in it"
        )
    if numel > swapper.elements_per_buffer:
        raise EngineError(
            f"a partition of {name} has {numel} elements, but a swap buffer has "
            f"{swapper.elements_per_buffer}: set offload_param.buffer_size to at least {numel}"
        )
    path = Path(swapper.get_path(parameter))
    aligned = int(swapper._io_aligned_numel(numel))
    _reserve(path, aligned * parameter.dtype.itemsize)
    return torch.from_file(str(path), shared=True, size=aligned, dtype=parameter.dtype)[:numel]


FULL = (errno.ENOSPC, errno.EDQUOT)


def _reserve(path: Path, nbytes: int) -> None:
    # A sparse file would end the process with a signal when the device is full.
    try:
        with os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            os.posix_fallocate(file.fileno(), 0, nbytes)
    except OSError as error:
        remedy = "; free space, or set another nvme_path" if error.errno in FULL else ""
        raise WriteError(
            f"the swap file {path} of {nbytes} bytes cannot be made: {error.strerror}{remedy}"
        ) from error


def leave_on_nvme(
    init: Init, parameter: ZeroParameter, partition: ZeroPartition, status: type[PartitionedParamStatus]
) -> None:
    """Let ``partition``, a tensor without data, represent the parameter's swap file."""
    from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum

    swapper = init.param_swapper
    partition.data = swapper.invalid_buffer.data
    partition.status = status.NOT_AVAILABLE
    partition.final_location = OffloadDeviceEnum.nvme
    swapper.param_id_to_numel[parameter.ds_id] = partition.ds_numel


def write_through(init: Init, parameters: Sequence[torch.Tensor]) -> None:
    """Flush the swap files of ``parameters`` to the device; raises WriteError."""
    for parameter in parameters:
        path = init.param_swapper.get_path(parameter, must_exist=True)
        try:
            with Path(path).open("r+b") as file:
                # DeepSpeed reads with O_DIRECT, not from the page cache.
                os.fsync(file.fileno())
        except OSError as error:
            raise WriteError(f"the swap file {path} cannot be written: {error.strerror}") from error


def current_partition(parameter: ZeroParameter, status: type[PartitionedParamStatus]) -> torch.Tensor:
    """Return the values of a partition from its buffer or its mapped swap file."""
    partition: torch.Tensor = parameter.ds_tensor
    swapper = parameter.nvme_swapper
    if parameter.ds_tensor.status == status.INFLIGHT:
        swapper.synchronize_reads()
    if parameter.ds_tensor.status == status.AVAILABLE:
        return partition
    path = swapper.get_path(parameter, must_exist=True)
    return torch.from_file(str(path), shared=True, size=parameter.ds_tensor.ds_numel, dtype=parameter.dtype)
