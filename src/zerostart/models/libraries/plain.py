"""Modules of plain torch, loaded as by their own ``load_state_dict``."""

from __future__ import annotations

import inspect
from collections.abc import Mapping

from torch import nn

from zerostart.checkpoint.catalog import Catalog
from zerostart.models.library import Built, ModelLibrary, choose_converter
from zerostart.recipe import (
    CheckpointSymbols,
    Recipes,
    Target,
    dequantise_symbols,
    run_converter,
    trace_loading,
)
from zerostart.upstream.deepspeed.zero3_start import keep_printable


class Plain(ModelLibrary):
    """A module that its own ``load_state_dict`` fills."""

    name = "plain"
    from_config = False
    keeps_views = True

    def handles(self, kind: type) -> bool:
        """Accept any class; this library is asked last."""
        return True

    def recipes(
        self, built: Built, catalog: Catalog, targets: Mapping[str, Target], converter: object = None
    ) -> Recipes:
        """Trace the module's own loading, after the caller's converter."""
        chosen = choose_converter(built.model, converter, self.converter)
        if chosen is None:
            symbols = dequantise_symbols(catalog, targets)
            return trace_loading(built.model, symbols, targets, catalog.versions, built.log)
        converted = run_converter(chosen, CheckpointSymbols(catalog))
        return trace_loading(built.model, converted, targets, None, built.log)


PACKAGE = "diffsynth."


class DiffSynth(Plain):
    """DiffSynth's own classes, which load a state dict."""

    name = "diffsynth"

    def handles(self, kind: type) -> bool:
        return any(base.__module__.startswith(PACKAGE) for base in kind.__mro__)

    def entries(self, model: nn.Module) -> tuple[str, ...]:
        """Return public methods of its classes, which pipelines call directly."""
        own = [vars(base) for base in type(model).__mro__ if base.__module__.startswith(PACKAGE)]
        names = dict.fromkeys(name for members in reversed(own) for name in members)
        return tuple(
            name
            for name in names
            if not name.startswith("_")
            and name != "forward"
            and inspect.isfunction(inspect.getattr_static(type(model), name))
        )

    def is_called_by_parts(self, model: nn.Module) -> bool:
        """Return True unless it is an autoencoder or encoder."""
        return not Plain.entries(self, model)

    def finish(self, built: Built, recipes: Recipes, name: str | None, catalog: Catalog) -> None:
        """Let DeepSpeed start even if printing modules fails."""
        keep_printable(built.model)
