"""Check and prepare a loaded model at the start of DeepSpeed's engine.

An engine of another ZeRO stage is refused; slices (AutoTP) and experts (AutoEP) of the load are kept.
"""

from __future__ import annotations

import functools
import logging
import sys
import weakref
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from zerostart.errors import EngineError
from zerostart.upstream.deepspeed import zero3_partitions as upstream
from zerostart.upstream.deepspeed.tensors import slices_of
from zerostart.upstream.deepspeed.zero12_groups import expert_of
from zerostart.upstream.guard import Function, Use, demand, find_misfits
from zerostart.upstream.patches import RefCountedPatches, Ticket, check_compatible, wrap
from zerostart.upstream.torch.tensors import edited_argument, is_edit, overloads, shares_storage
from zerostart.upstream.types import Arguments, DeepSpeedConfig, Keywords

if TYPE_CHECKING:
    from types import ModuleType

    from deepspeed.runtime.engine import DeepSpeedEngine
    from deepspeed.runtime.tensor_parallel.config import TPTrainingConfig

logger = logging.getLogger("zerostart")

_ENGINE = "deepspeed.runtime.engine:DeepSpeedEngine"
_CONSTRUCTION = Use(
    _ENGINE,
    "_configure_expert_parallel(model), __init__",
    "engines of another stage are refused; slices and experts stay",
)
_STAGE = Use(_ENGINE, "zero_optimization_stage", "the stage of an engine, as its configuration has it")
_EXPERTS = Use(_ENGINE, "_configure_expert_parallel, ._config", "the section expert_parallel")
_SHARED = Use(
    _ENGINE,
    "__init__, autotp_size, ._config",
    "the section tensor_parallel says afterwards how many ranks share tensors",
)
_GROUPS = Use(
    "deepspeed.utils.groups",
    "_init_tp_mesh_device, get_data_parallel_group",
    "DeepSpeed's own groups of ranks that share tensors",
)
_SUMS = Use(
    "deepspeed.module_inject.auto_tp:AutoTP",
    "register_replicated_grad_hooks",
    "its mark tells which whole parameters have gradients that ranks add up",
)

#: Attribute of a sliced model: the number of ranks that share its tensors, and the rules.
_SLICED = "_zerostart_tensors"
_SUMMED = "_ds_grad_allreduce_registered"
_DECIDING = ("preset_model", "partition_config", "vocab_parallel_lm_head")

#: Returns True if an engine of this ZeRO stage accepts the model.
Takes = Callable[[int], bool]
_loaded: weakref.WeakKeyDictionary[nn.Module, tuple[str, Takes]] = weakref.WeakKeyDictionary()


def keep_stage(model: nn.Module, title: str, takes: Takes) -> None:
    """Make engines refuse ``model``, loaded for ``title``, unless ``takes(stage)``."""
    _loaded[model] = title, takes
    _seam.hold(model)


def note_shared(parameter: Any, ranks: int) -> None:
    """Make the engine keep ``parameter`` of experts that ``ranks`` ranks share."""
    demand((_CONSTRUCTION, _EXPERTS), "Use engine='fsdp2'")
    parameter._zerostart_shared_expert = (ranks, _seam.ticket())


class TensorGroups:
    """Create this rank's groups: ranks that share tensors, and ranks with the same slices. Collective."""

    def __init__(self, size: int) -> None:
        upstream.join_group()
        from deepspeed.utils import groups

        private: ModuleType = groups
        private._init_tp_mesh_device(tensor_model_parallel_size=size)
        self.tensors: dist.ProcessGroup = private.get_tensor_model_parallel_group()
        self.owners: dist.ProcessGroup = private.get_data_parallel_group()
        # DeepSpeed creates these groups once in a process.
        existing = dist.get_world_size(self.tensors)
        if existing != size:
            raise EngineError(
                f"tensor_parallel={size}, but this process has made groups of {existing} ranks before, "
                f"which DeepSpeed cannot change; use tensor_parallel={existing}, or another process"
            )


@dataclass(frozen=True)
class _Mark:
    size: int
    rules: DeepSpeedConfig
    group: dist.ProcessGroup
    ticket: Ticket

    def __deepcopy__(self, memo: object) -> _Mark:
        return self


