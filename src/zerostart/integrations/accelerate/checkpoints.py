"""Checkpoints of accelerate and the Trainer, through DeepSpeed's engine and accelerate's FSDP2 functions.

On DeepSpeed both go through ``save_checkpoint`` and ``load_checkpoint`` of the engine, on FSDP2 through four
functions of accelerate. What they write here is a directory of ``save_state``, where the library's own files
would be; what the library itself has written it also reads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from zerostart.checkpoint.formats.saved_state import DEEPSPEED, FSDP, LATEST, state_in, tell_of_newer
from zerostart.checkpoint.write.folders import sync_directory, write_whole
from zerostart.checkpoint.write.staging import write_errors
from zerostart.distributed.world import World, current_world
from zerostart.errors import ConfigError, ZerostartError
from zerostart.integrations.saving import in_shards
from zerostart.live.model import loaded_models
from zerostart.live.training import training_state
from zerostart.state.resuming.load_state import load_state
from zerostart.state.resuming.save_state import save_state
from zerostart.state.resuming.values import checksum, encoded_whole

Original = Callable[[], Any]
_CLIENT, _CLIENTS = "client_state", "client_states"
#: Whether adapters alone were asked for, of models that are saved with the optimizer that follows.
_adapters_alone: dict[Path, bool] = {}


def save_checkpoint(original: Original, **call: Any) -> Any:
    """``DeepSpeedEngine.save_checkpoint``."""
    engine, directory = call["self"], call["save_dir"]
    if not directory or not _movable(engine):
        return original()
    tag = str(call["tag"] if call["tag"] is not None else f"global_step{engine.global_steps}")
    path, world = Path(directory), current_world()
    extra = _client_states(call["client_state"], engine, world)
    frozen = not call["exclude_frozen_parameters"]
    save_state(path / tag, engine, None, extra, wait=True, frozen=frozen, saved=path)
    with (
        world.phase("naming the last checkpoint"),
        write_errors(path, f"{tag} is saved, and not named as the last"),
    ):
        if call["save_latest"] and world.rank == 0:
            write_whole(path / LATEST, tag.encode(), path / f".{LATEST}.part")
            sync_directory(path)
    return True


def _client_states(own: Any, engine: Any, world: World) -> dict[str, Any]:
    """What DeepSpeed keeps of a script's own: the first rank's, and at stage 3 that of every rank."""
    with world.phase("looking at the client's state"):
        state, tensors = dict(own), dict[str, Any]()
        written = encoded_whole(state, _CLIENT, tensors)
        own_sum = checksum(written, tensors)
    alike = len(set(world.all_gather_object(own_sum, "comparing the client's states"))) == 1
    if alike:
        return {_CLIENT: state}
    if not engine.zero_optimization_partition_weights():
        return {_CLIENT: world.broadcast_object(lambda: state, "taking the first rank's client state")}
    first, *others = world.all_gather_object(state, "collecting the client's states")
    return {_CLIENT: first, _CLIENTS: others}


def load_checkpoint(original: Original, **call: Any) -> Any:
    """``DeepSpeedEngine.load_checkpoint``; raises ConfigError for what cannot be honoured."""
    engine = call["self"]
    path = state_in(call["load_dir"], _number(call["tag"]), call["tag"])
    if path is None:
        return original()
    if current_world().rank == 0:
        tell_of_newer(Path(call["load_dir"]), path)
    if call["custom_load_fn"] is not None:
        raise ConfigError(
            f"{path} was saved by zerostart, and no custom_load_fn is called for it; leave it out, or "
            f"take the model from zerostart.load({str(path / 'model')!r})"
        )
    weights = call["load_module_only"]
    schedule = engine.lr_scheduler
    keeps = not call["load_lr_scheduler_states"] and hasattr(schedule, "state_dict")
    before = schedule.state_dict() if keeps else None
    stepped = call["load_optimizer_states"] and not weights
    extra = load_state(path, engine, None, stepped=stepped, counters=not weights)
    if before is not None:
        schedule.load_state_dict(before)
    return str(path), _client_state(extra or {}, current_world())


def _client_state(extra: Mapping[str, Any], world: World) -> Any:
    """This rank's, where the ranks are as many as those that saved one each; else the first one's."""
    every = [extra.get(_CLIENT, {}), *extra.get(_CLIENTS, ())]
    return every[world.rank if len(every) == world.size else 0]


def _number(tag: str | None) -> int:
    """The number of the model that accelerate names so."""
    last = (tag or "").removeprefix(f"{DEEPSPEED}_")
    return int(last) if last.isdecimal() else 0


def _movable(engine: Any) -> bool:
    """Whether an engine's state is saved here: of every model that zerostart loaded, and of plain ones."""
    if engine.use_node_local_storage():
        return False
    if next(loaded_models(engine.module), None) is not None:
        return True
    if not engine.zero_optimization() or engine.has_moe_layers or engine.mpu is not None:
        return False
    try:
        training_state(engine, None)
    except ZerostartError:
        return False
    return True


def save_fsdp_model(original: Original, **call: Any) -> Any:
    """accelerate's function; the model is saved with its optimizer, where that follows."""
    if not _fsdp2(call):
        return original()
    path, alone = _fsdp_path(call, "output_dir", "model_index"), bool(call["adapter_only"])
    if _followed(call):
        _adapters_alone[path] = alone
    else:
        save_state(path, call["model"], None, None, wait=True, frozen=not alone, saved=path.parent)
    return None


def save_fsdp_optimizer(original: Original, **call: Any) -> Any:
    """accelerate's function."""
    if not _fsdp2(call):
        return original()
    path = _fsdp_path(call, "output_dir", "optimizer_index")
    alone = _adapters_alone.pop(path, False)
    model, optimizer = call["model"], call["optimizer"]
    save_state(path, model, optimizer, None, wait=True, frozen=not alone, saved=path.parent)
    return None


def begin_fsdp_load(original: Original, **call: Any) -> Any:
    """The same in accelerate's ``load_state``: the model comes with its optimizer, if that follows."""
    path = state_in(call["input_dir"], call["model_index"])
    return None if path is not None and _followed(call) else load_fsdp_model(original, **call)


def load_fsdp_model(original: Original, **call: Any) -> Any:
    """accelerate's function: the model alone, for nobody knows whether its optimizer is to follow."""
    path = state_in(call["input_dir"], call["model_index"])
    if path is None:
        return original()
    load_state(path, call["model"], None)
    return None


def load_fsdp_optimizer(original: Original, **call: Any) -> Any:
    """accelerate's function."""
    path = state_in(call["input_dir"], call["optimizer_index"])
    if path is None:
        return original()
    load_state(path, call["model"], call["optimizer"])
    return None


def _fsdp2(call: dict[str, Any]) -> bool:
    model: nn.Module = call["model"]
    if call["fsdp_plugin"].fsdp_version != 2:
        return False
    return next(loaded_models(model), None) is not None or in_shards(model)


def _followed(call: dict[str, Any]) -> bool:
    """Whether accelerate goes on with an optimizer of this model right after it."""
    return len(call["accelerator"]._optimizers) > int(call["model_index"])


def _fsdp_path(call: dict[str, Any], directory: str, number: str) -> Path:
    return Path(call[directory]) / f"{FSDP}_{call[number]}"


def load_accelerator_state(original: Original, **call: Any) -> Any:
    """accelerate's function: ranks that are new get the number of the step from the first one."""
    found = original()
    world = current_world()
    step = world.broadcast_object(lambda: found.get("step"), "agreeing on the step")
    if step is not None:
        found.setdefault("step", step)
    return found
