"""Active FSDP2 and parallelism settings of accelerate."""

from __future__ import annotations

import contextlib
import functools
import os
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from zerostart.upstream.guard import Use, demand
from zerostart.upstream.types import FSDPPlugin, Parallelism

if TYPE_CHECKING:
    from transformers import TrainingArguments

#: Prefix that ``fully_shard`` adds to the name of a module's class.
SHARDED = "FSDP"
TOUCHED = (
    Use(
        "accelerate.state:AcceleratorState",
        "_shared_state, is_fsdp2, ._mixed_precision, .parallelism_config",
        "whether an Accelerator has an FSDP plugin or parallelism",
    ),
    Use(
        "accelerate.utils.dataclasses:FullyShardedDataParallelPlugin",
        "auto_wrap_policy, cpu_offload, fsdp_version, ignored_modules, mixed_precision_policy, "
        "reshard_after_forward, set_mixed_precision, transformer_cls_names_to_wrap",
        "the settings of FSDP2",
    ),
)


@functools.cache
def require_version() -> None:
    """Raise UnsupportedVersionError unless accelerate is as expected."""
    demand(TOUCHED)


def join_ranks(host_backend: str | None) -> None:
    """Initialise ``torch.distributed`` as accelerate will; ``host_backend`` is for CPU hosts."""
    if dist.is_initialized() or int(os.environ.get("WORLD_SIZE", "1") or 1) == 1:
        return
    from accelerate import PartialState

    if torch.accelerator.is_available():
        PartialState()
    elif host_backend is not None:
        PartialState(backend=host_backend)
    else:
        PartialState(cpu=True)


@dataclass(frozen=True)
class FSDP2Plugin:
    """Active FSDP2 plugin, and its mixed precision (``"no"`` for none)."""

    plugin: FSDPPlugin
    mixed_precision: str

    @property
    def policy(self) -> object:
        """``MixedPrecisionPolicy`` of accelerate, or None."""
        return self.plugin.mixed_precision_policy

    @property
    def units(self) -> str:
        """Rule for units: ``"classes"``, ``"size"`` or ``"none"``."""
        from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy, transformer_auto_wrap_policy

        policy = self.plugin.auto_wrap_policy
        policy = getattr(policy, "func", policy)
        names = {transformer_auto_wrap_policy: "classes", size_based_auto_wrap_policy: "size", None: "none"}
        return names.get(policy, "size")

    @property
    def wrapped(self) -> list[str]:
        """Names of the unit classes; [] for those that the model declares."""
        return [name.removeprefix(SHARDED) for name in self.plugin.transformer_cls_names_to_wrap or ()]


#: Latest living ``TrainingArguments`` with "fsdp" and with "parallelism".
_remembered: weakref.WeakValueDictionary[str, TrainingArguments] = weakref.WeakValueDictionary()


def remember(feature: str, arguments: TrainingArguments) -> None:
    """Remember living ``TrainingArguments`` with "fsdp" or "parallelism"."""
    _remembered[feature] = arguments


def fsdp2_plugin() -> FSDP2Plugin | None:
    """Return the active FSDP2 configuration, or None."""
    from accelerate.state import AcceleratorState
    from accelerate.utils import FullyShardedDataParallelPlugin

    # An Accelerator overrides TrainingArguments, and these override the launcher.
    state = AcceleratorState._shared_state
    if state.get("fsdp_plugin") is not None:
        active = FSDP2Plugin(state["fsdp_plugin"], state.get("_mixed_precision") or "no")
        return active if active.plugin.fsdp_version == 2 else None
    arguments = _remembered.get("fsdp")
    plugin: FSDPPlugin | None = None
    precision = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    if arguments is not None:
        plugin = FullyShardedDataParallelPlugin(**arguments.fsdp_plugin_args)
        precision = arguments.mixed_precision
    elif is_set("ACCELERATE_USE_FSDP"):
        plugin = FullyShardedDataParallelPlugin()
    if plugin is None or plugin.fsdp_version != 2:
        return None
    if precision != "no":
        plugin.set_mixed_precision(precision)
    return FSDP2Plugin(plugin, precision)


def parallelism() -> Parallelism | None:
    """Return the active ``ParallelismConfig``, or None."""
    from accelerate import ParallelismConfig
    from accelerate.state import AcceleratorState

    config: Parallelism | None = AcceleratorState._shared_state.get("parallelism_config")
    arguments = _remembered.get("parallelism")
    if config is None and arguments is not None:
        config = arguments.parallelism_config
    if config is None and is_set("ACCELERATE_USE_PARALLELISM_CONFIG"):
        config = ParallelismConfig()
    return config


def is_set(name: str) -> bool:
    """Return True if a launcher has set the environment flag ``name``."""
    return os.environ.get(name, "false").lower() == "true"


def launched_fsdp_version() -> str:
    """Return the launcher's FSDP version; accelerate's default is 1."""
    return os.environ.get("FSDP_VERSION", "1")


#: Prefixes of environment variables that an ``Accelerator`` or a plugin reads.
_READ_AGAIN = (
    "ACCELERATE_CONFIG_DS_FIELDS",
    "ACCELERATE_DEEPSPEED_",
    "ACCELERATE_GRADIENT_",
    "ACCELERATE_MIXED_PRECISION",
    "ACCELERATE_USE_DEEPSPEED",
    "ACCELERATE_USE_FSDP",
    "FSDP_",
)


def launched_precision() -> str:
    """Return the launcher's mixed precision; ``"no"`` by default."""
    return os.environ.get("ACCELERATE_MIXED_PRECISION", "no").lower()


@contextlib.contextmanager
def hidden() -> Iterator[None]:
    """Hide the launcher's engine settings from accelerate inside the block."""
    variables = {name: value for name, value in os.environ.items() if name.startswith(_READ_AGAIN)}
    for name in variables:
        del os.environ[name]
    try:
        yield
    finally:
        os.environ.update(variables)
