"""What accelerate prepares: models that are sharded already, checked against it, and what is around them."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from torch import nn
from torch.distributed.tensor import DTensor

from zerostart import engines
from zerostart.engines.fsdp2.units import shard_added, shard_around
from zerostart.errors import ConfigError
from zerostart.integrations.engine_setup import check_sharing, check_tensors, fsdp2_config
from zerostart.live.model import find_record, loaded_model, loaded_models, record_of
from zerostart.upstream.accelerate.plugins import FSDP2Plugin, fsdp2_plugin
from zerostart.upstream.deepspeed.active import config_stage

if TYPE_CHECKING:
    from zerostart.upstream.types import Accelerator

#: Settings of FSDP2 that the parameters of a model have, and which cannot be left to the engine's default.
POLICIES = ("mp_policy", "offload_policy")
#: Models that every rank read whole while zerostart was enabled, for no sharding was set up then.
_whole: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def note_whole(model: nn.Module) -> None:
    """Note a model that every rank has read whole."""
    _whole.add(model)


def sharded(model: nn.Module) -> bool:
    """Whether accelerate's FSDP2 preparation is to leave ``model`` as it is; what was added is sharded here.

    Raises ConfigError where it, or a part of it, was loaded for other settings than accelerate has now.
    """
    # All checks come before the first shard: what is refused is left as it was.
    _refuse_whole(model, "fsdp2")
    parts = list(loaded_models(model))
    plugin = fsdp2_plugin()
    wanted = [_wanted(part, plugin) for part in parts]
    if plugin is None or not parts:
        return False
    _refuse_beside_tensors(model, parts)
    policies, fp32 = wanted[0], plugin.mixed_precision != "no"
    # The whole model is a load. Else loads are parts of a model of the script, whose other parameters are
    # sharded around them, after what lies within.
    if find_record(loaded_model(model)) is not None:
        shard_added(model, policies, fp32)
        return True
    for part in parts:
        shard_added(part, policies, fp32)
    shard_around(model, policies, fp32)
    return True


def _refuse_beside_tensors(model: nn.Module, parts: Sequence[nn.Module]) -> None:
    """Raise ConfigError for parameters that were added where ranks share tensors: none would cut them."""
    sharing = max(record_of(part).engine.mesh.tensor_parallel for part in parts)
    added = [n for n, p in model.named_parameters() if p.dim() and not isinstance(p, DTensor)]
    if sharing > 1 and added:
        raise ConfigError(
            f"{added[0]} was added to a model that was loaded with tensor_parallel={sharing}, "
            "which is not available with FSDP2; use tensor_parallel=1"
        )


def _wanted(part: nn.Module, plugin: FSDP2Plugin | None) -> Mapping[str, object]:
    """The policies that a loaded model has, and accelerate wants; raises ConfigError where these differ."""
    engine = record_of(part).engine
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
    wanted = fsdp2_config(plugin, type(part))
    # What the caller's own engine_config leaves open is no contradiction.
    given = dict(engine.config or {})
    chosen = {**wanted, **{key: given.get(key) for key in POLICIES}, **given}
    compared = ("reshard_after_forward", *POLICIES)
    differing = [key for key in compared if wanted.get(key) != chosen.get(key)]
    if differing:
        raise ConfigError(
            f"{type(part).__name__} was loaded with other FSDP2 settings than accelerate has now "
            f"({', '.join(differing)}); make the Accelerator or TrainingArguments before the "
            "model, or pass zerostart.enabled(engine='fsdp2', engine_config=...) the settings "
            "that accelerate will have"
        )
    return {key: wanted[key] for key in POLICIES if key in wanted}


def partitioned(accelerator: Accelerator, model: nn.Module) -> None:
    """Raise ConfigError for a model that, or a part of which, was not loaded for accelerate's stage."""
    plugin = accelerator.state.deepspeed_plugin
    parts = list(loaded_models(model))
    for part in parts:
        check_sharing(part)
        check_tensors(part, plugin.deepspeed_config)
    if plugin.hf_ds_config.is_zero3():
        if plugin.zero3_init_flag:
            _refuse_whole(model, "deepspeed")
        return
    for part in parts:
        engine = record_of(part).engine
        if not (engine.owns_optimizer and engine.replicates_parameters):
            raise ConfigError(
                f"{type(part).__name__} was loaded for {engine.title}, but accelerate prepares it for "
                f"DeepSpeed ZeRO-{config_stage(plugin.deepspeed_config)}; make the Accelerator or "
                "TrainingArguments before the model"
            )


def _refuse_whole(model: nn.Module, engine: str) -> None:
    """Raise ConfigError for a model that every rank read whole, though zerostart was enabled."""
    for module in model.modules():
        if module in _whole:
            title = engines.titled(engine, 3)
            raise ConfigError(
                f"every rank has loaded {type(module).__name__} whole, because {title} was not set up "
                "yet when from_pretrained was called; make TrainingArguments or the Accelerator "
                f"before the model, or name the engine: zerostart.enable(engine={engine!r})"
            )