def mark_sliced(model: nn.Module, size: int, section: DeepSpeedConfig, groups: TensorGroups) -> None:
    """Make the engine of ``model`` share tensors over ``size`` ranks."""
    demand((_CONSTRUCTION, _SHARED, _GROUPS, _SUMS), "Use engine='fsdp2'")
    for name in slices_of(model):
        # AutoTP does not mark embeddings, such as T5's relative positions.
        sliced: Any = model.get_parameter(name)
        sliced.tensor_model_parallel = True
    rules = {key: section[key] for key in _DECIDING if section.get(key) is not None}
    marked: object = model
    marked.__dict__[_SLICED] = _Mark(size, rules, groups.tensors, _seam.ticket())


def restore_hooks(model: nn.Module) -> None:
    """Register the hooks again that sum partial gradients over ranks."""
    mark = _marked(model)
    for parameter in model.parameters():
        if mark is not None and getattr(parameter, _SUMMED, False) and parameter.requires_grad:
            hooked: Any = parameter
            hooked.register_hook(functools.partial(_summed, mark.group))


def _summed(group: dist.ProcessGroup, gradient: torch.Tensor) -> torch.Tensor:
    total = gradient.contiguous()
    dist.all_reduce(total, group=group)
    return total


def _marked(model: object) -> _Mark | None:
    mark: _Mark | None = getattr(model, "__dict__", {}).get(_SLICED)
    return mark


def _enter(stack: ExitStack) -> None:
    if wrong := find_misfits((_CONSTRUCTION, _STAGE)):
        logger.warning("%s. An engine of another ZeRO stage than a model's load fails by itself", wrong)
    if find_misfits((_CONSTRUCTION,)):
        return
    from deepspeed.runtime.engine import DeepSpeedEngine

    def configure(original: Function, engine: Any, model: nn.Module, *args: Any, **kwargs: Any) -> object:
        if not wrong:
            _check_stage(engine.zero_optimization_stage(), model)
        _open_placeholders(model)
        _take_slices(engine, model)
        if _has_its_experts(engine, model):
            from deepspeed.module_inject.auto_ep_layer import ReplacementSourceMap

            return ReplacementSourceMap()
        return original(engine, model, *args, **kwargs)

    wrap(stack, DeepSpeedEngine, "_configure_expert_parallel", configure)


_seam = RefCountedPatches(_enter)


def _check_stage(stage: int, model: nn.Module) -> None:
    for module in model.modules():
        title, takes = _loaded.get(module, ("", None))
        if takes is not None and not takes(stage):
            raise EngineError(
                f"{type(module).__name__} was loaded for {title}, but the configuration of "
                f"deepspeed.initialize has ZeRO stage {stage}; use the same stage in both"
            )


def _has_its_experts(engine: DeepSpeedEngine, model: nn.Module) -> bool:
    shared = {mark[0] for p in model.parameters() if (mark := getattr(p, "_zerostart_shared_expert", None))}
    section = engine._config.expert_parallel_config if shared else None
    if section is None or not section.enabled:
        return False
    if shared != {section.autoep_size}:
        raise EngineError(
            f"the configuration of deepspeed.initialize has autoep_size={section.autoep_size}, but "
            f"the model was loaded with expert_parallel={max(shared)}; use one number for both"
        )
    return True


def _take_slices(engine: DeepSpeedEngine, model: nn.Module) -> None:
    for module in model.modules():
        mark = _marked(module)
        if mark is not None:
            _agree(engine._config.tensor_parallel_config, mark)
            parsed: Any = model  # It may wrap the loaded model.
            parsed.ds_autotp_parsed = True


