"""Recipes: which checkpoint elements make up each model parameter, and what neither side accounts for."""

from zerostart.recipe import operators as _operators  # noqa: F401  # registers the operators
from zerostart.recipe.computed import BLOCK, Computed, Cut, Operand
from zerostart.recipe.coverage import Coverage
from zerostart.recipe.dtypes import main_dtype, spelling, torch_dtype
from zerostart.recipe.recipe import Recipe, Recipes, Target
from zerostart.recipe.symbolic import SymbolicTensor
from zerostart.recipe.threads import one_thread
from zerostart.recipe.trace import trace

__all__ = [
    "BLOCK",
    "Computed",
    "Coverage",
    "Cut",
    "Operand",
    "Recipe",
    "Recipes",
    "SymbolicTensor",
    "Target",
    "main_dtype",
    "one_thread",
    "spelling",
    "torch_dtype",
    "trace",
]
