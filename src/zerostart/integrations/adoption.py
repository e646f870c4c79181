"""``zerostart.enabled``: existing scripts, whose ``from_pretrained`` becomes a sharded load.

What happens at a call of ``from_pretrained`` follows from the settings of the innermost ``enabled`` (or of
``enable``) and from the configuration that is active at that moment, wherever it was made.
"""

from __future__ import annotations

import contextlib
import functools
import os
import weakref
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from zerostart import engines
from zerostart.distributed.world import current_world
from zerostart.engines.deepspeed.settings import configured_dtype
from zerostart.engines.fsdp2.added import shard_added
from zerostart.errors import ConfigError
from zerostart.integrations.active import Active, find_active, fsdp2_config
from zerostart.integrations.diffusion import DiffusionCall
from zerostart.integrations.pretrained import Call, Settings
from zerostart.integrations.resizing import resize_token_embeddings
from zerostart.loading.report import report_of
from zerostart.state.full_tensors import full_tensors
from zerostart.upstream import accelerate_preparing as accelerate_parts
from zerostart.upstream import diffusers_loading as diffusers_parts
from zerostart.upstream import transformers_loading as loading_parts
from zerostart.upstream.accelerate import fsdp2_plugin, join_ranks
from zerostart.upstream.deepspeed_active import config_stage
from zerostart.upstream.deepspeed_saving import Consolidation
from zerostart.upstream.diffusers import is_diffusers

__all__ = ["Settings", "disable", "enable", "enabled"]

#: Settings of FSDP2 that the parameters of a model have, and which cannot be left to the engine's default.
POLICIES = ("mp_policy", "offload_policy")
#: Settings that are in force, the innermost last.
_stack: list[Settings] = []
#: Models that every rank read whole while zerostart was enabled, for no sharding was set up then.
_whole: weakref.WeakSet[nn.Module] = weakref.WeakSet()
#: The engine configuration with which a model was loaded for FSDP2.
_loaded: weakref.WeakKeyDictionary[nn.Module, Active] = weakref.WeakKeyDictionary()


def enable(settings: Settings) -> None:
    """Put ``settings`` in force until ``disable``; see ``zerostart.enable``."""
    _check(settings)
    with contextlib.ExitStack() as stack:
        for override in _overrides:
            override.open()
            stack.callback(override.close)
        _stack.append(settings)
        stack.pop_all()


def disable() -> None:
    """Take the settings put in force last out of it; see ``zerostart.disable``."""
    if not _stack:
        raise ConfigError("zerostart is not enabled; call zerostart.enable() before zerostart.disable()")
    _stack.pop()
    for override in _overrides:
        override.close()


@contextlib.contextmanager
def enabled(settings: Settings) -> Iterator[None]:
    """``enable`` for a block; see ``zerostart.enabled``."""
    enable(settings)
    try:
        yield
    finally:
        disable()


def _check(settings: Settings) -> None:
    if settings.engine is not None:
        engines.check_choice(settings.engine, 3 if settings.zero_stage is None else settings.zero_stage)
        return
    for name in ("zero_stage", "engine_config"):
        if getattr(settings, name) is not None:
            raise ConfigError(f"{name} is given, but no engine; name it: enabled(engine=..., {name}=...)")


def _choose(kind: type, arguments: dict[str, Any]) -> Call | None:
    """What serves a call of ``kind.from_pretrained``; None where it is the library's own affair."""
    settings = _stack[-1]
    active = _resolved(settings, kind)
    if active is None:
        if max(settings.expert_parallel, settings.tensor_parallel) > 1:
            raise ConfigError(
                f"expert_parallel={settings.expert_parallel} and tensor_parallel={settings.tensor_parallel} "
                f"are asked for, but no engine is set up when {kind.__name__}.from_pretrained is called; "
                "start the script with a DeepSpeed ZeRO-3 or FSDP2 configuration, make TrainingArguments or "
                "the Accelerator before the model, or name it: enabled(engine=...)"
            )
        return None
    join_ranks(active.engine)
    call: Call = (_WatchedDiffusion if is_diffusers(kind) else _Watched)(settings, active, arguments)
    call.check()
    return call


def _resolved(settings: Settings, kind: type) -> Active | None:
    """The active configuration, or the engine asked for, with the active one's settings where they fit."""
    found = find_active(kind)
    if settings.engine is None:
        return found
    if settings.engine_config is not None or found is None or found.engine != settings.engine:
        config = dict(settings.engine_config or {})
        configured = config_stage(config) if "stage" in (config.get("zero_optimization") or {}) else 3
        stage = configured if settings.zero_stage is None else settings.zero_stage
        dtype = configured_dtype(config) if settings.engine == "deepspeed" else None
        return Active(settings.engine, stage, config, dtype)
    return found if settings.zero_stage is None else replace(found, zero_stage=settings.zero_stage)


class _Noting(Call):
    """A call that leaves a note of what the model was loaded for."""

    def load(self, model: Any, files: Any, state_dict: Any, config: Any) -> Any:
        found = super().load(model, files, state_dict, config)
        _loaded[model] = self._active
        _accelerate.hold(model)  # It may be prepared long after the block in which it was loaded.
        if self._active.engine == "deepspeed" and self._settings.expert_parallel > 1:
            _consolidation.hold(model)
        return found


class _Watched(_Noting):
    """Of transformers."""

    def load(self, model: Any, files: Any, state_dict: Any, config: Any) -> Any:
        found = super().load(model, files, state_dict, config)
        if self._active.engine == "fsdp2" and self._active.zero_stage > 0:
            loading_parts.resize_by(model, functools.partial(resize_token_embeddings, model))
        return found


