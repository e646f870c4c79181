"""The recipes of a model that is there, as a load finds them."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from zerostart.checkpoint.catalog import Catalog
from zerostart.models import Built, library_of
from zerostart.models.operator_log import OperatorLog
from zerostart.recipe import Recipes, Target


def trace(catalog: Catalog, model: nn.Module, targets: Mapping[str, Target], converter: Any) -> Recipes:
    built = Built(model, OperatorLog(), None, False, library_of(model))
    return built.recipes(catalog, targets, converter)
