"""Private parts of DeepSpeed: gathered ZeRO-3 parameters that kernels for groups of experts can read.

A parameter that one rank has alone is not gathered: it is a view of DeepSpeed's one buffer of all partitions,
which lie there without a gap. Behind one of four elements in bf16 (the sinks of a small gpt_oss) all begin
beside a multiple of 16 bytes, which ``torch._grouped_mm`` refuses on CUDA, of stock models as of ours. Of
models that zerostart loaded, experts that lie so are copied when they are gathered, as on more ranks all are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from types import ModuleType
from typing import Any

from zerostart.upstream.on_import import when_imported
from zerostart.upstream.patches import RefCountedPatches, replaced
from zerostart.upstream.registry import Lasts, Otherwise, PatchPoint, misfit
from zerostart.upstream.shapes import Shape
from zerostart.upstream.versions import DEEPSPEED

_MODULE = "deepspeed.runtime.zero.partition_parameters"
_GATHER = PatchPoint(
    library=DEEPSPEED,
    owner=_MODULE,
    names=("_no_gather_coalesced",),
    why="experts that one rank has alone begin at a multiple of 16 bytes, which grouped kernels want",
    lasts=Lasts.MODEL,
    otherwise=Otherwise.STOCK,
    shapes=(
        Shape(f"{_MODULE}:_no_gather_coalesced", has=("return NoGatherCoalescedHandle(params)",)),
        Shape(
            f"{_MODULE}:Init._convert_to_deepspeed_param",
            has=("return _no_gather_coalesced(params)",),
        ),
    ),
)
TOUCHED = (_GATHER,)
#: What TMA wants of an address (CUDA's programming guide), and so the kernels that copy by it.
BYTES = 16


def aligning(is_loaded: Callable[[Any], bool]) -> RefCountedPatches:
    """What aligns gathered experts while it is held, of parameters for which ``is_loaded`` is true."""

    def enter(stack: ExitStack) -> None:
        later = stack.enter_context(ExitStack())
        stack.callback(when_imported(_MODULE, functools.partial(_imported, later, is_loaded)))

    return RefCountedPatches(enter)


def _imported(stack: ExitStack, is_loaded: Callable[[Any], bool], module: ModuleType) -> None:
    if misfit(TOUCHED):
        return
    (name,) = _GATHER.names
    stock = module.__dict__[name]

    @functools.wraps(stock)
    def gathered(params: Iterable[Any]) -> Any:
        params = list(params)
        handle = stock(params)
        for parameter in params:
            experts = len(parameter.ds_shape) > 2 and is_loaded(parameter)
            if experts and parameter.data.data_ptr() % BYTES:
                parameter.data = parameter.data.clone()
        return handle

    stack.enter_context(replaced(_GATHER, module, name, gathered))
