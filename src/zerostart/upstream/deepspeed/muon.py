"""Import DeepSpeed's Muon without torch's compiler.

DeepSpeed's start imports Muon to find out whether the optimizer is one. The import decorates functions with
``torch.compile``, which imports the compiler for a second.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
from typing import Any

from zerostart.upstream.guard import Function, Use, find_misfits
from zerostart.upstream.patches import patch

_MODULE = "deepspeed.runtime.zero.muon.original_muon"
TOUCHED = (
    Use("deepspeed.runtime.compiler", "compile", "Muon imports torch's compiler when it runs, not before"),
)


def import_muon() -> None:
    """Import Muon; its functions are compiled when one of them is called first."""
    if _MODULE in sys.modules or find_misfits(TOUCHED):
        return
    from deepspeed.runtime import compiler

    later = functools.partial(_compile_later, compiler.compile())
    with contextlib.suppress(ImportError), patch(compiler, "compile", lambda: later):
        importlib.import_module(_MODULE)


def _compile_later(compile: Function, function: Function) -> Function:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        module = sys.modules[function.__module__]
        # All at once: a compiled function calls others, which then have to be compiled.
        for name, value in list(vars(module).items()):
            if hasattr(value, "compile_now"):
                setattr(module, name, value.compile_now())
        return getattr(module, function.__name__)(*args, **kwargs)

    vars(call)["compile_now"] = lambda: compile(function)
    return call
