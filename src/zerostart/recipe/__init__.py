"""Recipes: the checkpoint elements of each model parameter, and the names without a counterpart."""

from zerostart.recipe import operators as _operators  # noqa: F401  # registers the operators
from zerostart.recipe.dtypes import main_dtype, spelling, torch_dtype
from zerostart.recipe.recipe import Coverage, Recipe, Recipes, Target
from zerostart.recipe.recording import recorded
from zerostart.recipe.scales import dequantised_symbols
from zerostart.recipe.stored import symbols_of
from zerostart.recipe.symbolic import SymbolicTensor, settled
from zerostart.recipe.trace import assembled, loaded_into, matched, one_thread, run_converter
from zerostart.recipe.values import Computed, Value, leaves_of

__all__ = [
    "Computed",
    "Coverage",
    "Recipe",
    "Recipes",
    "SymbolicTensor",
    "Target",
    "Value",
    "assembled",
    "dequantised_symbols",
    "loaded_into",
    "main_dtype",
    "matched",
    "leaves_of",
    "one_thread",
    "recorded",
    "run_converter",
    "settled",
    "spelling",
    "symbols_of",
    "torch_dtype",
]
