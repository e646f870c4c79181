"""Code that lies beside a checkpoint (transformers' ``auto_map``): run only where the caller has said so."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

__all__ = ["class_beside", "unasked"]

_MODULE = "transformers.dynamic_module_utils"
_SECONDS = "TIME_OUT_REMOTE_CODE"


@contextlib.contextmanager
def unasked() -> Iterator[None]:
    """Inside, transformers refuses code of a checkpoint where it would ask on the terminal whether to run it.

    That is what it does itself where the time to answer is set to nothing. A script that is fed from a pipe
    has no user to ask, and a ``y`` that is meant for something else is no consent.
    """
    module: Any = sys.modules.get(_MODULE)
    if module is None or not hasattr(module, _SECONDS):
        yield
        return
    before = getattr(module, _SECONDS)
    setattr(module, _SECONDS, 0)
    try:
        yield
    finally:
        setattr(module, _SECONDS, before)


def class_beside(config: Any, root: str) -> type | None:
    """The class of the model in the code in ``root``, as its configuration names it; this runs the code.

    None where the configuration names none. Only for a caller who trusts the checkpoint.
    """
    named = getattr(config, "auto_map", None)
    if not isinstance(named, dict):
        return None
    wanted = list(getattr(config, "architectures", None) or ())
    classes = {key: value for key, value in named.items() if key.startswith("AutoModel")}
    fitting = [v for v in classes.values() if isinstance(v, str) and v.rpartition(".")[2] in wanted]
    reference = next(iter(fitting or [v for v in classes.values() if isinstance(v, str)]), None)
    if reference is None:
        return None
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    found = get_class_from_dynamic_module(reference, root)
    return found if isinstance(found, type) else None
