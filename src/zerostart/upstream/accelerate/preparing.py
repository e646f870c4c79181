"""Let accelerate prepare sharded models, also on hosts without an accelerator."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.distributed.tensor import DTensor

from zerostart.upstream.accelerate.plugins import SHARDED, is_set, remember, require_version
from zerostart.upstream.guard import Function, Use, find_misfits, resolve
from zerostart.upstream.patches import RefCountedPatches, check_compatible, wrap

if TYPE_CHECKING:
    import accelerate
    from accelerate.state import AcceleratorState
    from accelerate.utils import FullyShardedDataParallelPlugin
    from transformers import TrainingArguments

    from zerostart.upstream.types import Accelerator

logger = logging.getLogger("zerostart")
_PREPARE_FSDP2 = Use(
    "accelerate.accelerator",
    "fsdp2_prepare_model(accelerator, model)",
    "a model that is sharded already is left as it is",
)
_PREPARE = Use(
    "accelerate.accelerator:Accelerator",
    "_prepare_fsdp2, _prepare_tp, _prepare_deepspeed, "
    "accelerate.utils.dataclasses:FullyShardedDataParallelPlugin.set_auto_wrap_policy(model)",
    "a model in shards is left as it is",
)
_BACKEND = Use(
    "accelerate.state:PartialState",
    "_prepare_backend",
    "ranks of DeepSpeed or FSDP2 on hosts without an accelerator get a backend",
)
_STATE = Use(
    "accelerate.state:AcceleratorState",
    "__init__(*, fsdp_plugin)",
    "on hosts without an accelerator the state says FSDP, not DDP",
)
_ARGUMENTS = Use(
    "transformers.training_args:TrainingArguments",
    "_process_fsdp_args",
    "arguments are remembered while they live",
)


_REMEDY = "accelerate cannot prepare models in shards so: use deepspeed.initialize or a plain FSDP2 loop"


class AcceleratorPatches(RefCountedPatches):
    """Let ``Accelerator.prepare`` take models that are already sharded.

    ``prepare_fsdp2(model)`` returns True for a model that FSDP2 shards. ``check_deepspeed(accelerator,
    model)`` raises for a model that ZeRO cannot take. ``on_optimizer`` gets each optimizer of shards.
    """

    def __init__(
        self,
        prepare_fsdp2: Callable[[nn.Module], bool],
        check_deepspeed: Callable[[Accelerator, nn.Module], None],
        on_optimizer: Callable[[Any], None] = lambda optimizer: None,
    ) -> None:
        super().__init__(self._enter)
        self._is_sharded = prepare_fsdp2
        self._check_partitions = check_deepspeed
        self._on_optimizer = on_optimizer

    def _enter(self, stack: ExitStack) -> None:
        require_version()
        replacements: dict[Use, tuple[Function, ...]] = {
            _PREPARE_FSDP2: (self._fsdp2_prepare_model,),
            _PREPARE: (self._prepare_fsdp2, self._prepare_tp, self._prepare_deepspeed),
            _BACKEND: (_prepare_backend,),
            _STATE: (_start_state,),
            _ARGUMENTS: (_remember_arguments,),
        }
        for use, functions in replacements.items():
            # Without the others, accelerate would damage a sharded model.
            if use in (_BACKEND, _STATE, _ARGUMENTS) and (wrong := find_misfits((use,))):
                logger.warning("%s. It stays as it is", wrong)
                continue
            if not check_compatible(stack, self, (use,), _REMEDY):
                continue
            owner = resolve(use.owner)
            for name, function in zip(use.functions, functions, strict=True):
                wrap(stack, owner, name, function)

    def _fsdp2_prepare_model(self, original: Function, accelerator: Accelerator, model: nn.Module) -> object:
        return model if self._is_sharded(model) else original(accelerator, model)

    def _prepare_fsdp2(self, original: Function, accelerator: Accelerator, *args: Any) -> Any:
        for item in args:
            if isinstance(item, nn.Module):
                _name_sharded_classes(accelerator.state.fsdp_plugin, item)
            elif hasattr(item, "param_groups"):
                self._on_optimizer(item)
        # accelerate finds parameters by address, and empty shards have none: put them back by identity.
        before = [
            [[p if isinstance(p, DTensor) else None for p in group["params"]] for group in groups]
            for groups in (getattr(item, "param_groups", ()) for item in args)
        ]
        result = original(accelerator, *args)
        models = [item for item in result if isinstance(item, nn.Module)]
        ids = {id(parameter) for model in models for parameter in model.parameters()}
        for item, groups in zip(result, before, strict=True):
            for group, sharded in zip(item.param_groups if groups else (), groups, strict=True):
                pairs = zip(sharded, group["params"], strict=True)
                group["params"] = [new if old is None or id(old) not in ids else old for old, new in pairs]
        return result

    def _prepare_tp(self, original: Function, accelerator: Accelerator, *args: Any) -> Any:
        models = [item for item in args if isinstance(item, nn.Module)]
        # accelerate takes any DTensor for one of a tensor-parallel mesh.
        ready = accelerator.is_fsdp2 and models and all(self._is_sharded(model) for model in models)
        return args if ready else original(accelerator, *args)

    def _prepare_deepspeed(self, original: Function, accelerator: Accelerator, *args: Any) -> Any:
        for item in args:
            if isinstance(item, nn.Module):
                self._check_partitions(accelerator, item)
            elif hasattr(item, "param_groups") and accelerator.state.deepspeed_plugin.zero_stage:
                self._on_optimizer(item)
        return original(accelerator, *args)


def _name_sharded_classes(plugin: FullyShardedDataParallelPlugin, model: nn.Module) -> None:
    # ``fully_shard`` makes classes ``FSDPLayer`` of classes ``Layer``.
    names = plugin.transformer_cls_names_to_wrap
    present = {type(module).__name__ for module in model.modules()}
    declared = getattr(model, "_no_split_modules", None) or ()
    plain = [name.removeprefix(SHARDED) for name in (declared if names is None else names)]
    classes = [SHARDED + name if SHARDED + name in present else name for name in plain]
    # A part of a composite model declares classes of the other parts, too.
    plugin.transformer_cls_names_to_wrap = [c for c in classes if names is not None or c in present]


def _prepare_backend(
    original: Function, state: accelerate.PartialState, *args: Any, **kwargs: Any
) -> tuple[object, object]:
    """Choose gloo for DeepSpeed and FSDP2 on a host without an accelerator."""
    from accelerate.utils import DistributedType

    backend, kind = original(state, *args, **kwargs)
    if backend is None and int(os.environ.get("LOCAL_RANK", "-1")) != -1:
        if is_set("ACCELERATE_USE_DEEPSPEED"):
            return "gloo", kind
        if is_set("ACCELERATE_USE_FSDP") and os.environ.get("FSDP_VERSION") == "2":
            return "gloo", DistributedType.MULTI_CPU
    return backend, kind


def _start_state(original: Function, state: AcceleratorState, *args: Any, **kwargs: Any) -> None:
    """Make the state of FSDP2 on a host without an accelerator say FSDP."""
    original(state, *args, **kwargs)
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    if kwargs.get("cpu") and kwargs.get("_from_accelerator") and is_set("ACCELERATE_USE_DEEPSPEED"):
        logger.warning(
            "Accelerator(cpu=True): accelerate trains without the DeepSpeed that the launcher "
            "asks for; leave out cpu=True, which hosts without accelerators do not need here"
        )
    plugin = kwargs.get("fsdp_plugin")
    is_on_hosts = state.distributed_type == DistributedType.MULTI_CPU
    if plugin is not None and plugin.fsdp_version == 2 and is_on_hosts:
        PartialState._shared_state["distributed_type"] = DistributedType.FSDP
        state.distributed_type = DistributedType.FSDP
        if state._mixed_precision != "no":
            plugin.set_mixed_precision(state._mixed_precision)
        state.fsdp_plugin = plugin


def _remember_arguments(original: Function, arguments: TrainingArguments) -> Any:
    result = original(arguments)
    if result is not None:
        remember("fsdp", arguments)
    if arguments.parallelism_config is not None:
        remember("parallelism", arguments)
    return result
