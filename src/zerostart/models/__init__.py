"""Models without their weights: built on meta, every tensor's origin settled before anything is sharded."""

from zerostart.models.aliases import Alias, Aliases
from zerostart.models.build import ModelLike, build, from_config, require
from zerostart.models.dtypes import let_cast, set_dtypes
from zerostart.models.initialise import Program, fill_missing
from zerostart.models.library import (
    Attention,
    Built,
    Construction,
    Converter,
    ModelLibrary,
    OwnLoading,
    Stored,
)
from zerostart.models.origins import Origins, resolve_origins, tie_names
from zerostart.models.registry import library_in, library_of, model_library_names, register_model_library
from zerostart.models.tensors import replace_tensor, state_names

__all__ = [
    "Alias",
    "Aliases",
    "Attention",
    "Built",
    "Construction",
    "Converter",
    "ModelLibrary",
    "ModelLike",
    "Origins",
    "OwnLoading",
    "Program",
    "Stored",
    "build",
    "fill_missing",
    "from_config",
    "let_cast",
    "library_in",
    "library_of",
    "model_library_names",
    "register_model_library",
    "replace_tensor",
    "require",
    "resolve_origins",
    "set_dtypes",
    "state_names",
    "tie_names",
]
