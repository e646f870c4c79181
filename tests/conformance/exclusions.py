"""Identifiers that the suite excludes, each with its reason.

A test tries each one, and fails if its reason no longer holds.
"""

from collections.abc import Mapping
from importlib.util import find_spec

_NO_CLASS = "no model type and no class of transformers has this name"
_SHADOWED = "its models have conversions under their class names, which come first; those are covered"

#: Reasons by identifier.
EXCLUDED: Mapping[str, str] = {
    "MtpModel": "built from a loaded main model, not from a configuration",
    "PPChart2TableModel": _NO_CLASS,
    "legacy": "applies to every model: covered by `tests/conformance/test_variants.py`",
    "mlcd": "its configurations say `mlcd_vision_model`, so that no model looks this name up",
    "mlcd_vision": _NO_CLASS,
    "pp_chart2table": "its class is `GotOcr2ForConditionalGeneration`, which has the names of `got_ocr2`",
    "qwen2_5_omni_thinker": _SHADOWED,
    "qwen3_omni_moe_thinker": _SHADOWED,
    "timm_wrapper": "needs the library timm",
    "xCLIPTextModel": _NO_CLASS,
    "xCLIPVisionModel": _NO_CLASS,
}
#: Excluded only if these libraries are not installed.
_LIBRARIES: Mapping[str, tuple[str, ...]] = {"timm_wrapper": ("timm", "PIL")}


def excluded(identifier: str) -> str | None:
    """Return the reason why the identifier is excluded; None if it is not."""
    libraries = _LIBRARIES.get(identifier)
    if libraries is not None and all(find_spec(name) is not None for name in libraries):
        return None
    return EXCLUDED.get(identifier)
