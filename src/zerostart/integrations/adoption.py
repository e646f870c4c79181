"""``zerostart.enabled``: existing scripts, whose ``from_pretrained`` becomes a sharded load.

What happens at a call of ``from_pretrained`` follows from the settings of the innermost ``enabled`` (or of
``enable``) and from the configuration that is active at that moment, wherever it was made.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from zerostart.distributed.world import current_world
from zerostart.engines import check_choice, family_of
from zerostart.errors import ConfigError
from zerostart.integrations import accelerate, barrier, diffsynth, saving
from zerostart.integrations.accelerate import note_whole, partitioned, sharded
from zerostart.integrations.diffsynth import DiffSynthLoad, keys_of_torch_file
from zerostart.integrations.diffusers import DiffusersLoad
from zerostart.integrations.engine_setup import EngineSetup, SharedSequences, find_active
from zerostart.integrations.later_calls import SAVE_PRETRAINED, serve_adapters, serve_resizing
from zerostart.integrations.loading import InterceptedLoad
from zerostart.integrations.transformers import trainer
from zerostart.integrations.transformers.loading import FromConfigLoad, TransformersLoad
from zerostart.live.full_tensors import full_tensors
from zerostart.live.model import find_loaded_models, get_record
from zerostart.loading.request import Request
from zerostart.upstream.accelerate.plugins import join_ranks
from zerostart.upstream.accelerate.preparing import AcceleratorPatches
from zerostart.upstream.deepspeed.construction import Consolidation
from zerostart.upstream.diffsynth.loading import DiffSynthSeam
from zerostart.upstream.diffusers.loading import DiffusersSeam
from zerostart.upstream.guard import is_first_rank
from zerostart.upstream.saving_calls import SavingCalls
from zerostart.upstream.torch.stepped import adopted_steps
from zerostart.upstream.transformers.distributed import flag_notes
from zerostart.upstream.transformers.loading import TransformersSeam
from zerostart.upstream.types import Accelerator

#: The kind of call that serves one library's loading.
Load = TypeVar("Load", bound=InterceptedLoad)
#: Settings that are in force, the innermost last.
_stack: list[Request] = []


@dataclass(frozen=True)
class Notice:
    """One model of a script: the name of its class, and ``how`` it was taken over, None where it was not."""

    model: str
    how: str | None


_listeners: list[Callable[[Notice], None]] = []
#: The first model that every rank loaded whole, once it was told.
_told_of_whole: list[Notice] = []


def listen(listener: Callable[[Notice], None]) -> Callable[[], None]:
    """Have ``listener`` called from now on; returns what ends that."""
    _listeners.append(listener)
    return lambda: _listeners.remove(listener)


def _notify(notice: Notice) -> None:
    for listener in list(_listeners):
        listener(notice)
    if _listeners or not (_stack and _stack[-1].progress and is_first_rank()):
        return
    how = notice.how
    if how is None:
        # One process alone has nothing to shard.
        if not _several() or _told_of_whole:
            return
        _told_of_whole.append(notice)
        how = (
            "was loaded whole by every rank, as without zerostart: no sharding was set up. Launch the "
            "script with a DeepSpeed ZeRO or FSDP2 configuration, make TrainingArguments or the "
            "Accelerator before the model, or name zerostart.enable(engine=...)"
        )
    if sys.stderr is not None:  # or it would go to stdout
        print(f"zerostart: {notice.model} {how}", file=sys.stderr, flush=True)


def _several() -> bool:
    return int(os.environ.get("WORLD_SIZE", "1") or 1) > 1


def enable(settings: Request) -> None:
    """Put ``settings`` in force until ``disable``; see ``zerostart.enable``.

    Raises ConfigError for an engine or a stage that is not known, and settings without an engine.
    """
    settings = settings.read()
    _check(settings)
    # Where one of them cannot be put in place, those before it are taken out again.
    with contextlib.ExitStack() as stack:
        for override in (*_overrides, adopted_steps):
            override.open()
            stack.callback(override.close)
        _stack.append(settings)
        stack.pop_all()


def disable() -> None:
    """Take the settings put in force last out of it; see ``zerostart.disable``.

    Raises ConfigError if there are none.
    """
    if not _stack:
        raise ConfigError("zerostart is not enabled; call zerostart.enable() before zerostart.disable()")
    _stack.pop()
    for override in (*_overrides, adopted_steps):
        override.close()


@contextlib.contextmanager
def enabled(settings: Request) -> Iterator[None]:
    """``enable`` for a block; see ``zerostart.enabled``."""
    enable(settings)
    try:
        yield
    finally:
        disable()


def _check(settings: Request) -> None:
    if settings.engine is not None:
        check_choice(settings.engine, 3 if settings.zero_stage is None else settings.zero_stage)
        return
    for name in ("zero_stage", "engine_config"):
        if getattr(settings, name) is not None:
            raise ConfigError(
                f"{name} was passed without an engine; name one: enabled(engine=..., {name}=...)"
            )


def _choose(kind_of_load: type[Load], model: type, arguments: dict[str, Any]) -> Load | None:
    """What serves a call of ``model.from_pretrained``, of the class given; None: the library itself."""
    settings = _stack[-1]
    setup = _resolved(settings, model)
    # No engine is set up: a plain script goes on as without zerostart, unless axes were asked for.
    if setup is None:
        if max(settings.expert_parallel, settings.tensor_parallel, settings.sequence_parallel) > 1:
            raise ConfigError(
                f"expert_parallel={settings.expert_parallel}, "
                f"tensor_parallel={settings.tensor_parallel} and "
                f"sequence_parallel={settings.sequence_parallel} were passed, but no engine is set up "
                f"when {model.__name__}.{kind_of_load.function} is called; start the script with a "
                "DeepSpeed ZeRO-3 or FSDP2 configuration, make TrainingArguments or the Accelerator "
                "before the model, or name it in enabled(engine=...)"
            )
        return None
    # First the process group, whose store the barrier uses; then the barrier, so that a call that one rank
    # makes alone is an error there; then the checks, which every rank makes and fails alike.
    shared = SharedSequences.of(setup.engine).merged(settings.sequence_parallel)
    join_ranks(setup.family.host_backend)
    barrier.barrier(f"{model.__name__}.{kind_of_load.function}")
    call = kind_of_load(settings, replace(setup, sequences=shared), arguments, _serve_later_calls)
    call.check()
    return call


def _resolved(settings: Request, model: type) -> EngineSetup | None:
    found = find_active(model)
    if settings.engine is None:
        return found
    # What the script is set up for counts as long as enabled() names the same engine and no configuration.
    if settings.engine_config is not None or found is None or found.engine != settings.engine:
        config, stage = dict(settings.engine_config or {}), settings.zero_stage
        if stage is None:
            configured = family_of(settings.engine).configured_stage(config)
            stage = 3 if configured is None else configured
        return EngineSetup.asked(settings.engine, stage, config)
    return found if settings.zero_stage is None else found.at(settings.zero_stage)


def _serve_later_calls(model: nn.Module, setup: str) -> None:
    _accelerate.hold(model)
    _saving.hold(model)
    serve_adapters(model)
    serve_resizing(model)
    record = get_record(model)
    if record.engine.owns_optimizer and record.parallelism.mesh.parallel:
        _consolidation.hold(model)
    report = record.report
    how = f"loaded in shards: {setup} on {report.world_size} ranks, in {report.phases['total']:.1f} s"
    # FSDP2 gives modules a class of their own.
    kind = next(kind for kind in type(model).__mro__ if not issubclass(kind, FSDPModule))
    _notify(Notice(kind.__name__, how))


def _whole_state(model: nn.Module, without_frozen: bool) -> Any:
    inner = next(find_loaded_models(model), None)
    # Whole on every rank, or in ZeRO-3 shards over all of them: DeepSpeed's own gathering is right.
    if inner is None or not get_record(inner).parallelism.mesh.parallel:
        return NotImplemented
    if inner is not model:
        raise ConfigError(
            f"{type(model).__name__} wraps a model whose experts or tensors are shared out, which cannot be "
            "saved whole; save the adapter alone, or load with expert_parallel=1 and tensor_parallel=1"
        )
    parameters = dict(model.named_parameters(remove_duplicate=False))
    first: dict[int, torch.Tensor] = {}
    state: dict[str, torch.Tensor] = {}
    for name, tensor in full_tensors(model, 0):
        parameter = parameters.get(name)
        # All ranks walk through all tensors, as each is gathered by all of them; rank 0 alone gets them, None
        # is on the others.
        if tensor is None or (without_frozen and parameter is not None and not parameter.requires_grad):
            continue
        # Tied names share one tensor, as in the model's own state dict.
        state[name] = tensor if parameter is None else first.setdefault(id(parameter), tensor)
    return state if current_world().rank == 0 else None


def _get_state_dict(
    original: Callable[[], object], *, self: Accelerator, model: nn.Module, **_: object
) -> object:
    unwrapped = self.unwrap_model(model)
    inner = next(find_loaded_models(unwrapped), None)
    if inner is None or not get_record(inner).engine.replicates_parameters:
        return original()
    whole = _whole_state(unwrapped, False)
    return original() if whole is NotImplemented else whole


def _left(model: nn.Module) -> None:
    _notify(Notice(type(model).__name__, None))
    # One process alone shards nothing, so that preparing the model later is no mistake.
    if _several():
        note_whole(model)
        _accelerate.hold(model)


def _keys_of(path: str) -> dict[str, object] | None:
    return None if _resolved(_stack[-1], nn.Module) is None else keys_of_torch_file(path)


def _wait_for_everyone(original: Any, **call: object) -> object:
    """``wait_for_everyone`` of accelerate, which ranks that wait for others at another place look at."""
    barrier.note_wait()
    return original()


_transformers = TransformersSeam(
    functools.partial(_choose, TransformersLoad), functools.partial(_choose, FromConfigLoad), _left
)
_diffusers = DiffusersSeam(functools.partial(_choose, DiffusersLoad), _left)
_diffsynth = DiffSynthSeam(functools.partial(_choose, DiffSynthLoad), _left, _keys_of)
_accelerate = AcceleratorPatches(sharded, partitioned, accelerate.warn_of_optimizer)
_consolidation = Consolidation(_whole_state)
_saving = SavingCalls(
    {
        **SAVE_PRETRAINED,
        "Accelerator.save_model": saving.accelerator_save_model,
        "Accelerator.get_state_dict": _get_state_dict,
        "DeepSpeedEngine.save_checkpoint": accelerate.save_checkpoint,
        "DeepSpeedEngine.load_checkpoint": accelerate.load_checkpoint,
        **{
            f"{module}.{name}": getattr(accelerate, name)
            for module in ("accelerate.accelerator", "transformers.trainer")
            for name in ("save_fsdp_model", "save_fsdp_optimizer", "load_fsdp_model", "load_fsdp_optimizer")
        },
        "accelerate.accelerator.load_accelerator_state": accelerate.load_accelerator_state,
        "accelerate.accelerator.load_fsdp_model": accelerate.begin_fsdp_load,
        "transformers.trainer.deepspeed_load_checkpoint": trainer.load_deepspeed,
        "transformers.trainer.get_last_checkpoint": trainer.last_checkpoint,
        "Trainer.save_model": trainer.save_model,
        "Trainer._load_from_checkpoint": trainer.load_from_checkpoint,
        "Trainer._load_optimizer_and_scheduler": trainer.load_optimizer_and_scheduler,
        "Trainer._prepare_for_training": trainer.prepare_for_training,
        "Trainer.evaluation_loop": trainer.evaluation_loop,
        "PartialState.wait_for_everyone": _wait_for_everyone,
        "ModelLogger.save_model": diffsynth.save_trained,
        "DiffusionTrainingModule.resume_from_checkpoint": diffsynth.resume,
        "BasePipeline.load_lora": diffsynth.load_lora,
    }
)
_overrides: list[Any] = [_transformers, flag_notes, _diffusers, _diffsynth, _accelerate, _saving]


def add_override(override: Any) -> None:
    """Have ``enable`` open, and ``disable`` close, one more override."""
    if override not in _overrides:
        _overrides.append(override)
