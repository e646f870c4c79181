"""Private parts of diffusers: the seams of ``from_pretrained`` at which zerostart takes over the weights.

Known for the versions that ``upstream.diffusers`` supports. ``ModelMixin.from_pretrained`` finds the
configuration and the files, builds the model, and afterwards names it and leaves it in evaluation mode; that
stays as it is. Replaced while ``Override`` is installed, and only for calls that its ``choose`` wants served:

- ``modeling_utils.ContextManagers``: the contexts in which the model is built, which become ours;
- ``modeling_utils.load_state_dict``: the only file of a checkpoint is not read;
- ``ModelMixin._load_pretrained_model``: which reads the weights; only its warnings are left.

diffusers is not imported for this: the seams are replaced once it is.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from zerostart.errors import BuildError, UnsupportedVersionError
from zerostart.upstream.diffusers import require as require_version
from zerostart.upstream.on_import import when_imported
from zerostart.upstream.transformers_loading import Served, current_call, serving

__all__ = ["Override", "require"]

_MODULE = "diffusers.models.modeling_utils"
_SEAMS = ("ContextManagers", "load_state_dict", "ModelMixin")
_LOAD_ARGUMENTS = (
    "model",
    "state_dict",
    "resolved_model_file",
    "pretrained_model_name_or_path",
    "loaded_keys",
)


def require(module: Any) -> None:
    """Raise UnsupportedVersionError unless the seams are there and look as expected."""
    require_version()
    absent = [name for name in _SEAMS if not hasattr(module, name)]
    if not absent:
        given = tuple(inspect.signature(module.ModelMixin._load_pretrained_model).parameters)
        if given[: len(_LOAD_ARGUMENTS)] != _LOAD_ARGUMENTS:
            absent = [f"_load_pretrained_model({', '.join(_LOAD_ARGUMENTS)})"]
    if absent:
        raise UnsupportedVersionError(
            f"zerostart.enabled() knows the loading of diffusers 0.42; {_MODULE} misses {', '.join(absent)}. "
            "Use zerostart.load"
        )


class Override:
    """Replaces the seams from ``install`` to ``remove``, or from the import of diffusers.

    ``choose(class, keyword arguments)`` is asked at each call of ``from_pretrained``: None leaves the call to
    diffusers, and ``left(model)`` is told of what it gave.
    """

    def __init__(
        self, choose: Callable[[type, dict[str, Any]], Served | None], left: Callable[[Any], None]
    ) -> None:
        self._choose = choose
        self._left = left
        self._kept: list[tuple[Any, str, Any]] = []
        self._wanted = self._waiting = False

    def install(self) -> None:
        """Replace the seams, as soon as diffusers is imported."""
        self._wanted = True
        if not self._waiting:
            self._waiting = True
            when_imported(_MODULE, self._imported)

    def remove(self) -> None:
        """Put them back."""
        self._wanted = False
        for owner, name, original in self._kept:
            setattr(owner, name, original)
        self._waiting = self._waiting and not self._kept
        self._kept = []

    def _imported(self, module: ModuleType) -> None:
        if not self._wanted:
            self._waiting = False
            return
        require(module)
        mixin: Any = module.ModelMixin
        self._replace(mixin, "from_pretrained", classmethod(self._from_pretrained(mixin)))
        self._replace(mixin, "_load_pretrained_model", classmethod(_load_pretrained_model(mixin)))
        self._replace(module, "ContextManagers", _contexts(module))
        self._replace(module, "load_state_dict", _load_state_dict(module))

    def _replace(self, owner: Any, name: str, new: Any) -> None:
        self._kept.append((owner, name, vars(owner)[name]))
        setattr(owner, name, new)

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
