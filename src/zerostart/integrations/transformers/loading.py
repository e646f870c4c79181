"""Load a model for transformers' ``from_pretrained``, or initialise one for ``from_config``.

Parallel axes among transformers' arguments become axes of the load.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from zerostart import engines
from zerostart.checkpoint.source import WeightFiles
from zerostart.distributed.world import current_world
from zerostart.errors import ConfigError
from zerostart.integrations.engine_setup import EngineSetup
from zerostart.integrations.loading import InterceptedLoad
from zerostart.live.model import get_record
from zerostart.loading.request import Request
from zerostart.loading.run import run
from zerostart.models import Built, build_fresh, library_of
from zerostart.upstream.seam import Findings
from zerostart.upstream.transformers.distributed import RequestedAxes, requested_axes
from zerostart.upstream.transformers.models import mark_expert_parallel, override_plans
from zerostart.upstream.transformers.quantizers import dequantise, dequantizer

if TYPE_CHECKING:
    from transformers import PreTrainedModel


_DEVICE_MAP = "the ranks share the model out by themselves"
#: transformers' arguments for parallel axes.
_PARALLEL_ARGUMENTS = ("distributed_config", "tp_plan", "tp_size", "device_mesh")


class _TransformersCall(InterceptedLoad):
    """Call of transformers that may request parallel axes."""

    def __init__(
        self,
        settings: Request,
        setup: EngineSetup,
        arguments: Mapping[str, object],
        on_loaded: Callable[[nn.Module, str], None],
    ) -> None:
        super().__init__(settings, setup, arguments, on_loaded)
        # transformers must not see them: it would slice the model again.
        self._parallel = take_parallel_arguments(self.arguments, current_world().size)
        self._settings = self._parallel.over(settings)
        if _names_the_host(self.arguments.get("device_map")):
            del self.arguments["device_map"]

    def _plan(self, model: PreTrainedModel) -> None:
        """Apply the call's plans to ``model``, on meta; raise ConfigError for a rule without a match."""
        self._setup.sequences.check(model)
        override_plans(model, self._parallel.expert_plan, self._parallel.tensor_plan)

    def _finish(self, model: PreTrainedModel, dtype: torch.dtype) -> None:
        """Set the attributes that transformers' own loading would set."""
        # The configuration keeps the requested dtype, even if the engine trains in another.
        model.config.dtype = dtype
        if get_record(model).engine.mesh.expert_parallel > 1:
            mark_expert_parallel(model)
        self._on_loaded(model, self.setup)


class TransformersLoad(_TransformersCall):
    """Serve ``from_pretrained``; see ``upstream.transformers.loading.TransformersSeam``."""

    refused: Mapping[str, str] = {
        "device_map": _DEVICE_MAP,
        "gguf_file": "its conversions calculate on whole tensors; convert it to safetensors first",
        "max_memory": "it belongs to device_map",
        "offload_folder": "it belongs to device_map",
        "offload_buffers": "it belongs to device_map",
    }

    def check(self) -> None:
        """Check the arguments; refuse quantisation during the load."""
        super().check()
        quantization = self.arguments.get("quantization_config")
        if quantization is not None and not _dequantises(quantization):
            raise ConfigError(
                "from_pretrained(quantization_config=...) is not available under zerostart.enabled(): "
                "quantised weights cannot be trained. Leave it out: a quantised checkpoint is "
                "dequantised while it is read"
            )

    def load(
        self,
        model: PreTrainedModel,
        files: list[str] | None,
        state_dict: Mapping[str, torch.Tensor] | None,
        config: Any,
    ) -> Findings:
        """Load by transformers' rules for missing, unexpected and mismatched tensors; collective.

        Raises ConfigError for a device or unsupported quantisation, and the errors of ``zerostart.load``.
        """
        if config.device_map is not None:
            raise ConfigError(
                f"a device is set for the model ({config.device_map}), by torch.set_default_device or "
                f"`with torch.device(...)`, which zerostart.enabled() cannot honour: {_DEVICE_MAP}"
            )
        quantizer = self._quantizer(config)
        self._plan(model)
        named = model.config.dtype
        weight_files = WeightFiles(tuple(files or ()), model.config.name_or_path)
        source = weight_files if state_dict is None else state_dict
        dtype = self._setup.dtype or self._dtype
        built = Built(model, self._log, dtype, True, library_of(model), quantizer)
        converter = None if quantizer is not None else config.weight_mapping
        findings = self._load(source, built, converter, config.ignore_mismatched_sizes)
        self._finish(model, named)
        return findings

    def dequantising(self, config: object) -> None:
        """Let a quantised checkpoint with this configuration be dequantised.

        Raises BuildError for a method that transformers cannot dequantise during a load.
        """
        dequantise(config)

    def _quantizer(self, config: Any) -> Any:
        if config.hf_quantizer is None:
            return None
        quantization = config.hf_quantizer.quantization_config
        name = config.pretrained_model_name_or_path
        if self.arguments.get("key_mapping"):
            raise ConfigError("key_mapping with a quantised checkpoint is not available; use zerostart.load")
        return dequantizer(quantization.to_dict(), str(name))


