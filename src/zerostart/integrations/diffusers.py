"""Load diffusers' models in shards, and whole pipelines with a placement for each component."""

from __future__ import annotations

import contextlib
import logging
import os
import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from zerostart.checkpoint.formats.pipeline import Component, components
from zerostart.checkpoint.paths import shown_record
from zerostart.checkpoint.source import WeightFiles, resolve_source
from zerostart.checkpoint.strict_json import read_json
from zerostart.checkpoint.usual_names import PIPELINE_INDEX
from zerostart.distributed.world import default_device, joined_world
from zerostart.errors import CheckpointError, ConfigError
from zerostart.integrations.later_calls import serve_saving
from zerostart.integrations.loading import InterceptedLoad
from zerostart.live.model import get_record
from zerostart.loading.offload import Window, load_offloaded, release
from zerostart.loading.placement import Placement
from zerostart.loading.request import Request, dtype_of
from zerostart.loading.run import run
from zerostart.models import Built, library_of
from zerostart.transfer.meter import allocated_bytes
from zerostart.upstream.diffusers.weights import assembled, component_class, pipeline_class
from zerostart.upstream.seam import Findings
from zerostart.upstream.transformers.models import without_weights
from zerostart.upstream.types import Pipeline

if TYPE_CHECKING:
    from diffusers import ModelMixin

logger = logging.getLogger("zerostart")


class DiffusersLoad(InterceptedLoad):
    """Load by diffusers' rules: the model's constructor initialises missing tensors."""

    refused: Mapping[str, str] = {
        "device_map": "the ranks divide the model themselves",
        "max_memory": "it belongs to device_map",
        "offload_folder": "it belongs to device_map",
        "offload_state_dict": "it belongs to device_map",
        "parallel_config": "the mesh is the engine's",
        "use_flashpack": "the weights are read from safetensors and torch files",
        "quantization_config": "weights are sharded as they train, and quantised ones are not trained",
    }

    def building(self, dtype: torch.dtype) -> tuple[torch.dtype, AbstractContextManager[None]]:
        """Return the requested dtype, in which diffusers computes buffers, and a context on meta."""
        self._dtype = dtype
        return dtype, self._on_meta(dtype)

    @contextlib.contextmanager
    def _on_meta(self, dtype: torch.dtype) -> Iterator[None]:
        with without_weights(dtype), self._logged():
            yield

    def load(self, model: ModelMixin, files: list[str], name: object, options: Mapping[str, Any]) -> Findings:
        """Load the checkpoint ``name`` with diffusers' own ``options``; collective.

        Raises ConfigError for quantised weights, and the errors of ``zerostart.load``.
        """
        if options.get("hf_quantizer") is not None:
            raise ConfigError(
                f"{name} is quantised, and quantised weights cannot be trained; load weights that are "
                "not quantised"
            )
        built = Built(model, self._log, self._setup.dtype or options.get("dtype"), True, library_of(model))
        source = WeightFiles(tuple(files), str(name))
        findings = self._load(source, built, None, bool(options.get("ignore_mismatched_sizes")))
        self._on_loaded(model, self.setup)
        return findings


#: Engine and stage of a load that is whole on every rank.
WHOLE = {"engine": "fsdp2", "zero_stage": 0, "engine_reason": "for a whole copy"}
#: For each pipeline: names of components with the placement "drop".
_to_drop: weakref.WeakKeyDictionary[Any, tuple[str, ...]] = weakref.WeakKeyDictionary()


@dataclass(frozen=True, kw_only=True)
class PipelineRequest:
    """Arguments of ``zerostart.load_pipeline``; see there."""

    source: Any
    placement: Mapping[str, object] | None = None
    engine: str | None = None
    zero_stage: int = 3
    device_memory_limit: int | None = None
    engine_config: object = None
    dtype: object = None
    trainable: Sequence[str] = ()
    memory_limit: int | None = None
    progress: bool = True
    without: Sequence[str] = ()

    __repr__ = shown_record


def _check_kinds(request: PipelineRequest) -> None:
    for key, kinds, wanted in (
        ("source", (str, os.PathLike), "a string or a path"),
        ("placement", (Mapping, type(None)), "a dictionary or None"),
        ("trainable", (list, tuple), "a list of strings"),
    ):
        value = getattr(request, key)
        if not isinstance(value, kinds):
            raise ConfigError(f"{key}={value!r} is not accepted; give {wanted}")


