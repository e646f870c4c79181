"""State dicts and copies of models that DeepSpeed holds in parts, which nobody may save for the model.

``state_dict()`` of a model at stage 3 has tensors without elements under the names of its weights, and so has
a copy of it. What is saved of that is a file without a model, and nothing says so. Here such a tensor says so
when its bytes are asked for; DeepSpeed's own checkpoints have them as before. At stages 1 and 2, with experts
that ranks share, DeepSpeed's own state dict has those of one rank as if they were all: it is refused. At
stage 3 it gathers over the group of each parameter and keeps rank 0's: what Trainer and accelerate save is
put together by ``Consolidation`` there.
"""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn

from zerostart.errors import ConfigError, EngineError
from zerostart.upstream.deepspeed.zero12.marks import expert_of
from zerostart.upstream.guard import Use, demand, misfit
from zerostart.upstream.patches import RefCountedPatches, fits, replaced

if TYPE_CHECKING:
    from deepspeed.runtime.engine import DeepSpeedEngine


_ENGINE = "deepspeed.runtime.engine:DeepSpeedEngine"
OWN_STATE_DICT = Use(
    _ENGINE,
    "module_state_dict(destination, prefix, keep_vars, exclude_frozen_parameters), _save_checkpoint, "
    "save_16bit_model",
    "DeepSpeed's checkpoints have its partitions beside tensors without elements, as without "
    "zerostart; one with the experts of one rank as if they were all is refused",
)
_COPIES = Use(
    "torch.nn:Parameter",
    "",
    "a parameter that ZeRO-3 has partitioned is not copied or saved without its elements",
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
TOUCHED = (OWN_STATE_DICT, _COPIES, _REGISTERED, _CONSOLIDATED)
#: Modules whose state dicts say so.
_marked: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def _refuse() -> NoReturn:
    raise ConfigError(
        "this is a parameter of a sharded model (ZeRO-3): each rank holds a part of it, and "
        "the parameter itself has no elements, so a save or copy of it would be empty. On "
        "every rank, save the model with zerostart.save(model, directory) or save_pretrained, "
        "and a checkpoint with engine.save_checkpoint or zerostart.save_state; "
        "zerostart.full_tensors(model) and zerostart.gathered(model, name) give whole tensors"
    )


class PartitionedPlaceholder(torch.Tensor):
    """A tensor without elements, of a ``state_dict()``, that is no weight; copies of it are such tensors."""

    def __reduce_ex__(self, protocol: object) -> Any:
        """Raise ConfigError, where it is empty."""
        return super().__reduce_ex__(protocol) if self.numel() else _refuse()  # type: ignore[no-untyped-call]

    def __deepcopy__(self, memo: object) -> object:
        """Raise ConfigError, where it is empty."""
        return super().__deepcopy__(memo) if self.numel() else _refuse()  # type: ignore[no-untyped-call]

    def data_ptr(self) -> int:
        """Raise ConfigError, where it is empty: files of safetensors are written from there."""
        return super().data_ptr() if self.numel() else _refuse()

    def numpy(self, *args: object, **kwargs: Any) -> Any:
        """Raise ConfigError, where it is empty."""
        return super().numpy(*args, **kwargs) if self.numel() else _refuse()


def keep_from_loss(model: nn.Module, parameters: Iterable[nn.Parameter]) -> None:
    """Have these ``parameters`` of ``model`` refuse to be saved or copied while they are empty.

    Those that were added later are partitioned by ``deepspeed.initialize``. Raises UpstreamError for a
    DeepSpeed that is not known.
    """
    own_state_dicts.hold(model)
    for module in set(model.modules()).difference(_marked):
        module.register_state_dict_post_hook(_mark)  # type: ignore[no-untyped-call]
        _marked.add(module)
    for parameter in parameters:
        # In the parameter's dictionary, where ``copy`` finds it: the class is torch's, and every parameter's.
        vars(parameter)["__deepcopy__"] = types.MethodType(_copied, parameter)
        vars(parameter)["__reduce_ex__"] = types.MethodType(_reduced, parameter)


def check_called(module: nn.Module) -> None:
    """Raise EngineError for a call of a module whose partitions nothing gathers."""
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
    """Whether modules that DeepSpeed gathers can be told."""
    return not misfit((_REGISTERED,))


def _mark(module: nn.Module, state: dict[str, Any], prefix: str, _: object) -> None:
    for name, parameter in module.named_parameters(remove_duplicate=False):
        tensor = state.get(prefix + name)
        # The parameter itself (keep_vars=True) is for those who know what it is.
        if tensor is not None and tensor is not parameter and _is_hollow(parameter):
            state[prefix + name] = tensor.as_subclass(PartitionedPlaceholder)


def _is_hollow(parameter: Any) -> bool:
    return hasattr(parameter, "ds_id") and not parameter.numel() and parameter.ds_numel > 0


def _copied(parameter: nn.Parameter, memo: object) -> object:
    if _is_hollow(parameter):
        _refuse()
    return nn.Parameter.__deepcopy__(parameter, memo)  # type: ignore[no-untyped-call]


def _reduced(parameter: nn.Parameter, protocol: Any) -> object:
    if _is_hollow(parameter):
        _refuse()
    # Without what engines have hung on it, which nobody can pickle.
    bare = nn.Parameter(parameter.data, parameter.requires_grad)
    return bare.__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


def _enter(stack: ExitStack) -> None:
    if not fits(stack, own_state_dicts, (OWN_STATE_DICT,), "Use zerostart.save and save_state"):
        return
    from deepspeed.runtime.engine import DeepSpeedEngine

    name = "module_state_dict"
    original = getattr(DeepSpeedEngine, name)

    @functools.wraps(original)
    def module_state_dict(engine: DeepSpeedEngine, *args: object, **kwargs: object) -> object:
        if any(expert_of(p) is not None for p in engine.module.parameters()):
            raise EngineError(
                "with expert_parallel at ZeRO stages 1 and 2 DeepSpeed would save the experts of one "
                "rank as if they were all; use zerostart.save_state(path, engine) or "
                "zerostart.save(engine, path), or call zerostart.enable() first, which makes "
                "engine.save_checkpoint do the same"
            )
        state = original(engine, *args, **kwargs)
        for key, tensor in state.items():
            # DeepSpeed's own checkpoint has placeholders beside its partition files, and is complete with
            # them.
            if isinstance(tensor, PartitionedPlaceholder):
                state[key] = tensor.as_subclass(torch.Tensor)
        return state

    stack.enter_context(replaced(DeepSpeedEngine, name, module_state_dict))


#: In place while a model lives whose own state dict is not all of it.
own_state_dicts = RefCountedPatches(_enter)


#: The whole state dict of a model (True: without frozen parameters) on rank 0 and None elsewhere, or
#: NotImplemented for a model that DeepSpeed gathers by itself.
Whole = Callable[[torch.nn.Module, bool], object]


class Consolidation(RefCountedPatches):
    """Asks ``whole`` first, while one of the models that it is held for lives; others are as before."""

    def __init__(self, whole: Whole) -> None:
        super().__init__(self._enter)
        self._whole = whole

    def _enter(self, stack: ExitStack) -> None:
        demand(
            (_CONSOLIDATED,), "Experts that several ranks share would be saved in part; use expert_parallel=1"
        )
        from deepspeed.runtime.engine import DeepSpeedEngine

        name = "_zero3_consolidated_16bit_state_dict"
        original = getattr(DeepSpeedEngine, name)

        @functools.wraps(original)
        def consolidated(engine: DeepSpeedEngine, exclude_frozen_parameters: bool = False) -> Any:
            found = self._whole(engine.module, exclude_frozen_parameters)
            return original(engine, exclude_frozen_parameters) if found is NotImplemented else found

        stack.enter_context(replaced(DeepSpeedEngine, name, consolidated))