def _agree(config: TPTrainingConfig, mark: _Mark) -> None:
    from deepspeed.module_inject import layers

    if config.autotp_size not in (0, mark.size):
        raise EngineError(
            f"the model was loaded with tensor_parallel={mark.size}, but the configuration of "
            f"deepspeed.initialize has autotp_size={config.autotp_size}; use one number for both"
        )
    configured = {key: value for key in _DECIDING if (value := getattr(config, key)) is not None}
    if configured and configured != mark.rules:
        names = ", ".join(key for key in _DECIDING if configured.get(key) != mark.rules.get(key))
        raise EngineError(
            f"the tensor_parallel section of deepspeed.initialize has another {names} than the "
            "model was loaded with; pass the same configuration to both"
        )
    config.autotp_size = mark.size
    layers.set_autotp_mode(training=True)


OWN_STATE_DICT = Use(
    _ENGINE,
    "module_state_dict(destination, prefix, keep_vars, exclude_frozen_parameters), _save_checkpoint, "
    "save_16bit_model",
    "a state dict with the experts of one rank as if they were all is refused",
)
_REGISTERED = Use(
    "deepspeed.runtime.zero.parameter_offload:DeepSpeedZeRoOffload",
    "_register_deepspeed_module",
    "a module whose partitions are gathered for its calls has a number",
)
_CONSOLIDATED = Use(
    "deepspeed.runtime.engine:DeepSpeedEngine",
    "_zero3_consolidated_16bit_state_dict(exclude_frozen_parameters), save_16bit_model",
    "experts that several ranks share are put together before they are saved",
)


def check_called(module: nn.Module) -> None:
    """Raise EngineError if nothing gathers the partitions of a called module."""
    if hasattr(module, "ds_id") or not _are_registered():
        return
    for name, inner in module.named_modules():
        own = (leaf for leaf, parameter in inner._parameters.items() if _is_hollow(parameter))
        leaf = None if hasattr(inner, "ds_id") else next(own, None)
        if leaf is not None:
            where = f"{name}.{leaf}".lstrip(".")
            raise EngineError(
                f"{type(module).__name__} is called, but {where} is sharded (ZeRO-3), and nothing "
                "gathers it yet: call deepspeed.initialize or accelerator.prepare first, load a model "
                "that is not trained with zerostart.load_pipeline, or gather it with "
                "deepspeed.zero.GatheredParameters"
            )


@functools.cache
def _are_registered() -> bool:
    return not find_misfits((_REGISTERED,))


def _is_hollow(parameter: Any) -> bool:
    return hasattr(parameter, "ds_id") and not parameter.numel() and parameter.ds_numel > 0


_NAME = "_zerostart_name"
#: Placeholders by the tensors that are their ``data``.
_placeholders: Any = WeakIdKeyDictionary()
_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]
#: Functions that may return their argument itself and need no elements.
_WHOLE = ("contiguous", "detach", "to")


def keep_edits(model: nn.Module) -> None:
    """Refuse edits of empty placeholders, which would be lost, until the engine starts."""
    parameters: dict[str, Any] = dict(model.named_parameters())
    for name, parameter in parameters.items():
        if type(parameter) is nn.Parameter and _is_hollow(parameter):
            setattr(parameter, _NAME, name)
            parameter.__class__ = _Placeholder
    for module in model.modules():
        module.register_load_state_dict_pre_hook(_check_state_dict)  # type: ignore[no-untyped-call]


def _open_placeholders(model: nn.Module) -> None:
    empty: dict[str, Any] = {n: p for n, p in model.named_parameters() if isinstance(p, _Placeholder)}
    for parameter in empty.values():
        parameter.__class__ = nn.Parameter


def _check_state_dict(module: nn.Module, state: Mapping[str, torch.Tensor], prefix: str, *_: object) -> None:
    for leaf, parameter in module._parameters.items():
        # DeepSpeed's load_checkpoint passes empty placeholders.
        if prefix + leaf in state and state[prefix + leaf].numel() and _is_hollow(parameter):
            _refuse(getattr(parameter, _NAME, prefix + leaf))


def _refuse(name: str) -> NoReturn:
    raise EngineError(
        f"{name} is sharded (ZeRO-3) and has no elements here, so a change of it or of a part would be "
        f"lost: change it inside `with zerostart.gathered(model, {name!r}, modifier_rank=0)`"
    )


