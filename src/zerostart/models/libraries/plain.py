"""Modules of plain torch: loaded as their own ``load_state_dict`` loads them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zerostart.checkpoint.catalog import Catalog
from zerostart.models.library import Built, ModelLibrary
from zerostart.recipe import Recipes, Target, loaded_into, run_converter, symbols_of


class Plain(ModelLibrary):
    """Any module of no library: built by the caller, and filled by its own ``load_state_dict``."""

    name = "plain"
    from_config = False
    keeps_views = True

    def handles(self, kind: type) -> bool:
        """It is asked last, and takes any class."""
        return True

    def recipes(
        self, built: Built, catalog: Catalog, targets: Mapping[str, Target], converter: Any = None
    ) -> Recipes:
        """What the module's own loading makes of the checkpoint, or of what the caller's converter makes."""
        chosen = self.own_or_callable(built.model, converter)
        symbols = symbols_of(catalog)
        if chosen is None:
            return loaded_into(built.model, symbols, targets, catalog.versions, built.log)
        return loaded_into(built.model, run_converter(chosen, symbols), targets, None, built.log)
