"""Models without weights: built on meta, with a source for every tensor before sharding."""

from zerostart.models.aliases import Alias, Aliases, replace_tensor, state_names
from zerostart.models.build import (
    ModelLike,
    build,
    build_fresh,
    cast_parameters,
    existing_origins,
    existing_recipes,
    fresh_origins,
    has_values,
    import_code,
    import_model,
    move_to_meta,
    named_tensors,
    needs_config,
    report_castable_parameters,
    set_dtypes,
)
from zerostart.models.initialise import Program, fill_missing
from zerostart.models.library import (
    Attention,
    BuildRequest,
    Built,
    Construction,
    Converter,
    ModelLibrary,
    OwnLoading,
)
from zerostart.models.operator_log import OperatorLog
from zerostart.models.origins import Origins, resolve_origins, tie_names
from zerostart.models.registry import (
    library_in,
    library_of,
    model_library_names,
    recognise_tensors,
    register_model_library,
)

__all__ = [
    "Alias",
    "Aliases",
    "Attention",
    "BuildRequest",
    "Built",
    "Construction",
    "Converter",
    "ModelLibrary",
    "ModelLike",
    "OperatorLog",
    "Origins",
    "OwnLoading",
    "Program",
    "build",
    "build_fresh",
    "cast_parameters",
    "existing_origins",
    "existing_recipes",
    "fill_missing",
    "fresh_origins",
    "has_values",
    "import_code",
    "import_model",
    "library_in",
    "library_of",
    "model_library_names",
    "move_to_meta",
    "named_tensors",
    "needs_config",
    "recognise_tensors",
    "register_model_library",
    "replace_tensor",
    "report_castable_parameters",
    "resolve_origins",
    "set_dtypes",
    "state_names",
    "tie_names",
]
