"""Private parts of DeepSpeed's automatic tensor parallelism (AutoTP): its layers, made on meta.

``_apply_autotp_partitioning`` runs on a model on meta, and each parameter then says what was sliced:
DeepSpeed alone decides.
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
from zerostart.upstream.patches import replaced
from zerostart.upstream.types import DeepSpeedConfig

if TYPE_CHECKING:
    from collections.abc import Sequence

    from deepspeed.runtime.engine import DeepSpeedEngine
    from deepspeed.runtime.tensor_parallel.config import TPTrainingConfig

_ENGINE = "deepspeed.runtime.engine:DeepSpeedEngine"
_LAYERS = "deepspeed.module_inject.layers"
_PARTITIONING = Use(
    _ENGINE,
    "_apply_autotp_partitioning(model, tp_config), "
    "deepspeed.module_inject.layers:TensorParallel_Layer.move(tensor)",
    "run on a model on meta, it makes the layers that it would make of a whole one",
)
_PLAYED = Use(
    "deepspeed.comm",
    "get_rank, get_world_size",
    "a process that is alone plays the first of the ranks that would share tensors",
)
_GROUPS = Use(
    "deepspeed.utils.groups",
    "get_tensor_model_parallel_group, get_tensor_model_parallel_world_size",
    "the group of ranks that share tensors is a stand-in there",
)
_DEVICE = Use(
    "deepspeed.accelerator.abstract_accelerator:DeepSpeedAccelerator",
    "current_device_name",
    "what is sliced stays on meta",
)
TOUCHED = (
    _PARTITIONING,
    _PLAYED,
    _GROUPS,
    _DEVICE,
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
        _LAYERS,
        "DS_AUTOTP_UC_META, _build_param_uc_restore_meta(*, partition_dim, partition_sizes, "
        "original_shape, replicated, affine_map)",
        "what a sliced parameter says of itself",
    ),
)


@functools.cache
def require_layers() -> None:
    """Raise UnsupportedVersionError unless DeepSpeed has what is used of it."""
    upstream.import_deepspeed()
    demand(TOUCHED, "Use engine='fsdp2'")


class _Asked:
    local_rank = -1  # No device is to be chosen.

    def __init__(self, size: int) -> None:
        self._size = size

    def autotp_size(self) -> int:
        return self._size

    def is_deepcompile_enabled(self) -> bool:
        return False


def described(model: nn.Module, size: int, section: DeepSpeedConfig) -> dict[str, Slice]:
    """Return what DeepSpeed slices of ``model`` (on meta, spent afterwards) for ``size`` ranks, by name."""
    require_layers()
    from deepspeed.module_inject import layers

    # A global of DeepSpeed's, which describing a model must leave as it was.
    mode = layers.get_auto_tp_mode()
    try:
        with _played(size):
            _partition(model, size, section)
    finally:
        layers.set_autotp_mode(mode == layers.AUTOTP_MODE.TRAINING)
    return slices_of(model)


def sliced(model: nn.Module, size: int, section: DeepSpeedConfig) -> None:
    """Leave this rank's slices of ``model`` (on meta) in DeepSpeed's layers; needs the joined groups."""
    # What is no parameter has its values by now, and layers that take a buffer over take it to meta.
    from deepspeed.module_inject.layers import LinearAllreduce

    buffers = dict(model.named_buffers())
    _partition(model, size, section)
    for module in model.modules():
        if isinstance(module, LinearAllreduce):
            module.register_forward_hook(_own)
    for name, buffer in model.named_buffers():
        if buffer.is_meta and name in buffers:
            owner, _, leaf = name.rpartition(".")
            model.get_submodule(owner)._buffers[leaf] = buffers[name]


def _own(module: nn.Module, args: object, output: torch.Tensor) -> torch.Tensor:
    """Return an output that a model such as Falcon may add to in place."""
    return output.clone() if output._is_view() else output


def rules_of_plan(plan: Mapping[str, str]) -> dict[str, object]:
    """Convert a plan in transformers' styles to DeepSpeed's section ``tensor_parallel``."""
    require_layers()
    from deepspeed.module_inject.tp_plan_converter import TPPlanConverter

    try:
        specs = TPPlanConverter.convert(dict(plan)) or []
    except ValueError as error:
        raise ConfigError(f"engine_config['tp_plan']: {error}") from error
    found = [
        {
            "patterns": spec.patterns,
            "partition_type": spec.partition_type.value,
            "gather_output": spec.gather_output,
            "grad_allreduce": spec.grad_allreduce,
        }
        for spec in specs
    ]
    return {"partition_config": {"use_default_specs": False, "layer_specs": found}}


def _partition(model: nn.Module, size: int, section: DeepSpeedConfig) -> None:
    from deepspeed.accelerator import get_accelerator
    from deepspeed.module_inject import layers
    from deepspeed.runtime.engine import DeepSpeedEngine

    engine: type[DeepSpeedEngine] = DeepSpeedEngine
    config = _config(size, section)
    layers.set_autotp_mode(training=True)
    kind = type(model).__name__
    device = replaced(get_accelerator(), "current_device_name", lambda *_: "meta")
    try:
        # It prints what it has registered; new layers are to take no memory.
        with contextlib.redirect_stdout(io.StringIO()), device, torch.device("meta"):
            # The method of the class with a stand-in for ``self``: there is no engine yet.
            engine._apply_autotp_partitioning(_Asked(size), model, config)
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
def _played(size: int) -> Iterator[None]:
    import deepspeed.comm as comm
    from deepspeed.utils import groups

    stand_in = object()
    with (
        replaced(comm, "get_rank", lambda group=None: 0),
        replaced(comm, "get_world_size", lambda group=None: size),
        replaced(groups, "get_tensor_model_parallel_group", lambda: stand_in),
        replaced(groups, "get_tensor_model_parallel_world_size", lambda: size),
    ):
        yield


_LAYERS = "deepspeed.module_inject.layers"


@dataclass(frozen=True)
class Slice:
    """What the ranks have of a parameter."""

    shape: tuple[int, ...]
    dim: int
    ranks: tuple[tuple[tuple[int, int], ...], ...]
    reason: str = ""


def slices_of(model: nn.Module) -> dict[str, Slice]:
    """What the parameters of a model that DeepSpeed has sliced say of themselves, aliases included."""
    from deepspeed.module_inject.layers import DS_AUTOTP_UC_META

    found: dict[str, Slice] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        said = getattr(parameter, DS_AUTOTP_UC_META, None)
        if said and not said["replicated"]:
            found[name] = _slice(said)
    return found


def _slice(said: DeepSpeedConfig) -> Slice:
    shape = tuple(said["original_shape"])
    ranks = (said["conversion"].get("affine_map") or {}).get("ranks")
    if ranks is None and said["partition_sizes"] is not None:
        return Slice(shape, said["partition_dim"], _one_after_the_other(said["partition_sizes"]))
    if ranks is None:
        return Slice(shape, 0, (), said["unsupported_reason"] or "it does not say how")
    ordered = [ranks[rank]["pieces"] for rank in sorted(ranks)]
    if any("scale" in piece or len(piece["locations"]) > 1 for pieces in ordered for piece in pieces):
        return Slice(shape, 0, (), "parts of it are on several ranks")
    rows = [[run for piece in pieces for run in _runs(piece)] for pieces in ordered]
    width = shape[1] if len(shape) > 1 else 1
    if len(shape) == 1 or all(n % width == 0 and at % width == 0 for runs in rows for _, at, n in runs):
        return Slice(
            shape, 0, tuple(_merged([(to, at // width, n // width) for to, at, n in runs]) for runs in rows)
        )
    first = [[(to, at, n) for to, at, n in runs if at < width] for runs in rows]
    return Slice(shape, 1, tuple(_merged(runs) for runs in first))


def _one_after_the_other(sizes: Sequence[int]) -> tuple[tuple[tuple[int, int], ...], ...]:
    ends = [sum(sizes[: rank + 1]) for rank in range(len(sizes))]
    return tuple(((end - n, end),) if n else () for n, end in zip(sizes, ends, strict=True))


def _runs(piece: DeepSpeedConfig) -> Iterator[tuple[int, int, int]]:
    shape, (at, strides), (to, places) = piece["shape"], piece["source"], piece["dest"]
    if 0 in shape:
        return
    # From the last dimension backwards, as long as source and slice both lie without a gap: that is one run.
    split, step = len(shape), 1
    while split and (shape[split - 1] == 1 or strides[split - 1] == places[split - 1] == step):
        split -= 1
        step *= shape[split]
    starts = [(to, at)]
    for size, source, place in zip(shape[:split], strides, places, strict=False):
        starts = [(t + i * place, a + i * source) for t, a in starts for i in range(size)]
    yield from ((t, a, step) for t, a in starts)


def _merged(runs: list[tuple[int, int, int]]) -> tuple[tuple[int, int], ...]:
    found: list[tuple[int, int]] = []
    for _, first, count in sorted(runs):
        if found and found[-1][1] == first:
            found[-1] = (found[-1][0], first + count)
        elif count:
            found.append((first, first + count))
    return tuple(found)