class _WatchedDiffusion(_Noting, DiffusionCall):
    """Of diffusers."""


def _whole_state(model: nn.Module, without_frozen: bool) -> Any:
    """The state dict that DeepSpeed is to save of a model whose experts are shared out; collective."""
    inner = next((m for m in model.modules() if m in _loaded), None)
    if inner is None or not report_of(inner).parallelism.mesh.parallel:
        return NotImplemented
    if inner is not model:
        raise ConfigError(
            f"{type(model).__name__} wraps a model whose experts are shared out, which cannot be saved "
            "whole; save the adapter alone, or load with expert_parallel=1"
        )
    parameters = dict(model.named_parameters(remove_duplicate=False))
    first: dict[int, torch.Tensor] = {}
    state: dict[str, torch.Tensor] = {}
    for name, tensor in full_tensors(model, 0):
        parameter = parameters.get(name)
        if tensor is None or (without_frozen and parameter is not None and not parameter.requires_grad):
            continue
        # Tied names share one tensor, as in the model's own state dict.
        state[name] = tensor if parameter is None else first.setdefault(id(parameter), tensor)
    return state if current_world().rank == 0 else None


def _whole_of_flat(model: nn.Module) -> Any:
    """The state dict of a model whose experts are shared out at ZeRO-2, where they look like the whole."""
    inner = next((m for m in model.modules() if m in _loaded), None)
    flat = inner is not None and _loaded[inner].engine == "deepspeed" and _loaded[inner].zero_stage < 3
    return _whole_state(model, False) if flat else NotImplemented


def _sharded(accelerator: Any, model: nn.Module) -> bool:
    """Whether accelerate's FSDP2 preparation is to leave ``model`` as it is.

    Raises ConfigError where it was loaded for other settings than accelerate has now.
    """
    _refuse_whole(model, "FSDP2")
    inner = next((m for m in model.modules() if m in _loaded), None)
    if inner is None:
        return False
    loaded = _loaded[inner]
    tensor_parallel = report_of(inner).parallelism.mesh.tensor_parallel
    if tensor_parallel > 1:
        raise ConfigError(
            f"{type(inner).__name__} was loaded with tensor_parallel={tensor_parallel}, whose ranks must see "
            "one batch, and accelerate gives each rank a batch of its own; use tensor_parallel=1, or a loop "
            "of your own"
        )
    plugin = fsdp2_plugin()
    if loaded.engine != "fsdp2" or plugin is None:
        raise ConfigError(
            f"{type(inner).__name__} was loaded for {loaded.engine}, and accelerate prepares it for FSDP2"
        )
    if loaded.zero_stage == 0:
        raise ConfigError(
            f"{type(inner).__name__} was loaded with zero_stage=0, whole on every rank, and accelerate "
            "prepares it for FSDP2; leave zero_stage out, or use DistributedDataParallel"
        )
    wanted = fsdp2_config(plugin, type(inner))
    # What the caller's own engine_config leaves open is no contradiction.
    chosen = {**wanted, **{key: loaded.config.get(key) for key in POLICIES}, **loaded.config}
    compared = ("reshard_after_forward", *POLICIES)
    differing = [key for key in compared if wanted.get(key) != chosen.get(key)]
    if differing:
        raise ConfigError(
            f"{type(inner).__name__} was loaded with other FSDP2 settings than accelerate has now "
            f"({', '.join(differing)}); make the Accelerator or TrainingArguments before the model, or pass "
            "zerostart.enabled(engine='fsdp2', engine_config=...) what they will have"
        )
    policies = {key: wanted[key] for key in POLICIES if key in wanted}
    shard_added(model, policies, plugin.mixed_precision != "no")
    return True


def _partitioned(accelerator: Any, model: nn.Module) -> None:
    """Raise ConfigError for a model that was not loaded for the stage that accelerate has."""
    plugin = accelerator.state.deepspeed_plugin
    if plugin.hf_ds_config.is_zero3():
        if plugin.zero3_init_flag:
            _refuse_whole(model, "DeepSpeed ZeRO-3")
        return
    inner = next((m for m in model.modules() if m in _loaded), None)
    if inner is not None and (_loaded[inner].engine != "deepspeed" or _loaded[inner].zero_stage == 3):
        loaded = _loaded[inner]
        what = "FSDP2" if loaded.engine == "fsdp2" else "DeepSpeed ZeRO-3"
        raise ConfigError(
            f"{type(inner).__name__} was loaded for {what}, and accelerate prepares it for DeepSpeed ZeRO-"
            f"{config_stage(plugin.deepspeed_config)}; make the Accelerator or TrainingArguments before the "
            "model"
        )


def _refuse_whole(model: nn.Module, engine: str) -> None:
    """Raise ConfigError for a model that every rank read whole, though zerostart was enabled."""
    for module in model.modules():
        if module in _whole:
            raise ConfigError(
                f"every rank has read {type(module).__name__} whole, since {engine} was not yet set up when "
                "from_pretrained was called; make TrainingArguments or the Accelerator before the model, or "
                f"name the engine: zerostart.enable(engine={'fsdp2' if engine == 'FSDP2' else 'deepspeed'!r})"
            )


def _left(model: nn.Module) -> None:
    """Note a model that transformers loaded by itself while ranks were there to share it."""
    if int(os.environ.get("WORLD_SIZE", "1") or 1) > 1:
        _whole.add(model)
        _accelerate.hold(model)


_transformers = loading_parts.Override(_choose, _left)
_diffusers = diffusers_parts.Override(_choose, _left)
_accelerate = accelerate_parts.Override(_sharded, _partitioned, _whole_of_flat)
_consolidation = Consolidation(_whole_state)
_overrides = (_transformers, _diffusers, _accelerate)