class FromConfigLoad(_TransformersCall):
    """Serve ``from_config``: build on meta, and let each rank initialise its shards."""

    function = "from_config"

    def start(self, make: Callable[[], PreTrainedModel]) -> PreTrainedModel:
        """Return the model of ``make`` with the unsharded model's initial values; collective.

        Raises the errors of ``zerostart.load``.
        """
        # A `zero.Init` of the script would partition the model during the build.
        with engines.suspended_contexts():
            built = build_fresh(make, None, self._setup.dtype)
        model: PreTrainedModel = built.model
        self._plan(model)
        named = model.config.dtype
        run(self._request(None, built, library_of(model).attention(model).obstacle))
        self._finish(model, named)
        return model


def _names_the_host(device_map: object) -> bool:
    if torch.accelerator.is_available() or device_map is None:
        return False
    if isinstance(device_map, Mapping):
        return bool(device_map) and all(str(device) == "cpu" for device in device_map.values())
    return str(device_map) in ("auto", "balanced", "balanced_low_0", "sequential", "cpu")


def _dequantises(quantization: object) -> bool:
    if isinstance(quantization, Mapping):
        return bool(quantization.get("dequantize"))
    return bool(getattr(quantization, "dequantize", False))


@dataclass(frozen=True)
class ParallelArguments:
    """Sizes of expert and tensor parallelism, and plans that replace the model's."""

    expert_parallel: int = 1
    tensor_parallel: int = 1
    expert_plan: Mapping[str, str] | None = None
    tensor_plan: Mapping[str, str] | None = None

    def over(self, settings: Request) -> Request:
        """Add the sizes to ``settings``; raise ConfigError if they differ."""
        sizes: dict[str, Any] = {}
        for name in ("expert_parallel", "tensor_parallel"):
            asked, set_ = getattr(self, name), getattr(settings, name)
            if asked > 1 and set_ not in (1, asked):
                raise ConfigError(
                    f"from_pretrained has {name}={asked}, but zerostart is enabled with {name}={set_}; "
                    "leave one of them out"
                )
            sizes[name] = max(asked, set_)
        return dataclasses.replace(settings, **sizes)


def take_parallel_arguments(arguments: dict[str, Any], world_size: int) -> ParallelArguments:
    """Remove the parallel arguments of ``from_pretrained`` from ``arguments`` and return them.

    Raises ConfigError for unsupported axes, and for sizes that do not fit ``world_size``.
    """
    values = {name: value for name in _PARALLEL_ARGUMENTS if (value := arguments.get(name)) is not None}
    config, older = values.get("distributed_config"), values.keys() & {"tp_plan", "tp_size"}
    if config is not None and older:
        return ParallelArguments()  # transformers refuses this combination itself
    for name in _PARALLEL_ARGUMENTS:
        arguments.pop(name, None)
    mesh = values.get("device_mesh")
    if mesh is not None and (mesh.ndim, mesh.size()) != (1, world_size):
        raise ConfigError(
            f"device_mesh has the shape {tuple(mesh.shape)}, but only one of one dimension with all "
            f"{world_size} ranks is available; leave it out, and pass ep_size= or tp_size="
        )
    if older:  # older arguments for tensor parallelism: convert them to a configuration
        config = {"tp_plan": values.get("tp_plan"), "tp_size": values.get("tp_size") or world_size}
    if config is None:
        return ParallelArguments()
    axes = requested_axes(config)
    _refuse(axes, world_size)
    experts = world_size if axes.experts is None else axes.experts
    return ParallelArguments(experts, axes.tensors, axes.expert_plan, axes.tensor_plan)


def _refuse(axes: RequestedAxes, world_size: int) -> None:
    """Raise ConfigError for unsupported axes."""
    if axes.stages > 1:
        raise ConfigError(
            f"distributed_config has pp_size={axes.stages}, but pipeline parallelism is not "
            "available; leave it out"
        )
    if axes.unserved:
        raise ConfigError(
            f"distributed_config has {axes.unserved[0]}, which the engine's own configuration decides here; "
            "leave it out"
        )
    if axes.replicas > 1:
        raise ConfigError(
            f"distributed_config has dp_replicate_size={axes.replicas}; leave it out, and ask for replicas "
            "with zerostart.enabled(engine='fsdp2', engine_config={'replicate': ...})"
        )
    # Tensor-parallel ranks get the same batch.
    shared = world_size // max(axes.tensors, 1)
    if axes.data not in (1, shared):
        raise ConfigError(
            f"distributed_config has fsdp_size={axes.data}, but {world_size} ranks with "
            f"tensor_parallel={axes.tensors} see {shared} batches; leave fsdp_size out"
        )
    if axes.is_trivial and world_size > 1:
        raise ConfigError(
            "distributed_config has no axis of more than one rank; pass it ep_size= or tp_size=, "
            "leave it out, or, if it was made with enable_expert_parallel=True, make it after "
            "zerostart.enable()"
        )
