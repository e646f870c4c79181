"""Private parts of accelerate: its FSDP2 plugin, and how it prepares a model that is sharded already.

Known for the versions in ``SUPPORTED``. Used of it: of ``AcceleratorState`` ``_shared_state``,
``distributed_type``, ``fsdp_plugin`` and ``_mixed_precision``; of ``FullyShardedDataParallelPlugin``
``fsdp_version``, ``mixed_precision_policy``, ``reshard_after_forward``, ``auto_wrap_policy``,
``transformer_cls_names_to_wrap``, ``cpu_offload`` and ``ignored_modules``.

Replaced while ``Override`` is installed:

- ``accelerator.fsdp2_prepare_model``, ``Accelerator._prepare_deepspeed``, ``get_state_dict``: the functions
  given to ``Override`` look at the model first;
- ``FullyShardedDataParallelPlugin.set_auto_wrap_policy``: finds classes by their names, which ``fully_shard``
  changes;
- ``PartialState._prepare_backend`` and ``AcceleratorState.__init__``: on hosts without an accelerator
  accelerate has no backend for ranks of DeepSpeed or FSDP, so that each would train by itself, and where it
  is told ``cpu=True``, it wraps models in DDP. Where the launcher asks for DeepSpeed or FSDP2, the ranks
  use gloo there, and the state says what was asked for, so that scripts can be rehearsed;
- ``TrainingArguments._process_fsdp_args`` of transformers: the arguments are remembered for as long as they
  live, since a ``Trainer`` makes its Accelerator after the model.
"""

from __future__ import annotations

import functools
import os
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from zerostart.upstream.versions import demand

__all__ = ["SUPPORTED", "FSDP2Plugin", "Override", "fsdp2_plugin", "join_ranks", "require"]

#: First known and first unknown version.
SUPPORTED = ((1, 12), (1, 16))


@functools.cache
def require() -> None:
    """Raise UnsupportedVersionError unless everything that this file uses is there."""
    import accelerate
    from accelerate import accelerator, state, utils
    from transformers import TrainingArguments

    demand(
        accelerate,
        SUPPORTED,
        (
            (accelerator, ("fsdp2_prepare_model",)),
            (accelerator.Accelerator, ("_prepare_deepspeed", "get_state_dict")),
            (state.AcceleratorState, ("_shared_state", "is_fsdp2")),
            (state.PartialState, ("_prepare_backend",)),
            (utils.FullyShardedDataParallelPlugin, ("set_mixed_precision", "set_auto_wrap_policy")),
            (TrainingArguments, ("_process_fsdp_args",)),
        ),
    )


def join_ranks(host_backend: str | None) -> None:
    """Initialise ``torch.distributed`` as accelerate will, unless it is.

    ``host_backend`` is what the engine needs without an accelerator; None for what ``cpu=True`` gives.
    """
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

    plugin: Any
    mixed_precision: str

    @property
    def policy(self) -> Any:
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
        return [name.removeprefix(_SHARDED) for name in self.plugin.transformer_cls_names_to_wrap or ()]


#: The ``TrainingArguments`` that asked for FSDP last.
_arguments: weakref.ref[Any] | None = None


def fsdp2_plugin() -> FSDP2Plugin | None:
    """The FSDP2 configuration that is active: an ``Accelerator``'s, ``TrainingArguments``' or the launcher's.

    Raises what accelerate raises for a configuration that contradicts itself.
    """
    from accelerate.state import AcceleratorState
    from accelerate.utils import FullyShardedDataParallelPlugin

    state = AcceleratorState._shared_state
    if state.get("fsdp_plugin") is not None:
        found = FSDP2Plugin(state["fsdp_plugin"], state.get("_mixed_precision") or "no")
        return found if found.plugin.fsdp_version == 2 else None
    arguments = _arguments() if _arguments is not None else None
    plugin: Any = None
    precision = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    if arguments is not None:
        plugin = FullyShardedDataParallelPlugin(**arguments.fsdp_plugin_args)
        precision = arguments.mixed_precision
    elif _is_set("ACCELERATE_USE_FSDP"):
        plugin = FullyShardedDataParallelPlugin()
    if plugin is None or plugin.fsdp_version != 2:
        return None
    if precision != "no":
        plugin.set_mixed_precision(precision)
    return FSDP2Plugin(plugin, precision)


