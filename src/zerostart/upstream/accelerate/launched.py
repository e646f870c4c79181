"""Private parts of accelerate: what ``accelerate launch`` puts into the environment of each rank.

accelerate itself reads it when an ``Accelerator`` is made. ``zerostart train`` reads it before, and makes its
own ``Accelerator`` around a model that is sharded already, where it would be read a second time.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager

from zerostart.upstream.accelerate.plugins import FSDP2Plugin, is_set, launched_fsdp_version
from zerostart.upstream.accelerate.plugins import require as require_plugin
from zerostart.upstream.guard import Use, demand

_DEEPSPEED = "accelerate.utils.dataclasses:DeepSpeedPlugin"
TOUCHED = (
    Use(
        _DEEPSPEED,
        "_deepspeed_config_checks, __post_init__",
        "zerostart train takes over what accelerate launch has set up for its engine",
    ),
)
#: What a launcher's file says of DeepSpeed in words of its own, and the key of DeepSpeed's configuration.
_SAID = {
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "gradient_accumulation_steps",
    "ACCELERATE_GRADIENT_CLIPPING": "gradient_clipping",
    "ACCELERATE_DEEPSPEED_ZERO_STAGE": "zero_optimization.stage",
    "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "zero_optimization.offload_optimizer.device",
    "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_NVME_PATH": "zero_optimization.offload_optimizer.nvme_path",
    "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": "zero_optimization.offload_param.device",
    "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_NVME_PATH": "zero_optimization.offload_param.nvme_path",
}
_FILE = "ACCELERATE_DEEPSPEED_CONFIG_FILE"
#: Beginnings of the names of all that is read again where an ``Accelerator`` or a plugin is made.
_READ_AGAIN = (
    "ACCELERATE_CONFIG_DS_FIELDS",
    "ACCELERATE_DEEPSPEED_",
    "ACCELERATE_GRADIENT_",
    "ACCELERATE_MIXED_PRECISION",
    "ACCELERATE_USE_DEEPSPEED",
    "ACCELERATE_USE_FSDP",
    "FSDP_",
)


@functools.cache
def _require() -> None:
    require_plugin()
    demand(TOUCHED)


def launched_for(variable: str) -> bool:
    """Whether a launcher has set up the engine of that environment variable."""
    return is_set(variable)


def launched_precision() -> str:
    """The launcher's mixed precision; ``"no"`` where it says nothing of it, too."""
    return os.environ.get("ACCELERATE_MIXED_PRECISION", "no").lower()


def launched_dynamo() -> str:
    """By what the launcher wants models compiled; ``"no"`` for nothing."""
    return os.environ.get("ACCELERATE_DYNAMO_BACKEND", "no").lower()


def launched_deepspeed() -> tuple[str | None, dict[str, str]]:
    """The path of the launcher's DeepSpeed configuration, and what it says in words of its own.

    That is by the dotted key of DeepSpeed's configuration; what it does not say is not there.
    """
    _require()
    path = os.environ.get(_FILE, "none")
    said = {key: os.environ[name] for name, key in _SAID.items() if os.environ.get(name, "none") != "none"}
    return (None if path == "none" else path), said


def launched_fsdp() -> tuple[int, FSDP2Plugin | None, str | None]:
    """The version of FSDP that the launcher asks for, its plugin where that is 2, and the policy of wrapping.

    The policy is the one that it names, None where it names none. Raises what accelerate raises for settings
    that contradict each other.
    """
    _require()
    version = int(launched_fsdp_version())
    if version != 2:
        return version, None, None
    from accelerate.utils import FullyShardedDataParallelPlugin

    plugin: FullyShardedDataParallelPlugin = FullyShardedDataParallelPlugin()
    return version, FSDP2Plugin(plugin, launched_precision()), os.environ.get("FSDP_AUTO_WRAP_POLICY")


@contextmanager
def hidden() -> Iterator[None]:
    """Inside, accelerate finds nothing of an engine in the environment, as after a plain launch."""
    taken = {name: value for name, value in os.environ.items() if name.startswith(_READ_AGAIN)}
    for name in taken:
        del os.environ[name]
    try:
        yield
    finally:
        os.environ.update(taken)