class _Values(torch.Tensor):
    """``data`` of a placeholder."""

    @classmethod
    def __torch_function__(
        cls, function: Any, types: object, args: Arguments = (), kwargs: Keywords | None = None
    ) -> Any:
        kwargs = kwargs or {}
        target = edited_argument(args, kwargs)
        name = getattr(function, "__name__", "")
        caller = sys._getframe(1).f_globals["__name__"]
        # Initialisers would report a wrong shape.
        is_shape_check = name in ("dim", "ndimension") and caller == "torch.nn.init"
        with torch._C.DisableTorchFunctionSubclass():
            if is_edit(name, kwargs) and isinstance(target, list | tuple):  # such as ``_foreach_zero_``
                target = next((one for one in target if _is_hollow(_placeholder_of(one))), None)
            parameter = _placeholder_of(target)
            if not _is_hollow(parameter):
                return function(*args, **kwargs)
            # DeepSpeed assigns its memory, and torch's ``Module.to`` an empty tensor.
            assigned = function == _SET_DATA and not caller.startswith(
                ("deepspeed.", "zerostart.", "torch.nn.")
            )
            if is_shape_check or assigned or is_edit(name, kwargs) or _is_view(name):
                _refuse(getattr(parameter, _NAME, "a parameter"))
            result = function(*args, **kwargs)
            if type(result) is torch.Tensor and shares_storage(result, target):
                result = result.as_subclass(_Values)
                _placeholders[result] = parameter
            return result

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Become a plain tensor in files and other processes."""
        return self._plain().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __deepcopy__(self, memo: object) -> torch.Tensor:
        return self._plain().clone()

    def _plain(self) -> torch.Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            return self.detach().as_subclass(torch.Tensor)


def _placeholder_of(tensor: Any) -> Any:
    return _placeholders.get(tensor, tensor) if isinstance(tensor, _Values) else tensor


class _Placeholder(nn.Parameter):
    __torch_function__ = _Values.__torch_function__


@functools.cache
def _is_view(name: str) -> bool:
    returned = [each._schema.returns for each in overloads(name) if name not in _WHOLE]
    aliases = [r[0].alias_info for r in returned if r]
    # The result of an operation in place (``requires_grad_``) is no view.
    return name == "__getitem__" or any(alias is not None and not alias.is_write for alias in aliases)


def _enter_state_dicts(stack: ExitStack) -> None:
    if not check_compatible(stack, own_state_dicts, (OWN_STATE_DICT,), "Use zerostart.save and save_state"):
        return
    from deepspeed.runtime.engine import DeepSpeedEngine

    wrap(stack, DeepSpeedEngine, "module_state_dict", _check_experts)


def _check_experts(original: Function, engine: DeepSpeedEngine, *args: Any, **kwargs: Any) -> object:
    if any(expert_of(p) is not None for p in engine.module.parameters()):
        raise EngineError(
            "with expert_parallel at ZeRO stages 1 and 2 DeepSpeed would save the experts of one "
            "rank as if they were all; use zerostart.save_state(path, engine) or "
            "zerostart.save(engine, path), or call zerostart.enable() first, which makes "
            "engine.save_checkpoint do the same"
        )
    return original(engine, *args, **kwargs)


own_state_dicts = RefCountedPatches(_enter_state_dicts)


#: The whole state dict on rank 0 (True: without frozen parameters), or NotImplemented.
Whole = Callable[[torch.nn.Module, bool], object]


class Consolidation(RefCountedPatches):
    """Calls ``whole`` first for the held models."""

    def __init__(self, whole: Whole) -> None:
        super().__init__(self._enter)
        self._whole = whole

    def _enter(self, stack: ExitStack) -> None:
        demand(
            (_CONSOLIDATED,), "Experts that several ranks share would be saved in part; use expert_parallel=1"
        )
        from deepspeed.runtime.engine import DeepSpeedEngine

        wrap(stack, DeepSpeedEngine, "_zero3_consolidated_16bit_state_dict", self._consolidate)

    def _consolidate(
        self, original: Function, engine: DeepSpeedEngine, exclude_frozen_parameters: bool = False
    ) -> Any:
        result = self._whole(engine.module, exclude_frozen_parameters)
        return original(engine, exclude_frozen_parameters) if result is NotImplemented else result