class Override:
    """Replaces the functions named above from ``install`` to ``remove``.

    ``sharded(accelerator, model)`` is asked for a model to prepare for FSDP2: True where it is ready as it
    is. ``partitioned(accelerator, model)`` sees each module that is prepared for DeepSpeed. ``whole(model)``
    gives the state dict of a model that accelerate would save in part (None on other ranks than 0), and
    NotImplemented for others. All may raise.
    """

    def __init__(
        self,
        sharded: Callable[[Any, Any], bool],
        partitioned: Callable[[Any, Any], None],
        whole: Callable[[Any], Any] | None = None,
    ) -> None:
        self._sharded = sharded
        self._partitioned = partitioned
        self._whole = whole
        self._kept: list[tuple[Any, str, Any]] = []

    def install(self) -> None:
        """Replace them."""
        require()
        from accelerate import accelerator
        from accelerate.state import AcceleratorState, PartialState
        from accelerate.utils import FullyShardedDataParallelPlugin
        from transformers import TrainingArguments

        self._replace(accelerator, "fsdp2_prepare_model", self._fsdp2_prepare_model)
        self._replace(accelerator.Accelerator, "_prepare_deepspeed", self._prepare_deepspeed)
        self._replace(accelerator.Accelerator, "get_state_dict", self._get_state_dict)
        self._replace(FullyShardedDataParallelPlugin, "set_auto_wrap_policy", _finds_sharded_classes)
        self._replace(PartialState, "_prepare_backend", _has_a_backend_everywhere)
        self._replace(AcceleratorState, "__init__", _knows_fsdp2_everywhere)
        self._replace(TrainingArguments, "_process_fsdp_args", _remembers_fsdp)

    def remove(self) -> None:
        """Put them back."""
        for owner, name, original in self._kept:
            setattr(owner, name, original)
        self._kept = []

    def _replace(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        original = vars(owner)[name]
        self._kept.append((owner, name, original))
        setattr(owner, name, functools.wraps(original)(make(original)))

    def _fsdp2_prepare_model(self, original: Any) -> Any:
        def fsdp2_prepare_model(accelerator: Any, model: Any) -> Any:
            return model if self._sharded(accelerator, model) else original(accelerator, model)

        return fsdp2_prepare_model

    def _prepare_deepspeed(self, original: Any) -> Any:
        def prepare_deepspeed(accelerator: Any, *args: Any) -> Any:
            from torch import nn

            for item in args:
                if isinstance(item, nn.Module):
                    self._partitioned(accelerator, item)
            return original(accelerator, *args)

        return prepare_deepspeed

    def _get_state_dict(self, original: Any) -> Any:
        def get_state_dict(accelerator: Any, model: Any, unwrap: bool = True) -> Any:
            found = NotImplemented
            if self._whole is not None:
                found = self._whole(accelerator.unwrap_model(model))
            return original(accelerator, model, unwrap) if found is NotImplemented else found

        return get_state_dict


#: What ``fully_shard`` puts before the name of a module's class.
_SHARDED = "FSDP"


def _finds_sharded_classes(original: Any) -> Any:
    def set_auto_wrap_policy(plugin: Any, model: Any) -> None:
        names = plugin.transformer_cls_names_to_wrap
        there = {type(module).__name__ for module in model.modules()}
        wanted = names if names is not None else list(getattr(model, "_no_split_modules", None) or ())
        # fully_shard makes of a class Layer a class FSDPLayer. The names are looked up once more, when
        # accelerate wraps them for activation checkpointing.
        plain = [name.removeprefix(_SHARDED) for name in wanted]
        plugin.transformer_cls_names_to_wrap = [
            _SHARDED + name if _SHARDED + name in there else name for name in plain
        ]
        original(plugin, model)

    return set_auto_wrap_policy


def _has_a_backend_everywhere(original: Any) -> Any:
    def prepare_backend(state: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        from accelerate.utils import DistributedType

        backend, kind = original(state, *args, **kwargs)
        if backend is not None or int(os.environ.get("LOCAL_RANK", "-1")) == -1:
            return backend, kind
        if _is_set("ACCELERATE_USE_DEEPSPEED"):
            return "gloo", kind
        if _is_set("ACCELERATE_USE_FSDP") and os.environ.get("FSDP_VERSION") == "2":
            return "gloo", DistributedType.MULTI_CPU
        return backend, kind

    return prepare_backend


def _is_set(name: str) -> bool:
    return os.environ.get(name, "false").lower() == "true"


def _knows_fsdp2_everywhere(original: Any) -> Any:
    def init(state: Any, *args: Any, **kwargs: Any) -> None:
        original(state, *args, **kwargs)
        from accelerate.state import PartialState
        from accelerate.utils import DistributedType

        plugin = kwargs.get("fsdp_plugin")
        if (
            plugin is not None
            and plugin.fsdp_version == 2
            and state.distributed_type == DistributedType.MULTI_CPU
        ):
            # The state is read from there again whenever it is looked at.
            PartialState._shared_state["distributed_type"] = DistributedType.FSDP
            state.distributed_type = DistributedType.FSDP
            if state._mixed_precision != "no":
                plugin.set_mixed_precision(state._mixed_precision)
            state.fsdp_plugin = plugin

    return init


def _remembers_fsdp(original: Any) -> Any:
    def process(arguments: Any) -> Any:
        global _arguments
        result = original(arguments)
        if result is not None:
            _arguments = weakref.ref(arguments)
        return result

    return process
