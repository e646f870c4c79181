"""Load models of DiffSynth-Studio, and recognise its torch files."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from contextlib import ExitStack
from types import ModuleType
from typing import Any

from zerostart.upstream.guard import Function, Use, demand
from zerostart.upstream.patches import RefCountedPatches, enter_on_import, wrap
from zerostart.upstream.transformers.loading import without_zero3

_MODEL = "diffsynth.core.loader.model"
_FILE = "diffsynth.core.loader.file"
TOUCHED = (
    Use(
        "diffsynth.core.loader.model",
        "load_model(model_class, path, config, torch_dtype, device, state_dict_converter, use_disk_map, "
        "module_map, vram_config, vram_limit, state_dict, quantize)",
        "builds and fills every model",
    ),
    Use(
        "diffsynth.core.loader.file",
        "load_keys_dict_from_bin(file_path), load_state_dict_from_bin",
        "reads a whole torch file on every rank to recognise it by its names and shapes",
    ),
    Use(
        "diffsynth.core.loader.model",
        "is_deepspeed_zero3_enabled, get_init_context",
        "what DiffSynth keeps in its own way is built without zero.Init",
    ),
)


@functools.cache
def require_version() -> None:
    """Raise UnsupportedVersionError unless DiffSynth is as expected."""
    demand(TOUCHED, "zerostart.enabled() cannot take over its loading; use zerostart.load")


class DiffSynthSeam(RefCountedPatches):
    """Replace ``load_model`` and the recognition of torch files, once DiffSynth is imported.

    ``choose(class, arguments)`` returns None for calls that DiffSynth serves; ``skipped(model)`` gets
    their result. ``keys(path)`` returns the names and shapes in a torch file, or None.
    """

    def __init__(
        self,
        choose: Callable[[type, dict[str, Any]], Any],
        skipped: Callable[[Any], None],
        keys: Callable[[str], dict[str, object] | None],
    ) -> None:
        super().__init__(self._enter)
        self._choose = choose
        self._skipped = skipped
        self._keys = keys

    def _enter(self, stack: ExitStack) -> None:
        enter_on_import(stack, _MODEL, self._with_loading)
        enter_on_import(stack, _FILE, self._with_keys)

    def _with_loading(self, stack: ExitStack, module: ModuleType) -> None:
        wrap(stack, module, "load_model", self._load_model, everywhere=True)

    def _with_keys(self, stack: ExitStack, module: ModuleType) -> None:
        wrap(stack, module, "load_keys_dict_from_bin", self._load_keys)

    def _load_keys(self, original: Function, file_path: Any) -> Any:
        shapes = self._keys(file_path)
        return original(file_path) if shapes is None else shapes

    def _load_model(self, original: Function, *args: Any, **kwargs: Any) -> object:
        bound = inspect.signature(original).bind(*args, **kwargs)
        bound.apply_defaults()
        # A module may keep this function after the block has ended.
        call = self._choose(bound.arguments["model_class"], bound.arguments) if self.is_open else None
        if call is None:
            result = original(*args, **kwargs)
            self._skipped(result)
            return result
        require_version()

        def own() -> Any:
            # ``zero.Init`` would partition the model too early.
            with without_zero3():
                return original(*args, **kwargs)

        return call.load_model(own)
