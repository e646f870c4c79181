"""One call of transformers' ``from_pretrained``, or of ``from_config``, whose model starts in shards.

Parallel axes that the call asks for, in transformers' words, become those of a load.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from zerostart import engines
from zerostart.checkpoint.source import Files
from zerostart.distributed.world import current_world
from zerostart.errors import ConfigError
from zerostart.integrations.engine_setup import EngineSetup
from zerostart.integrations.loading import InterceptedLoad
from zerostart.live.model import record_of
from zerostart.loading.request import Request
from zerostart.loading.run import run
from zerostart.models import Built, build_fresh, library_of
from zerostart.upstream.seam import Findings
from zerostart.upstream.transformers.distributed import AxesAsked, axes_asked
from zerostart.upstream.transformers.models import override_plans, show_experts
from zerostart.upstream.transformers.quantizers import dequantise, dequantizer

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from transformers import PreTrainedModel


_DEVICE_MAP = "the ranks share the model out by themselves"
#: transformers' arguments for parallel axes.
_PARALLEL_ARGUMENTS = ("distributed_config", "tp_plan", "tp_size", "device_mesh")


class _TransformersCall(InterceptedLoad):
    """A call that may ask for axes of its own, in transformers' words."""

    def __init__(
        self,
        settings: Request,
        setup: EngineSetup,
        arguments: Mapping[str, object],
        on_loaded: Callable[[nn.Module, str], None],
    ) -> None:
        super().__init__(settings, setup, arguments, on_loaded)
        # Taken out of the arguments: transformers would cut the model a second time.
        self._parallel = take_parallel_arguments(self.arguments, current_world().size)
        self._settings = self._parallel.over(settings)
        if _names_the_host(self.arguments.get("device_map")):
            del self.arguments["device_map"]


class TransformersLoad(_TransformersCall):
    """``from_pretrained``; see ``upstream.transformers.loading.TransformersCall``."""

    refused: Mapping[str, str] = {
        "device_map": _DEVICE_MAP,
        "gguf_file": "its conversions calculate on whole tensors; convert it to safetensors first",
        "max_memory": "it belongs to device_map",
        "offload_folder": "it belongs to device_map",
        "offload_buffers": "it belongs to device_map",
    }

    def check(self) -> None:
        """As ``InterceptedLoad.check``, and for weights that are to be quantised."""
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
        """Load, collectively, by transformers' rules for what is missing, unexpected or mismatched.

        Raises ConfigError for a device or a quantisation that cannot be, and what ``zerostart.load`` raises.
        """
        if config.device_map is not None:
            raise ConfigError(
                f"a device is set for the model ({config.device_map}), by torch.set_default_device or "
                f"`with torch.device(...)`, which zerostart.enabled() cannot honour: {_DEVICE_MAP}"
            )
        self._setup.sequences.check(model)
        quantizer = self._quantizer(config)
        self._parallel.plan(model)
        named = model.config.dtype
        source = (
            state_dict if state_dict is not None else Files(tuple(files or ()), model.config.name_or_path)
        )
        dtype = self._setup.dtype or self._dtype
        built = Built(model, self._log, dtype, True, library_of(model), quantizer)
        converter = None if quantizer is not None else config.weight_mapping
        findings = self._load(source, built, converter, config.ignore_mismatched_sizes)
        # The configuration names the dtype that was asked for, whatever the engine trains in.
        model.config.dtype = named
        self._parallel.show(model, record_of(model).engine.mesh.expert_parallel)
        self._on_loaded(model, self.setup)
        return findings

    def dequantising(self, config: object) -> None:
        """Have a quantised checkpoint of that configuration dequantised, though nobody has asked for it.

        Raises BuildError for a method that transformers cannot dequantise while it loads.
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
    """``from_config``: builds on meta, and has each rank initialise its shards."""

    function = "from_config"

    def start(self, make: Callable[[], PreTrainedModel]) -> PreTrainedModel:
        """The model that ``make`` builds, with the unsharded model's bits; collective.

        Raises what ``zerostart.load`` raises.
        """
        # A ``zero.Init`` of the script's would partition the model while it is built.
        with engines.contexts_aside():
            built = build_fresh(make, None, self._setup.dtype)
        model: PreTrainedModel = built.model
        self._setup.sequences.check(model)
        self._parallel.plan(model)
        named = model.config.dtype
        run(self._request(None, built, library_of(model).attention(model).obstacle))
        model.config.dtype = named
        self._parallel.show(model, record_of(model).engine.mesh.expert_parallel)
        self._on_loaded(model, self.setup)
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
    """Ranks that share experts and tensors, and rules of the call over the model's own plans."""

    expert_parallel: int = 1
    tensor_parallel: int = 1
    expert_plan: Mapping[str, str] | None = None
    tensor_plan: Mapping[str, str] | None = None

    def over(self, settings: Request) -> Request:
        """``settings`` with what is asked for here; raises ConfigError where they say otherwise."""
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

    def plan(self, model: PreTrainedModel) -> None:
        """Put the rules into ``model``, on meta. Raises ConfigError for one that names nothing there."""
        override_plans(model, self.expert_plan, self.tensor_plan)

    @staticmethod
    def show(model: PreTrainedModel, expert_parallel: int) -> None:
        """Leave on the loaded ``model`` what transformers' own loading would."""
        if expert_parallel > 1:
            show_experts(model)


