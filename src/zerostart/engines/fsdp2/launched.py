"""FSDP as ``accelerate launch`` sets it up, for a training run: what of it this engine can do, and how."""

from __future__ import annotations

from typing import Any

from torch.distributed.fsdp import CPUOffloadPolicy

from zerostart.engines.training import LauncherSetup
from zerostart.errors import ConfigError
from zerostart.upstream.accelerate.launched import launched_fsdp
from zerostart.upstream.accelerate.plugins import FSDP2Plugin


def launched(stage: int) -> LauncherSetup:
    """The launcher's configuration for a run at a stage of FSDP2.

    What is about loading and saving (``fsdp_cpu_ram_efficient_loading``, ``fsdp_state_dict_type``) says
    nothing here. Raises ConfigError, by the launcher's own word, for what a run does otherwise.
    """
    try:
        version, found, policy = launched_fsdp()
    except (ValueError, KeyError, RuntimeError) as error:
        raise ConfigError(f"the launcher's FSDP configuration contradicts itself: {error}") from error
    if found is None:
        raise ConfigError(
            f"the launcher's configuration has fsdp_version: {version}, and this run shards with FSDP2; "
            "write fsdp_version: 2, or start it with a plain multi-process configuration"
        )
    _refuse(found, policy)
    plugin = found.plugin
    agreed: dict[str, tuple[str, Any]] = {}
    if plugin.activation_checkpointing:
        offloaded = getattr(plugin, "activation_checkpointing_offload", False)
        word = "fsdp_activation_checkpointing" + ("_offload" if offloaded else "")
        agreed["train.checkpoint_blocks"] = (word, "offload" if offloaded else True)
    config: dict[str, Any] = {}
    if stage == 3:
        config["reshard_after_forward"] = plugin.reshard_after_forward
    elif plugin.reshard_after_forward:
        agreed["engine.zero_stage"] = ("fsdp_reshard_after_forward: true, which is stage", 3)
    if found.wrapped:
        config["wrap"] = found.wrapped
    return LauncherSetup(config, agreed)


def _refuse(found: FSDP2Plugin, policy: str | None) -> None:
    plugin = found.plugin
    refused = {
        "fsdp_offload_params": (
            isinstance(plugin.cpu_offload, CPUOffloadPolicy),
            "use engine.name: deepspeed, with offload_param in engine.config",
        ),
        "fsdp_ignored_modules": (plugin.ignored_modules is not None, "leave it out"),
        f"fsdp_auto_wrap_policy: {policy}": (
            policy is not None and found.units != "classes",
            "use TRANSFORMER_BASED_WRAP, with fsdp_transformer_layer_cls_to_wrap where the model needs it",
        ),
    }
    for name, (there, remedy) in refused.items():
        if there:
            raise ConfigError(f"{name} of the launcher's configuration is not available in a run; {remedy}")


def launcher_file(stage: int, precision: str) -> dict[str, Any]:
    """accelerate's configuration file for a stage."""
    return {
        "distributed_type": "FSDP",
        "fsdp_config": {
            "fsdp_version": 2,
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_reshard_after_forward": stage == 3,
            "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        },
        "mixed_precision": precision,
    }
