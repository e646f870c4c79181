"""Checkpoints of accelerate and the Trainer, and models that accelerate prepares.

On DeepSpeed both libraries call the engine's ``save_checkpoint`` and ``load_checkpoint``, on FSDP2 four
functions of accelerate. The replacements here write a directory as ``zerostart.save_state`` does. They also
read the libraries' own files.
"""

from __future__ import annotations

import logging
import pickle
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from zerostart import engines
from zerostart.checkpoint.formats.saved_state import DEEPSPEED, FSDP, LATEST, state_in, warn_of_newer
from zerostart.checkpoint.write.folders import sync_directory, write_whole
from zerostart.checkpoint.write.staging import write_errors
from zerostart.distributed.world import World, current_world
from zerostart.engines.fsdp2.units import shard_added, shard_around
from zerostart.engines.optimizers import is_elementwise
from zerostart.errors import ConfigError, ZerostartError
from zerostart.integrations.engine_setup import check_sharing, check_tensors, fsdp2_config
from zerostart.integrations.saving import is_sharded
from zerostart.live.model import find_loaded_models, find_record, get_record, unwrap_loaded
from zerostart.live.training import training_state
from zerostart.state.resuming.load_state import restore_state
from zerostart.state.resuming.save_state import write_state
from zerostart.upstream.accelerate.plugins import FSDP2Plugin, fsdp2_plugin
from zerostart.upstream.deepspeed.active import config_stage
from zerostart.upstream.types import Accelerator, FSDPPlugin

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

logger = logging.getLogger("zerostart")

Original = Callable[[], object]
_CLIENT, _CLIENTS = "client_state", "client_states"
#: For each directory with a pending save: True to save only the adapters.
_adapters_only: dict[Path, bool] = {}


def save_checkpoint(
    original: Original,
    *,
    self: DeepSpeedEngine,
    save_dir: str | None,
    tag: object,
    client_state: Mapping[str, object],
    save_latest: bool,
    exclude_frozen_parameters: bool,
    **_: object,
) -> object:
    """Replace ``DeepSpeedEngine.save_checkpoint``."""
    engine = self
    # Engines are equal on all ranks, so all ranks decide the same.
    if not save_dir or not _can_save(engine):
        return original()
    name = str(tag if tag is not None else f"global_step{engine.global_steps}")
    path, world = Path(save_dir), current_world()
    extra = _client_states(client_state, engine, world)
    frozen = not exclude_frozen_parameters
    write_state(path / name, engine, None, extra, wait=True, frozen=frozen)
    # Update ``latest`` after the save: until then readers find the previous checkpoint.
    with (
        world.phase(f"updating the file {LATEST}"),
        write_errors(path, f"{name} is saved, but the file {LATEST} does not name it"),
    ):
        if save_latest and world.rank == 0:
            write_whole(path / LATEST, name.encode(), path / f".{LATEST}.part")
            sync_directory(path)
    return True


def _client_states(own: Any, engine: DeepSpeedEngine, world: World) -> dict[str, object]:
    state = dict(own)
    # Only at stage 3 does DeepSpeed save one file for each rank; otherwise rank 0 saves its state.
    if not engine.zero_optimization_partition_weights():
        return {_CLIENT: world.broadcast_object(lambda: state, "sending rank 0's client state")}
    states = world.all_gather_object(state, "collecting the client states")
    are_alike = len({pickle.dumps(each) for each in states}) == 1
    return {_CLIENT: states[0]} if are_alike else {_CLIENT: states[0], _CLIENTS: states[1:]}


def load_checkpoint(
    original: Original,
    *,
    self: DeepSpeedEngine,
    load_dir: str,
    tag: str | None,
    load_optimizer_states: bool,
    load_lr_scheduler_states: bool,
    load_module_only: bool,
    custom_load_fn: object,
    **_: object,
) -> object:
    """Replace ``DeepSpeedEngine.load_checkpoint``; raise ConfigError for unsupported arguments."""
    engine = self
    path = state_in(load_dir, _parse_model_index(tag), tag)
    if path is None:
        return original()
    if current_world().rank == 0:
        warn_of_newer(Path(load_dir), path)
    if custom_load_fn is not None:
        raise ConfigError(
            f"{path} was saved by zerostart, which does not call custom_load_fn; leave it out, or "
            f"load the model with zerostart.load({str(path / 'model')!r})"
        )
    schedule = engine.lr_scheduler
    keeps_schedule = not load_lr_scheduler_states and hasattr(schedule, "state_dict")
    # restore_state also loads the schedule: undo that if the caller did not request it.
    schedule_state = schedule.state_dict() if keeps_schedule else None
    with_optimizer = load_optimizer_states and not load_module_only
    extra = restore_state(path, engine, None, with_optimizer=with_optimizer, counters=not load_module_only)
    if schedule_state is not None:
        schedule.load_state_dict(schedule_state)
    return str(path), _client_state(extra or {}, current_world())


