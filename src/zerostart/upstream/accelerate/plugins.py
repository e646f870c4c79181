"""Private parts of accelerate: its FSDP2 plugin, and how it prepares a model that is sharded already."""

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

#: What ``fully_shard`` puts before the name of a module's class.
SHARDED = "FSDP"
_PLUGIN = "accelerate.utils.dataclasses:FullyShardedDataParallelPlugin"
_ACCELERATOR_STATE = "accelerate.state:AcceleratorState"
TOUCHED = (
    Use(
        _ACCELERATOR_STATE,
        "_shared_state, is_fsdp2, ._mixed_precision, .parallelism_config",
        "whether an Accelerator has an FSDP plugin or parallelism",
    ),
    Use(
        _PLUGIN,
        "auto_wrap_policy, cpu_offload, fsdp_version, ignored_modules, mixed_precision_policy, "
        "reshard_after_forward, set_mixed_precision, transformer_cls_names_to_wrap",
        "the settings of FSDP2",
    ),
)


@functools.cache
def require() -> None:
    """Raise UnsupportedVersionError unless everything that this file uses is there."""
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
    """An active FSDP2 configuration: accelerate's plugin, and its mixed precision (``"no"`` for none)."""

    plugin: FSDPPlugin
    mixed_precision: str

    @property
    def policy(self) -> object:
        """The ``MixedPrecisionPolicy`` that accelerate would shard with, None for none."""
        return self.plugin.mixed_precision_policy

    @property
    def units(self) -> str:
        """How the model is cut into units: ``"classes"``, ``"size"`` or ``"none"``."""
        from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy, transformer_auto_wrap_policy

        policy = self.plugin.auto_wrap_policy
        policy = getattr(policy, "func", policy)
        known = {transformer_auto_wrap_policy: "classes", size_based_auto_wrap_policy: "size", None: "none"}
        return known.get(policy, "size")

    @property
    def wrapped(self) -> list[str]:
        """Names of the classes that are units; [] for those that the model declares."""
        return [name.removeprefix(SHARDED) for name in self.plugin.transformer_cls_names_to_wrap or ()]


#: The ``TrainingArguments`` that last asked for "fsdp" and for "parallelism", while they live.
_remembered: weakref.WeakValueDictionary[str, TrainingArguments] = weakref.WeakValueDictionary()


def remember(feature: str, arguments: TrainingArguments) -> None:
    """Note ``TrainingArguments`` that ask for "fsdp" or "parallelism", for as long as they live."""
    _remembered[feature] = arguments


def fsdp2_plugin() -> FSDP2Plugin | None:
    """Return the active FSDP2 configuration: of an ``Accelerator``, ``TrainingArguments`` or the launcher."""
    from accelerate.state import AcceleratorState
    from accelerate.utils import FullyShardedDataParallelPlugin

    # In the order in which they win: an Accelerator, TrainingArguments, the launcher.
    state = AcceleratorState._shared_state
    if state.get("fsdp_plugin") is not None:
        found = FSDP2Plugin(state["fsdp_plugin"], state.get("_mixed_precision") or "no")
        return found if found.plugin.fsdp_version == 2 else None
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
    """Return the active ``ParallelismConfig``: an ``Accelerator``'s, the arguments' or the launcher's."""
    from accelerate import ParallelismConfig
    from accelerate.state import AcceleratorState

    found: Parallelism | None = AcceleratorState._shared_state.get("parallelism_config")
    arguments = _remembered.get("parallelism")
    if found is None and arguments is not None:
        found = arguments.parallelism_config
    if found is None and is_set("ACCELERATE_USE_PARALLELISM_CONFIG"):
        found = ParallelismConfig()
    return found


def is_set(name: str) -> bool:
    """Whether a launcher's flag is set in the environment."""
    return os.environ.get(name, "false").lower() == "true"


def launched_fsdp_version() -> str:
    """The version of FSDP that the launcher asks for; accelerate takes the first where it names none."""
    return os.environ.get("FSDP_VERSION", "1")


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


def launched_precision() -> str:
    """The launcher's mixed precision; ``"no"`` where it says nothing of it, too."""
    return os.environ.get("ACCELERATE_MIXED_PRECISION", "no").lower()


@contextlib.contextmanager
def hidden() -> Iterator[None]:
    """Inside, accelerate finds nothing of an engine in the environment, as after a plain launch."""
    taken = {name: value for name, value in os.environ.items() if name.startswith(_READ_AGAIN)}
    for name in taken:
        del os.environ[name]
    try:
        yield
    finally:
        os.environ.update(taken)
