"""Slice a model on meta by DeepSpeed's automatic tensor parallelism (AutoTP).

``_apply_autotp_partitioning`` runs on the model and writes metadata about the slices to each parameter.
"""

from __future__ import annotations

import contextlib
import functools
import io
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from zerostart.errors import ConfigError
from zerostart.upstream.deepspeed import zero3_partitions as upstream
from zerostart.upstream.guard import Use, demand
from zerostart.upstream.patches import patch
from zerostart.upstream.types import DeepSpeedConfig

if TYPE_CHECKING:
    from collections.abc import Sequence

    from deepspeed.runtime.engine import DeepSpeedEngine
    from deepspeed.runtime.tensor_parallel.config import TPTrainingConfig

TOUCHED = (
    Use(
        "deepspeed.runtime.engine:DeepSpeedEngine",
        "_apply_autotp_partitioning(model, tp_config), "
        "deepspeed.module_inject.layers:TensorParallel_Layer.move(tensor)",
        "run on a model on meta, it makes the layers that it would make of a whole one",
    ),
    Use(
        "deepspeed.comm",
        "get_rank, get_world_size",
        "a process that is alone plays the first of the ranks that would share tensors",
    ),
    Use(
        "deepspeed.utils.groups",
        "get_tensor_model_parallel_group, get_tensor_model_parallel_world_size",
        "the group of ranks that share tensors is a stand-in there",
    ),
    Use(
        "deepspeed.accelerator.abstract_accelerator:DeepSpeedAccelerator",
        "current_device_name",
        "what is sliced stays on meta",
    ),
    Use(
        "deepspeed.runtime.tensor_parallel.config",
        "TPTrainingConfig",
        "the section tensor_parallel, as the engine reads it",
    ),
    Use(
        "deepspeed.module_inject.tp_plan_converter:TPPlanConverter",
        "convert",
        "a plan in transformers' styles as DeepSpeed's rules",
    ),
    Use(
        "deepspeed.module_inject.layers",
        "DS_AUTOTP_UC_META, _build_param_uc_restore_meta(*, partition_dim, partition_sizes, "
        "original_shape, replicated, affine_map)",
        "what a sliced parameter says of itself",
    ),
)


@functools.cache
def require_layers() -> None:
    """Raise UnsupportedVersionError unless AutoTP is as expected."""
    upstream.import_deepspeed()
    demand(TOUCHED, "Use engine='fsdp2'")


class _EngineStandIn:
    local_rank = -1  # Choose no device.

    def __init__(self, size: int) -> None:
        self._size = size

    def autotp_size(self) -> int:
        return self._size

    def is_deepcompile_enabled(self) -> bool:
        return False


def described(model: nn.Module, size: int, section: DeepSpeedConfig) -> dict[str, Slice]:
    """Return the slices of ``model`` (on meta, unusable afterwards) for ``size`` ranks."""
    require_layers()
    from deepspeed.module_inject import layers

    mode = layers.get_auto_tp_mode()
    try:
        with _simulate_ranks(size):
            _partition(model, size, section)
    finally:
        layers.set_autotp_mode(mode == layers.AUTOTP_MODE.TRAINING)
    return slices_of(model)


def sliced(model: nn.Module, size: int, section: DeepSpeedConfig) -> None:
    """Replace the layers of ``model`` (on meta) by DeepSpeed's with this rank's slices."""
    # Buffers have their values already, and DeepSpeed's layers would move them to meta.
    from deepspeed.module_inject.layers import LinearAllreduce

    buffers = dict(model.named_buffers())
    _partition(model, size, section)
    for module in model.modules():
        if isinstance(module, LinearAllreduce):
            module.register_forward_hook(_copy_view)
    for name, buffer in model.named_buffers():
        if buffer.is_meta and name in buffers:
            owner, _, leaf = name.rpartition(".")
            model.get_submodule(owner)._buffers[leaf] = buffers[name]


def _copy_view(module: nn.Module, args: object, output: torch.Tensor) -> torch.Tensor:
    """Copy a view: models such as Falcon add to the output in place."""
    return output.clone() if output._is_view() else output


def rules_of_plan(plan: Mapping[str, str]) -> dict[str, object]:
    """Convert a plan in transformers' styles to DeepSpeed's section ``tensor_parallel``."""
    require_layers()
    from deepspeed.module_inject.tp_plan_converter import TPPlanConverter

    try:
        specs = TPPlanConverter.convert(dict(plan)) or []
    except ValueError as error:
        raise ConfigError(f"engine_config['tp_plan']: {error}") from error
    layers = [
        {
            "patterns": spec.patterns,
            "partition_type": spec.partition_type.value,
            "gather_output": spec.gather_output,
            "grad_allreduce": spec.grad_allreduce,
        }
        for spec in specs
    ]
    return {"partition_config": {"use_default_specs": False, "layer_specs": layers}}