def take_parallel_arguments(arguments: dict[str, Any], world_size: int) -> ParallelArguments:
    """What ``arguments`` of ``from_pretrained`` ask for, taken out of them.

    Raises ConfigError for an axis that no load has, and sizes that do not fit ``world_size``.
    """
    given = {name: value for name in _PARALLEL_ARGUMENTS if (value := arguments.get(name)) is not None}
    config, alone = given.get("distributed_config"), given.keys() & {"tp_plan", "tp_size"}
    if config is not None and alone:
        return ParallelArguments()  # Which transformers itself refuses, in its own words.
    for name in _PARALLEL_ARGUMENTS:
        arguments.pop(name, None)
    mesh = given.get("device_mesh")
    # Tensor parallel in transformers' older words, without a configuration.
    if alone:
        size = given.get("tp_size") or _size_of(mesh, ("tp",)) or world_size
        # As a configuration that says the same, so that one way leads on from here.
        config = {"tp_plan": given.get("tp_plan"), "tp_size": size}
    if config is None:
        return ParallelArguments()
    axes = axes_asked(config)
    _refuse(axes, world_size)
    experts = axes.experts
    if experts is None:
        experts = _size_of(mesh, ("ep", "tp")) or world_size
    return ParallelArguments(experts, axes.tensors, axes.expert_plan, axes.tensor_plan)


def _refuse(axes: AxesAsked, world_size: int) -> None:
    """Raise ConfigError for what no load has."""
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
    # Ranks that share tensors see one batch: so many batches there are.
    shared = world_size // max(axes.tensors, 1)
    if axes.data not in (1, shared):
        raise ConfigError(
            f"distributed_config has fsdp_size={axes.data}, but {world_size} ranks with "
            f"tensor_parallel={axes.tensors} see {shared} batches; leave fsdp_size out"
        )
    if axes.nothing and world_size > 1:
        raise ConfigError(
            "distributed_config has no axis of more than one rank; pass it ep_size= or tp_size=, "
            "leave it out, or, if it was made with enable_expert_parallel=True, make it after "
            "zerostart.enable()"
        )


def _size_of(mesh: DeviceMesh | None, names: tuple[str, ...]) -> int | None:
    """The ranks of the dimension of a ``DeviceMesh`` that is called one of ``names``, or of its only one.

    None without a mesh. Raises ConfigError where there is no such dimension, or its ranks are no neighbours.
    """
    if mesh is None:
        return None
    called = tuple(mesh.mesh_dim_names or ())
    found = 0 if mesh.ndim == 1 else next((called.index(name) for name in names if name in called), None)
    if found is None:
        raise ConfigError(
            f"device_mesh has the dimensions {', '.join(called) or mesh.ndim}, and none of them is "
            f"named {' or '.join(names)}; rename one, or leave device_mesh out"
        )
    # One row for each group of ranks along that dimension. A load puts neighbours together, so each row has
    # to be of such.
    rows = mesh.mesh.movedim(found, -1).flatten(0, -2) if mesh.ndim > 1 else mesh.mesh.unsqueeze(0)
    size: int = rows.shape[-1]
    for row in rows.tolist():
        if row[0] % size or row != list(range(row[0], row[0] + size)):
            raise ConfigError(
                f"device_mesh groups the ranks {row}, but ranks that share experts or tensors must be "
                f"neighbours; make its last dimension the one of {size} ranks"
            )
    return size
