"""The table of transformers' conversions, with the patterns of one model compiled and not those of all."""

from __future__ import annotations

import contextlib
import functools
import re
import types
from collections.abc import Iterator
from typing import Any

from zerostart.upstream.patches import replaced
from zerostart.upstream.registry import Lasts, Otherwise, PatchPoint, Shape, misfit
from zerostart.upstream.versions import TRANSFORMERS

__all__ = ["TOUCHED", "table_of_conversions"]

_PATTERNS = PatchPoint(
    library=TRANSFORMERS,
    owner="transformers.core_model_loading",
    names=("re",),
    why="patterns of the conversions of all models are compiled when one is asked for, and not all of them",
    lasts=Lasts.CALL,
    otherwise=Otherwise.STOCK,
    shapes=(
        Shape(
            "transformers.core_model_loading:WeightTransform.__init__",
            has=("self.compiled_sources = re.compile(...)",),
            once=("re.compile(...)",),
        ),
    ),
)
_TABLE = PatchPoint(
    library=TRANSFORMERS,
    owner="transformers.conversion_mapping",
    names=("_checkpoint_conversion_mapping_cache", "_build_checkpoint_conversion_mapping"),
    why="the table so made, out of which the conversions of a model are copied, is there for that alone",
    lasts=Lasts.CALL,
    otherwise=Otherwise.STOCK,
    shapes=(
        Shape(
            "transformers.conversion_mapping:get_checkpoint_conversion_mapping",
            has=(
                "if _checkpoint_conversion_mapping_cache is None: ...",
                "return deepcopy(_checkpoint_conversion_mapping_cache.get(M))",
            ),
        ),
    ),
)
TOUCHED = (_PATTERNS, _TABLE)


@contextlib.contextmanager
def table_of_conversions() -> Iterator[None]:
    """Inside, the library has its table of all models' conversions; what is copied out of it is compiled.

    The table that the library makes of itself has a thousand patterns, and compiling them takes a tenth of a
    second. Where that is there already, it is used.
    """
    from transformers import conversion_mapping, core_model_loading

    name = "_checkpoint_conversion_mapping_cache"
    if _differs() or getattr(conversion_mapping, name) is not None:
        yield
        return
    expressions = types.ModuleType(re.__name__)
    vars(expressions).update(vars(re), compile=_Pattern)
    with replaced(_PATTERNS, core_model_loading, "re", expressions):
        table = conversion_mapping._build_checkpoint_conversion_mapping()
    with replaced(_TABLE, conversion_mapping, name, table):
        yield


@functools.cache
def _differs() -> bool:
    """Whether the library is not as declared, and makes its table itself."""
    return bool(misfit(TOUCHED))


class _Pattern:
    """A regular expression that is compiled as soon as something of it is asked for, such as a copy."""

    __slots__ = ("_given",)

    def __init__(self, *given: Any) -> None:
        self._given = given

    def __getattr__(self, name: str) -> Any:
        return getattr(re.compile(*self._given), name)