def load_pipeline(request: PipelineRequest) -> Any:
    """Load a pipeline; see ``zerostart.load_pipeline``."""
    world = joined_world()
    with world.phase("loading the pipeline"):
        _check_kinds(request)
        request = replace(request, dtype=dtype_of(request.dtype))
        root, parts, placements = world.broadcast_object(
            lambda: _inspect_request(request), "the pipeline's index"
        )
        kind = pipeline_class(read_json(root / PIPELINE_INDEX, "pipeline index").get("_class_name"), root)
        parts = tuple(component for component in parts if component.name not in request.without)
        kinds = {c.name: component_class(c.library, c.kind, f"{root / c.name}") for c in parts}
        device = default_device()
        before = allocated_bytes(device)
        # Load shards and replicas first: fetched components use the remaining device memory.
        models: dict[str, nn.Module] = {}
        for component in parts:
            placement = placements[component.name]
            if placement.kind == "shard" and "Autoencoder" in component.kind and world.rank == 0:
                logger.warning(
                    "%s (%s) is sharded, so all ranks have to call it equally often: for clips of different "
                    "lengths pass placement={%r: 'replicate'}",
                    *(component.name, component.kind, component.name),
                )
            if not placement.is_fetched:
                models[component.name] = _load_component(request, component, kinds, placement)
        window = _window(request, device, allocated_bytes(device) - before)
        fetched = [component for component in parts if placements[component.name].is_fetched]
        # Components that rest on the device come first: the others are divided to fit the remaining memory.
        for component in sorted(fetched, key=lambda one: placements[one.name].kind == "offload"):
            placement = placements[component.name]
            own = _own_request(request, component, kinds, placement, WHOLE)
            grows = request.device_memory_limit is None
            models[component.name] = load_offloaded(own, placement, window, grows)
        with world.phase("assembling the pipeline"):
            pipe = assembled(kind, root, {**models, **dict.fromkeys(request.without)})
    _to_drop[pipe] = tuple(name for name, placement in placements.items() if placement.kind == "drop")
    return pipe


def drop_components(pipe: Pipeline, *names: str) -> tuple[str, ...]:
    """Drop components; see ``zerostart.drop_components``. Raises ConfigError for unknown names."""
    chosen = names or _to_drop.get(pipe, ())
    for name in chosen:
        if name not in pipe.components:
            raise ConfigError(f"the pipeline has no component {name!r}; it has {', '.join(pipe.components)}")
    dropped = tuple(name for name in chosen if pipe.components[name] is not None)
    for name in dropped:
        component = pipe.components[name]
        if isinstance(component, nn.Module):
            release(component)
        # diffusers' code treats None as a missing component.
        pipe.register_modules(**{name: None})
    return dropped


def _inspect_request(request: PipelineRequest) -> tuple[Path, tuple[Component, ...], dict[str, Placement]]:
    limit = request.device_memory_limit
    if limit is not None and limit < 1:
        raise ConfigError(f"device_memory_limit={limit} must be a number of bytes")
    root = resolve_source(request.source)
    models = components(root)
    if models is None:
        raise CheckpointError(
            f"{root} has no {PIPELINE_INDEX}, so it is not a pipeline; zerostart.load takes a single model"
        )
    chosen = {} if request.placement is None else request.placement
    names = [component.name for component in models]
    _check_names("placement", chosen, names, root)
    _check_names("trainable", request.trainable, names, root)
    _check_names("without", request.without, names, root)
    for name in (*chosen, *request.trainable):
        if name in request.without:
            raise ConfigError(
                f"{name} is left out (without=), so it can be neither placed nor trained; remove it "
                "from one of the two arguments"
            )
    placements = {name: Placement.of(chosen.get(name, "shard"), name) for name in names}
    for name in request.trainable:
        if placements[name].kind not in ("shard", "replicate") or placements[name].is_fetched:
            typed = " with a storage dtype" if placements[name].storage_dtype else ""
            raise ConfigError(
                f"{name} is to be trained, but is placed {placements[name].kind!r}{typed}: place what is "
                "trained 'shard' or 'replicate', in the dtype in which it computes"
            )
    return root, models, placements


def _check_names(argument: str, values: Collection[str], names: Sequence[str], root: Path) -> None:
    unknown = [name for name in values if name not in names]
    if unknown:
        raise ConfigError(
            f"{argument} names {unknown[0]!r}, which is no model of {root}; its models are {', '.join(names)}"
        )


def _own_request(
    request: PipelineRequest,
    component: Component,
    kinds: Mapping[str, type[nn.Module]],
    placement: Placement,
    engine: Mapping[str, Any],
) -> Request:
    return Request(
        source=str(component.path),
        model=kinds[component.name],
        dtype=placement.compute_dtype or request.dtype,
        memory_limit=request.memory_limit,
        progress=request.progress,
        **engine,
    )


def _load_component(
    request: PipelineRequest,
    component: Component,
    kinds: Mapping[str, type[nn.Module]],
    placement: Placement,
) -> nn.Module:
    """Load a component that stays in place, sharded or whole."""
    shared = {
        "engine": request.engine,
        "zero_stage": request.zero_stage,
        "engine_config": request.engine_config,
    }
    how = shared if placement.kind == "shard" else WHOLE
    model = run(_own_request(request, component, kinds, placement, how), serve_saving)
    if component.name not in request.trainable:
        model.requires_grad_(False)
        engine = get_record(model).engine
        engine.make_callable(model)
    return model


def _window(request: PipelineRequest, device: torch.device, used_bytes: int) -> Window:
    limit = request.device_memory_limit
    if limit is not None and used_bytes >= limit:
        raise ConfigError(
            f"the components that stay on {device} take {used_bytes} bytes of device_memory_limit={limit}; "
            "raise it, shard more of them, or place more of them 'offload'"
        )
    return Window(0 if limit is None else limit - used_bytes, device)
