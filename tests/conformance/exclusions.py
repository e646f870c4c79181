"""Identifiers that the suite leaves out, each with its reason: the one place for them.

A test tries every one of them, and fails where the reason no longer holds.
"""

from collections.abc import Mapping
from importlib.util import find_spec

_NO_CLASS = "no model type and no class of transformers has this name"
_SHADOWED = "its models have conversions under their class names, which come first; those are covered"

#: Reason by identifier.
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
#: Excluded only where these are not installed.
_LIBRARIES: Mapping[str, tuple[str, ...]] = {"timm_wrapper": ("timm", "PIL")}


def excluded(identifier: str) -> str | None:
    """Why the identifier is left out here, None if it is not."""
    libraries = _LIBRARIES.get(identifier)
    if libraries is not None and all(find_spec(name) is not None for name in libraries):
        return None
    return EXCLUDED.get(identifier)
