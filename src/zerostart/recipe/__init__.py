"""Recipes: the checkpoint elements of each model parameter, and the names without a counterpart."""

from zerostart.recipe import operators as _operators  # noqa: F401  # registers the operators
from zerostart.recipe.dtypes import main_dtype, spelling, torch_dtype
from zerostart.recipe.recipe import Coverage, Recipe, Recipes, Target
from zerostart.recipe.recording import trace_call
from zerostart.recipe.scales import dequantise_symbols
from zerostart.recipe.stored import CheckpointSymbols
from zerostart.recipe.symbolic import SymbolicTensor, snapshot
from zerostart.recipe.trace import assemble_recipes, match_names, one_thread, run_converter, trace_loading
from zerostart.recipe.values import Computed, Value, find_leaves

__all__ = [
    "Computed",
    "Coverage",
    "Recipe",
    "Recipes",
    "SymbolicTensor",
    "Target",
    "Value",
    "assemble_recipes",
    "dequantise_symbols",
    "trace_loading",
    "main_dtype",
    "match_names",
    "find_leaves",
    "one_thread",
    "trace_call",
    "run_converter",
    "snapshot",
    "spelling",
    "CheckpointSymbols",
    "torch_dtype",
]