def _client_state(extra: Mapping[str, Any], world: World) -> object:
    states = [extra.get(_CLIENT, {}), *extra.get(_CLIENTS, ())]
    return states[world.rank if len(states) == world.size else 0]


def _parse_model_index(tag: str | None) -> int:
    """Parse the index of the model from accelerate's tag (``pytorch_model_1``); 0 for other tags."""
    last = (tag or "").removeprefix(f"{DEEPSPEED}_")
    return int(last) if last.isdecimal() else 0


def _can_save(engine: DeepSpeedEngine) -> bool:
    # Leave node-local files to DeepSpeed.
    if engine.use_node_local_storage():
        return False
    if next(find_loaded_models(engine.module), None) is not None:
        return True
    # No layout here describes engines without ZeRO, DeepSpeed's MoE and Megatron's mpu.
    if not engine.zero_optimization() or engine.has_moe_layers or engine.mpu is not None:
        return False
    try:
        # This raises if the state cannot be read; the result is not needed.
        training_state(engine, None)
    except ZerostartError:
        return False
    return True


def save_fsdp_model(original: Original, **call: Any) -> object:
    """Replace accelerate's function; leave the save to the optimizer's call if there is one."""
    model, number = call["model"], call["model_index"]
    if not _is_saved_here(call["fsdp_plugin"], model):
        return original()
    path, adapters_only = _fsdp_path(call["output_dir"], number), call["adapter_only"]
    if _has_optimizer(call["accelerator"], number):
        # accelerate then calls ``save_fsdp_optimizer``, which writes one directory with both, but gets no
        # ``adapter_only``.
        _adapters_only[path] = adapters_only
    else:
        write_state(path, model, None, None, wait=True, frozen=not adapters_only)
    return None


def save_fsdp_optimizer(original: Original, **call: Any) -> object:
    """Replace accelerate's function; save the model and its optimizer."""
    model = call["model"]
    if not _is_saved_here(call["fsdp_plugin"], model):
        return original()
    path = _fsdp_path(call["output_dir"], call["optimizer_index"])
    frozen = not _adapters_only.pop(path, False)
    write_state(path, model, call["optimizer"], None, wait=True, frozen=frozen)
    return None


def begin_fsdp_load(original: Original, **call: Any) -> object:
    """Replace ``load_fsdp_model`` in ``load_state``; leave the load to the optimizer's call, if any."""
    number = call["model_index"]
    if _has_optimizer(call["accelerator"], number) and state_in(call["input_dir"], number) is not None:
        return None
    return load_fsdp_model(original, **call)


def load_fsdp_model(original: Original, **call: Any) -> object:
    """Replace accelerate's function; load the model without an optimizer."""
    return _load_fsdp(original, call["input_dir"], call["model_index"], call["model"], None)


def load_fsdp_optimizer(original: Original, **call: Any) -> object:
    """Replace accelerate's function; load the model and its optimizer."""
    return _load_fsdp(original, call["input_dir"], call["optimizer_index"], call["model"], call["optimizer"])


def _load_fsdp(
    original: Original, directory: str, number: int, model: nn.Module, optimizer: torch.optim.Optimizer | None
) -> object:
    path = state_in(directory, number)
    if path is None:
        return original()
    restore_state(path, model, optimizer)
    return None


def _is_saved_here(plugin: FSDPPlugin, model: nn.Module) -> bool:
    if plugin.fsdp_version != 2:
        return False
    return next(find_loaded_models(model), None) is not None or is_sharded(model)


def _has_optimizer(accelerator: Accelerator, model_index: int) -> bool:
    # accelerate pairs models and optimizers by index.
    return len(accelerator._optimizers) > model_index


def _fsdp_path(directory: str, number: int) -> Path:
    return Path(directory) / f"{FSDP}_{number}"


def load_accelerator_state(original: Callable[[], dict[str, object]], **_: object) -> dict[str, object]:
    """Replace accelerate's function; new ranks get the step from rank 0."""
    # Each rank saved a file. With more ranks than at the save, new ranks have no file and no step.
    state = original()
    world = current_world()
    step = world.broadcast_object(lambda: state.get("step"), "agreeing on the step")
    if step is not None:
        state.setdefault("step", step)
    return state


#: Settings of ``fully_shard`` that come from accelerate, not from the engine's defaults.
POLICIES = ("mp_policy", "offload_policy")
#: Models that every rank loaded whole, because no sharding was set up.
_unsharded_models: weakref.WeakSet[nn.Module] = weakref.WeakSet()
#: Optimizer classes for which the warning was logged.
_warned: set[type] = set()


def record_unsharded(model: nn.Module) -> None:
    """Record a model that every rank has loaded whole."""
    _unsharded_models.add(model)


