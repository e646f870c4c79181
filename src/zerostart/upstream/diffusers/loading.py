"""Private parts of diffusers: the seams of ``from_pretrained`` at which zerostart takes over the weights.

``ModelMixin.from_pretrained`` finds the configuration and the files, builds the model, and afterwards names
it and leaves it in evaluation mode; that stays as it is. Replaced while an ``Override`` is open, and only for
calls that its ``choose`` wants served:

- ``modeling_utils.ContextManagers``: the contexts in which the model is built, which become ours;
- ``modeling_utils.load_state_dict``: the only file of a checkpoint is not read;
- ``ModelMixin._load_pretrained_model``: which reads the weights; only its warnings are left.

diffusers is not imported for this: the seams are replaced once it is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ExitStack
from types import ModuleType
from typing import Any

import torch

from zerostart.errors import BuildError
from zerostart.upstream.diffusers.weights import require as require_version
from zerostart.upstream.on_import import when_imported
from zerostart.upstream.patches import RefCountedPatches, replaced
from zerostart.upstream.registry import Lasts, PatchPoint, demand
from zerostart.upstream.served import Served, current_call, serving
from zerostart.upstream.shapes import Shape
from zerostart.upstream.versions import DIFFUSERS

_MODULE = "diffusers.models.modeling_utils"
_MIXIN = "diffusers.models.modeling_utils:ModelMixin"
_ENTRY = PatchPoint(
    library=DIFFUSERS,
    owner=_MIXIN,
    names=("from_pretrained",),
    why="whether a call is to be served, and an error that tells the way out",
    lasts=Lasts.BLOCK,
    shapes=(
        Shape(
            f"{_MIXIN}.from_pretrained",
            has=(
                "cls._set_default_torch_dtype(torch_dtype)",
                "with ContextManagers(init_contexts): ...",
                "model = cls.from_config(config, ...)",
                "state_dict = load_state_dict(resolved_model_file[0], ...)",
                "cls._load_pretrained_model(...)",
                "model.register_to_config(..., _name_or_path=N)",
                "model.eval()",
            ),
        ),
    ),
)
_LOADING = PatchPoint(
    library=DIFFUSERS,
    owner=_MIXIN,
    names=("_load_pretrained_model",),
    why="reads the weights; only its warnings are left",
    lasts=Lasts.BLOCK,
    shapes=(
        Shape(
            f"{_MIXIN}._load_pretrained_model",
            leads=(
                "model",
                "state_dict",
                "resolved_model_file",
                "pretrained_model_name_or_path",
                "loaded_keys",
            ),
        ),
    ),
)
_BUILDING = PatchPoint(
    library=DIFFUSERS,
    owner="diffusers.models.modeling_utils",
    names=("ContextManagers",),
    why="the contexts in which the model is built, which become ours",
    lasts=Lasts.BLOCK,
)
_READING = PatchPoint(
    library=DIFFUSERS,
    owner="diffusers.models.modeling_utils",
    names=("load_state_dict",),
    why="the only file of a checkpoint is not read",
    lasts=Lasts.BLOCK,
)
TOUCHED = (_ENTRY, _LOADING, _BUILDING, _READING)


def require() -> None:
    """Raise UnsupportedVersionError unless the seams are there and look as expected."""
    require_version()
    demand(TOUCHED, "zerostart.enabled() cannot take over its loading; use zerostart.load")


class Override(RefCountedPatches):
    """Replaces the seams while it is open, from the import of diffusers on.

    ``choose(class, keyword arguments)`` is asked at each call of ``from_pretrained``: None leaves the call to
    diffusers, and ``left(model)`` is told of what it gave.
    """

    def __init__(
        self, choose: Callable[[type, dict[str, Any]], Served | None], left: Callable[[Any], None]
    ) -> None:
        super().__init__(self._enter)
        self._choose = choose
        self._left = left

    def _enter(self, stack: ExitStack) -> None:
        later = stack.enter_context(ExitStack())
        stack.callback(when_imported(_MODULE, functools.partial(self._imported, later)))

    def _imported(self, stack: ExitStack, module: ModuleType) -> None:
        require()
        mixin: Any = module.ModelMixin
        for point, owner, new in (
            (_ENTRY, mixin, classmethod(self._from_pretrained(mixin))),
            (_LOADING, mixin, classmethod(_load_pretrained_model(mixin))),
            (_BUILDING, module, _contexts(module)),
            (_READING, module, _load_state_dict(module)),
        ):
            stack.enter_context(replaced(point, owner, point.names[0], new))

    def _from_pretrained(self, mixin: Any) -> Any:
        original = vars(mixin)["from_pretrained"].__func__

        @functools.wraps(original)
        def from_pretrained(cls: type, *args: Any, **kwargs: Any) -> Any:
            if (outer := current_call()) is not None and outer.model is None:
                raise BuildError(
                    f"{cls.__name__}.from_pretrained is called while another model is built, which "
                    "zerostart.enabled() does not serve; load that model with zerostart.load"
                )
            served = self._choose(cls, kwargs)
            if served is None:
                result = original(cls, *args, **kwargs)
                self._left(result[0] if isinstance(result, tuple) else result)
                return result
            default = torch.get_default_dtype()
            with serving(served), served.together():
                try:
                    return original(cls, *args, **served.arguments)
                except BaseException:
                    torch.set_default_dtype(default)  # diffusers sets it, and back where nothing fails
                    raise

        return from_pretrained


def _served() -> Served | None:
    """The call that is to be served, until its model has its weights."""
    served = current_call()
    return None if served is None or served.model is not None else served


def _contexts(module: Any) -> Any:
    original = module.ContextManagers

    @functools.wraps(original)
    def contexts(managers: list[Any]) -> Any:
        served = _served()
        return original(managers) if served is None else served.building(torch.get_default_dtype())[1]

    return contexts


def _load_state_dict(module: Any) -> Any:
    original = module.load_state_dict

    @functools.wraps(original)
    def load_state_dict(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs) if _served() is None else {}

    return load_state_dict


def _load_pretrained_model(mixin: Any) -> Any:
    original = vars(mixin)["_load_pretrained_model"].__func__

    @functools.wraps(original)
    def load(
        cls: Any, model: Any, state_dict: Any, files: list[Any], name: Any, keys: list[str], **options: Any
    ) -> Any:
        served = _served()
        if served is None:
            return original(cls, model, state_dict, files, name, keys, **options)
        missing, unexpected, mismatched = served.load(model, [str(file) for file in files], name, options)
        served.model = model
        found = sorted((set(model.state_dict()) - missing) | unexpected)
        # With nothing to read it says what is missing and unexpected.
        model, absent, surplus, _, index, errors = original(cls, model, None, [], name, found)
        return model, absent, surplus, sorted(mismatched), index, errors

    return load
