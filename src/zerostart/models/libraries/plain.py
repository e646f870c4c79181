"""Modules of plain torch: loaded as their own ``load_state_dict`` loads them."""

from __future__ import annotations

import inspect
from collections.abc import Mapping

from torch import nn

from zerostart.checkpoint.catalog import Catalog
from zerostart.models.library import Built, ModelLibrary, chosen_converter
from zerostart.recipe import Recipes, Target, dequantised_symbols, loaded_into, run_converter, symbols_of
from zerostart.upstream.deepspeed.zero3_start import keep_printable


class Plain(ModelLibrary):
    """A module of no library: built by the caller, and filled by its own ``load_state_dict``."""

    name = "plain"
    from_config = False
    keeps_views = True

    def handles(self, kind: type) -> bool:
        """It is asked last, and takes any class."""
        return True

    def recipes(
        self, built: Built, catalog: Catalog, targets: Mapping[str, Target], converter: object = None
    ) -> Recipes:
        """What the module's own loading makes of the checkpoint, or of what the caller's converter makes."""
        chosen = chosen_converter(built.model, converter, self.converter)
        if chosen is None:
            symbols = dequantised_symbols(catalog, targets)
            return loaded_into(built.model, symbols, targets, catalog.versions, built.log)
        return loaded_into(built.model, run_converter(chosen, symbols_of(catalog)), targets, None, built.log)


PACKAGE = "diffsynth."


class DiffSynth(Plain):
    """DiffSynth's own classes, those that derive from transformers' too: all load a state dict."""

    name = "diffsynth"

    def handles(self, kind: type) -> bool:
        """Whether DiffSynth defines it, or a class that it derives from."""
        return any(base.__module__.startswith(PACKAGE) for base in kind.__mro__)

    def entries(self, model: nn.Module) -> tuple[str, ...]:
        """All public methods that its class has beside the forward: pipelines call them as they need them."""
        own = [vars(base) for base in type(model).__mro__ if base.__module__.startswith(PACKAGE)]
        names = dict.fromkeys(name for members in reversed(own) for name in members)
        return tuple(
            name
            for name in names
            if not name.startswith("_")
            and name != "forward"
            and inspect.isfunction(inspect.getattr_static(type(model), name))
        )

    def by_parts(self, model: nn.Module) -> bool:
        """Whether pipelines call its modules: all but autoencoders and encoders, which have methods."""
        return not Plain.entries(self, model)

    def finish(self, built: Built, recipes: Recipes, name: str | None, catalog: Catalog) -> None:
        """Let DeepSpeed begin with it, whatever its modules print."""
        keep_printable(built.model)