def prepare_fsdp2(model: nn.Module) -> bool:
    """Shard parameters that a script added; True if accelerate must not shard ``model``.

    Raises ConfigError if ``model``, or a part of it, was loaded with other settings than accelerate's.
    """
    # Check everything before the first shard: a refused model stays unchanged.
    _refuse_unsharded(model, "fsdp2")
    parts = list(find_loaded_models(model))
    plugin = fsdp2_plugin()
    policies_of_parts = [_fsdp2_policies(part, plugin) for part in parts]
    if plugin is None or not parts:
        return False
    _refuse_added_parameters(model, parts)
    policies, fp32 = policies_of_parts[0], plugin.mixed_precision != "no"
    # If only parts of the script's model were loaded, shard parameters within the parts first, then the
    # parameters around them.
    if find_record(unwrap_loaded(model)) is not None:
        shard_added(model, policies, fp32)
        return True
    for part in parts:
        shard_added(part, policies, fp32)
    shard_around(model, policies, fp32)
    return True


def _refuse_added_parameters(model: nn.Module, parts: Sequence[nn.Module]) -> None:
    """Raise ConfigError for parameters added to a tensor-parallel model."""
    sharing = max(get_record(part).engine.mesh.tensor_parallel for part in parts)
    added = [n for n, p in model.named_parameters() if p.dim() and not isinstance(p, DTensor)]
    if sharing > 1 and added:
        raise ConfigError(
            f"{added[0]} was added to a model that was loaded with tensor_parallel={sharing}, "
            "which is not available with FSDP2; use tensor_parallel=1"
        )


def _fsdp2_policies(part: nn.Module, plugin: FSDP2Plugin | None) -> Mapping[str, object]:
    engine = get_record(part).engine
    check_tensors(part)
    check_sharing(part)
    if engine.owns_optimizer or plugin is None:
        raise ConfigError(
            f"{type(part).__name__} was loaded for {engine.title}, but accelerate prepares it for "
            "FSDP2; make the Accelerator or TrainingArguments before the model"
        )
    if engine.replicates_parameters:
        raise ConfigError(
            f"{type(part).__name__} was loaded with zero_stage=0 and is whole on every rank, but "
            "accelerate prepares it for FSDP2; leave zero_stage out, or use "
            "DistributedDataParallel"
        )
    current = fsdp2_config(plugin, type(part))
    # Compare only settings that the caller's engine_config has.
    own = dict(engine.config or {})
    loaded = {**current, **{key: own.get(key) for key in POLICIES}, **own}
    compared = ("reshard_after_forward", *POLICIES)
    differing = [key for key in compared if current.get(key) != loaded.get(key)]
    if differing:
        raise ConfigError(
            f"{type(part).__name__} was loaded with other FSDP2 settings than accelerate has now "
            f"({', '.join(differing)}); make the Accelerator or TrainingArguments before the "
            "model, or pass zerostart.enabled(engine='fsdp2', engine_config=...) the settings "
            "that accelerate will have"
        )
    return {key: current[key] for key in POLICIES if key in current}


def check_deepspeed(accelerator: Accelerator, model: nn.Module) -> None:
    """Raise ConfigError if ``model`` or a part was loaded for another ZeRO stage."""
    plugin = accelerator.state.deepspeed_plugin
    parts = list(find_loaded_models(model))
    for part in parts:
        check_sharing(part)
        check_tensors(part, plugin.deepspeed_config)
    if plugin.hf_ds_config.is_zero3():
        if plugin.zero3_init_flag:
            _refuse_unsharded(model, "deepspeed")
        return
    for part in parts:
        engine = get_record(part).engine
        if not (engine.owns_optimizer and engine.replicates_parameters):
            raise ConfigError(
                f"{type(part).__name__} was loaded for {engine.title}, but accelerate prepares it for "
                f"DeepSpeed ZeRO-{config_stage(plugin.deepspeed_config)}; make the Accelerator or "
                "TrainingArguments before the model"
            )


def warn_about_optimizer(optimizer: object) -> None:
    """Warn once, on rank 0, about an optimizer that may combine elements of shards."""
    kind, world = type(getattr(optimizer, "optimizer", optimizer)), current_world()
    if world.size == 1 or world.rank or is_elementwise(kind) or kind in _warned:
        return
    _warned.add(kind)
    logger.warning(
        "%s.%s is not known to step each element by itself. Every rank steps its own shards, so the result "
        "may differ from one process with the whole model. Use AdamW or ZeRO stage 0, or, if it does step "
        "each element by itself, call zerostart.training.register_elementwise_optimizer(%s)",
        kind.__module__,
        kind.__qualname__,
        kind.__name__,
    )


def _refuse_unsharded(model: nn.Module, engine: str) -> None:
    """Raise ConfigError for a model that every rank has loaded whole."""
    for module in model.modules():
        if module in _unsharded_models:
            title = engines.title_of(engine, 3)
            raise ConfigError(
                f"every rank has loaded {type(module).__name__} whole, because {title} was not set up "
                "yet when from_pretrained was called; make TrainingArguments or the Accelerator "
                f"before the model, or name the engine: zerostart.enable(engine={engine!r})"
            )
