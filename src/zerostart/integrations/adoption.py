"""Make ``from_pretrained`` of existing scripts load in shards: ``zerostart.enabled``.

The settings of the innermost ``enabled`` (or ``enable``) apply to each call, together with the engine
configuration that is active at that moment.
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
from zerostart.integrations.accelerate import check_deepspeed, prepare_fsdp2, record_unsharded
from zerostart.integrations.diffsynth import DiffSynthLoad, keys_of_torch_file
from zerostart.integrations.diffusers import DiffusersLoad
from zerostart.integrations.engine_setup import EngineSetup, SequenceSharing, find_active
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
from zerostart.upstream.torch.optimizer_steps import adopted_steps
from zerostart.upstream.transformers.distributed import flag_records
from zerostart.upstream.transformers.loading import TransformersSeam
from zerostart.upstream.types import Accelerator

#: Load of one library.
Load = TypeVar("Load", bound=InterceptedLoad)
#: Active settings, innermost last.
_stack: list[Request] = []


@dataclass(frozen=True)
class Notice:
    """Class name of a loaded model, and ``how`` zerostart loaded it, or None."""

    model: str
    how: str | None


_listeners: list[Callable[[Notice], None]] = []
#: The first model that every rank loaded whole; only this one is reported.
_printed: list[Notice] = []


def listen(listener: Callable[[Notice], None]) -> Callable[[], None]:
    """Call ``listener`` for each model from now on; return a function that stops it."""
    _listeners.append(listener)
    return lambda: _listeners.remove(listener)


def _notify(notice: Notice) -> None:
    for listener in list(_listeners):
        listener(notice)
    if _listeners or not (_stack and _stack[-1].progress and is_first_rank()):
        return
    how = notice.how
    if how is None:
        # A single process shards nothing.
        if not _has_several_ranks() or _printed:
            return
        _printed.append(notice)
        how = (
            "was loaded whole by every rank, as without zerostart: no sharding was set up. Launch the "
            "script with a DeepSpeed ZeRO or FSDP2 configuration, make TrainingArguments or the "
            "Accelerator before the model, or name zerostart.enable(engine=...)"
        )
    if sys.stderr is not None:  # print() would write to stdout
        print(f"zerostart: {notice.model} {how}", file=sys.stderr, flush=True)


def _has_several_ranks() -> bool:
    return int(os.environ.get("WORLD_SIZE", "1") or 1) > 1


def enable(settings: Request) -> None:
    """Apply ``settings`` until ``disable``; see ``zerostart.enable``.

    Raises ConfigError for an unknown engine or stage, and for engine settings without an engine.
    """
    settings = settings.read()
    _check(settings)
    # If an override fails to open, close those before it.
    with contextlib.ExitStack() as stack:
        for override in (*_overrides, adopted_steps):
            override.open()
            stack.callback(override.close)
        _stack.append(settings)
        stack.pop_all()


def disable() -> None:
    """Remove the last settings; see ``zerostart.disable``. Raises ConfigError without any."""
    if not _stack:
        raise ConfigError("zerostart is not enabled; call zerostart.enable() before zerostart.disable()")
    _stack.pop()
    for override in (*_overrides, adopted_steps):
        override.close()


@contextlib.contextmanager
def enabled(settings: Request) -> Iterator[None]:
    """Enable for a block; see ``zerostart.enabled``."""
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
    """Return the load for a call of ``model.from_pretrained``; None leaves it to the library."""
    settings = _stack[-1]
    setup = _find_setup(settings, model)
    # Without an engine the library loads the model, unless parallel axes were requested.
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
    # The barrier needs the store of the process group, and finds calls that only one rank makes. The checks
    # fail on all ranks alike.
    shared = SequenceSharing.of(setup.engine).merge(settings.sequence_parallel)
    join_ranks(setup.family.host_backend)
    barrier.barrier(f"{model.__name__}.{kind_of_load.function}")
    call = kind_of_load(settings, replace(setup, sequences=shared), arguments, _serve_later_calls)
    call.check()
    return call


def _find_setup(settings: Request, model: type) -> EngineSetup | None:
    active = find_active(model)
    if settings.engine is None:
        return active
    # Use the script's setup if enabled() names the same engine and no configuration.
    if settings.engine_config is not None or active is None or active.engine != settings.engine:
        config, stage = dict(settings.engine_config or {}), settings.zero_stage
        if stage is None:
            configured = family_of(settings.engine).configured_stage(config)
            stage = 3 if configured is None else configured
        return EngineSetup.requested(settings.engine, stage, config)
    return active if settings.zero_stage is None else active.at_stage(settings.zero_stage)


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
    # FSDP2 changes the class of a module.
    kind = next(kind for kind in type(model).__mro__ if not issubclass(kind, FSDPModule))
    _notify(Notice(kind.__name__, how))


def _whole_state(model: nn.Module, without_frozen: bool) -> Any:
    inner = next(find_loaded_models(model), None)
    # Without parallel axes DeepSpeed's gathering is correct.
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
        # All ranks gather each tensor; only rank 0 receives it, the others get None.
        if tensor is None or (without_frozen and parameter is not None and not parameter.requires_grad):
            continue
        # Tied names share one tensor, as in a state dict.
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


def _note_unsharded(model: nn.Module) -> None:
    _notify(Notice(type(model).__name__, None))
    # A single process may prepare a whole model.
    if _has_several_ranks():
        record_unsharded(model)
        _accelerate.hold(model)


def _read_keys(path: str) -> dict[str, object] | None:
    return None if _find_setup(_stack[-1], nn.Module) is None else keys_of_torch_file(path)


def _wait_for_everyone(original: Any, **call: object) -> object:
    """Record that this rank waits in accelerate's ``wait_for_everyone``."""
    barrier.record_wait()
    return original()


_transformers = TransformersSeam(
    functools.partial(_choose, TransformersLoad), functools.partial(_choose, FromConfigLoad), _note_unsharded
)
_diffusers = DiffusersSeam(functools.partial(_choose, DiffusersLoad), _note_unsharded)
_diffsynth = DiffSynthSeam(functools.partial(_choose, DiffSynthLoad), _note_unsharded, _read_keys)
_accelerate = AcceleratorPatches(prepare_fsdp2, check_deepspeed, accelerate.warn_about_optimizer)
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
_overrides: list[Any] = [_transformers, flag_records, _diffusers, _diffsynth, _accelerate, _saving]


def add_override(override: Any) -> None:
    """Add an override that ``enable`` opens and ``disable`` closes."""
    if override not in _overrides:
        _overrides.append(override)
