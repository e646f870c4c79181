"""Tensors lie in memory as eager torch's do, whatever was done to them before."""

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.recipe.test_bits import Tensors, differing
from zerostart.recipe import SymbolicTensor
from zerostart.recipe.recording import recorded
from zerostart.recipe.values import _ROWS_ONLY, _UNKNOWN_LAYOUT

aten = torch.ops.aten


def source() -> Tensors:
    generator = torch.Generator().manual_seed(0)
    real = torch.randn(16, 24, generator=generator)
    return {"w": real, "short": real.flip(0).bfloat16()}


def test_what_reads_memory_anew_finds_it_as_it_is() -> None:
    def convert(d: Tensors) -> Tensors:
        w, short = d["w"], d["short"]
        written = short.t().contiguous()
        written.view(torch.uint8)[0].fill_(3)
        copied = torch.empty(24, 16).copy_(w.t())
        pairs = torch.view_as_complex(copied.view(24, 8, 2))
        pairs.imag.mul_(2)
        return {
            "bytes": short.t().contiguous().view(torch.uint8),
            "same size": short.t().contiguous().view(torch.int16),
            "joined": torch.cat([short.t()]).view(torch.uint8),
            "kept": short.t()
            .to(torch.bfloat16, memory_format=torch.contiguous_format, copy=True)
            .view(torch.uint8),
            "reshaped": short.t().reshape(48, 8).view(torch.int32),
            "complex": torch.view_as_real(
                torch.view_as_complex(w.t().contiguous().reshape(-1, 2)).conj().resolve_conj()
            ),
            "inner": torch.view_as_real(
                torch.view_as_complex(w.view(16, 12, 2).permute(1, 0, 2).contiguous())
            ),
            "written": written,
            "copied": copied,
            "powers": torch.exp(w.t().contiguous()),
        }

    assert differing(convert, source()) == []


Form = Callable[[torch.Tensor], torch.Tensor]
FORMS: dict[str, Form] = {
    "rows": lambda t: t.clone(),
    "turned": lambda t: t.t(),
    "gaps": lambda t: t.repeat(1, 2)[:, ::2],
    "images": lambda t: t.reshape(1, 2, 3, 6).contiguous(memory_format=torch.channels_last),
    "three": lambda t: t.reshape(2, 3, 6).permute(2, 0, 1),
    "expanded": lambda t: t[:1].expand(6, 6),
}
#: Not for weights, or not for arguments that are made up.
LEFT_OUT = (
    *("_foreach", "_cslt", "_fused", "record", "rename", "_test", "_sparse", "_linalg_check", "_nested"),
    *("mkldnn", "_weight", "segment", "cudnn", "miopen", "quantiz", "_assert", "sym_", "_thnn", "_use_"),
    *("_cufft", "_softmax_backward", "_log_softmax_backward"),
)


def operators() -> Iterator[Any]:
    for name in dir(aten):
        packet = getattr(aten, name)
        if name.startswith(LEFT_OUT) or not hasattr(packet, "overloads"):
            continue
        for function in (getattr(packet, overload) for overload in packet.overloads()):
            if not function._schema.is_mutable and torch.Tag.nondeterministic_seeded not in function.tags:
                yield function


def arguments(
    function: Any, tensor: Callable[[int], torch.Tensor]
) -> tuple[list[Any], dict[str, Any]] | None:
    """Arguments by the operator's schema, with ``tensor`` of a number for tensors; None if it has others."""
    places: list[Any] = []
    named: dict[str, Any] = {}
    plain: dict[str, Any] = {"number": 0.37, "Scalar": 0.37, "float": 0.37, "int": 1, "bool": True}
    found = False
    for argument in function._schema.arguments:
        kind = str(argument.type)
        if kind == "Tensor":
            value: Any = tensor(len(places))
        elif kind == "List[Tensor]":
            value = [tensor(0), tensor(1)]
        elif argument.has_default_value():
            continue
        elif kind in plain or kind == "List[int]":
            value = plain.get(kind, [0, 1])
        else:
            return None
        found |= "Tensor" in kind
        if argument.kwarg_only:
            named[argument.name] = value
        else:
            places.append(value)
    return (places, named) if found else None


def lie_otherwise(function: Any, form: Form) -> bool:
    """Whether what a trace takes the strides of a result for are not those of eager torch."""
    base = torch.rand(6, 6, generator=torch.Generator().manual_seed(1)) + 0.1

    def real(number: int) -> torch.Tensor:
        return form(base + number * 0.1)

    def symbolic(number: int) -> torch.Tensor:
        like = real(number)
        return SymbolicTensor.of(str(number), tuple(like.shape), like.dtype, like.stride())

    given, traces = arguments(function, real), arguments(function, symbolic)
    if given is None or traces is None:
        return False
    try:
        eager = function(*given[0], **given[1])
        traced = recorded("the operator", lambda: function(*traces[0], **traces[1]))
    except Exception:
        return False  # no such call, or refused
    several = isinstance(eager, (tuple, list))
    pairs = zip(eager, traced, strict=True) if several else [(eager, traced)]
    return any(_differ(a, b) for a, b in pairs if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor))


def _differ(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.shape != b.shape or a.numel() < 2:
        return False
    strides = [(x, y) for x, y, size in zip(a.stride(), b.stride(), a.shape, strict=True) if size > 1]
    return a.dtype != b.dtype or any(x != y for x, y in strides)


def wrong(functions: Iterator[Any]) -> list[tuple[str, str]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        every = [(function, name) for function in functions for name in FORMS]
        return [(str(function), name) for function, name in every if lie_otherwise(function, FORMS[name])]


def test_operators_whose_strides_meta_kernels_do_not_tell() -> None:
    known = (f for f in operators() if {f, f._overloadpacket} & (_UNKNOWN_LAYOUT | _ROWS_ONLY))
    assert wrong(known) == []


@pytest.mark.slow
def test_the_strides_of_every_operator() -> None:
    assert wrong(operators()) == []