def _partition(model: nn.Module, size: int, section: DeepSpeedConfig) -> None:
    from deepspeed.accelerator import get_accelerator
    from deepspeed.module_inject import layers
    from deepspeed.runtime.engine import DeepSpeedEngine

    engine: type[DeepSpeedEngine] = DeepSpeedEngine
    config = _config(size, section)
    layers.set_autotp_mode(training=True)
    kind = type(model).__name__
    device = patch(get_accelerator(), "current_device_name", lambda *_: "meta")
    try:
        with contextlib.redirect_stdout(io.StringIO()), device, torch.device("meta"):
            engine._apply_autotp_partitioning(_EngineStandIn(size), model, config)
    except (ValueError, NotImplementedError, AssertionError, RuntimeError) as error:
        raise ConfigError(
            f"tensor_parallel={size}: DeepSpeed does not shard {kind} over ranks: {error} Use "
            "tensor_parallel=1, or say how with engine_config['tensor_parallel'] (preset_model, "
            "or partition_config)"
        ) from error


def _config(size: int, section: DeepSpeedConfig) -> TPTrainingConfig:
    from deepspeed.runtime.tensor_parallel.config import TPTrainingConfig
    from pydantic import ValidationError

    try:
        return TPTrainingConfig(**{**section, "autotp_size": size})
    except (ValidationError, ValueError, AssertionError) as error:
        raise ConfigError(f"DeepSpeed rejects engine_config['tensor_parallel']: {error}") from error


@contextlib.contextmanager
def _simulate_ranks(size: int) -> Iterator[None]:
    import deepspeed.comm as comm
    from deepspeed.utils import groups

    stand_in = object()
    with (
        patch(comm, "get_rank", lambda group=None: 0),
        patch(comm, "get_world_size", lambda group=None: size),
        patch(groups, "get_tensor_model_parallel_group", lambda: stand_in),
        patch(groups, "get_tensor_model_parallel_world_size", lambda: size),
    ):
        yield


@dataclass(frozen=True)
class Slice:
    """Ranges of dimension ``dim`` of a parameter, for each rank."""

    shape: tuple[int, ...]
    dim: int
    ranks: tuple[tuple[tuple[int, int], ...], ...]
    reason: str = ""


def slices_of(model: nn.Module) -> dict[str, Slice]:
    """Return the slices of a model that DeepSpeed has sliced, by name with aliases."""
    from deepspeed.module_inject.layers import DS_AUTOTP_UC_META

    slices: dict[str, Slice] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        metadata = getattr(parameter, DS_AUTOTP_UC_META, None)
        if metadata and not metadata["replicated"]:
            slices[name] = _read_slice(metadata)
    return slices


def _read_slice(metadata: DeepSpeedConfig) -> Slice:
    shape = tuple(metadata["original_shape"])
    ranks = (metadata["conversion"].get("affine_map") or {}).get("ranks")
    if ranks is None and metadata["partition_sizes"] is not None:
        return Slice(shape, metadata["partition_dim"], _contiguous_ranges(metadata["partition_sizes"]))
    if ranks is None:
        return Slice(shape, 0, (), metadata["unsupported_reason"] or "it does not say how")
    ordered = [ranks[rank]["pieces"] for rank in sorted(ranks)]
    if any("scale" in piece or len(piece["locations"]) > 1 for pieces in ordered for piece in pieces):
        return Slice(shape, 0, (), "parts of it are on several ranks")
    rows = [[run for piece in pieces for run in _runs(piece)] for pieces in ordered]
    width = shape[1] if len(shape) > 1 else 1
    if len(shape) == 1 or all(n % width == 0 and at % width == 0 for runs in rows for _, at, n in runs):
        whole_rows = ([(to, at // width, n // width) for to, at, n in runs] for runs in rows)
        return Slice(shape, 0, tuple(map(_merge_runs, whole_rows)))
    first = [[(to, at, n) for to, at, n in runs if at < width] for runs in rows]
    return Slice(shape, 1, tuple(map(_merge_runs, first)))


def _contiguous_ranges(sizes: Sequence[int]) -> tuple[tuple[tuple[int, int], ...], ...]:
    ends = [sum(sizes[: rank + 1]) for rank in range(len(sizes))]
    return tuple(((end - n, end),) if n else () for n, end in zip(sizes, ends, strict=True))


def _runs(piece: DeepSpeedConfig) -> Iterator[tuple[int, int, int]]:
    shape, (at, strides), (to, places) = piece["shape"], piece["source"], piece["dest"]
    if 0 in shape:
        return
    # One run covers the last dimensions that are contiguous in both the source and the slice.
    split, step = len(shape), 1
    while split and (shape[split - 1] == 1 or strides[split - 1] == places[split - 1] == step):
        split -= 1
        step *= shape[split]
    starts = [(to, at)]
    for size, source, place in zip(shape[:split], strides, places, strict=False):
        starts = [(t + i * place, a + i * source) for t, a in starts for i in range(size)]
    yield from ((t, a, step) for t, a in starts)


def _merge_runs(runs: list[tuple[int, int, int]]) -> tuple[tuple[int, int], ...]:
    merged: list[tuple[int, int]] = []
    for _, first, count in sorted(runs):
        if merged and merged[-1][1] == first:
            merged[-1] = (merged[-1][0], first + count)
        elif count:
            merged.append((first, first + count))
    return tuple(merged)
