"""Run converters so that every tensor they make can be followed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from zerostart.errors import ConversionError
from zerostart.recipe.record import record
from zerostart.recipe.refusals import raise_refusals, refusal
from zerostart.recipe.symbolic import SymbolicTensor, materialise_constants
from zerostart.upstream.torch.tensors import asks_for_memory
from zerostart.upstream.types import Arguments, Keywords

T = TypeVar("T")


class _Recording(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it untyped
    """A mode in which torch's factories make symbolic constants."""

    #: True after a call for random numbers.
    draws = False

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Iterable[type],
        args: Arguments = (),
        kwargs: Keywords | None = None,
    ) -> Any:
        self.draws |= torch.Tag.nondeterministic_seeded in func.tags
        return record(SymbolicTensor, func, args, kwargs or {})


def trace_call(name: str, function: Callable[[], T]) -> T:
    """Run ``function``, code of the converter ``name``, on symbolic tensors.

    Raises ConversionError for an operator that cannot be followed, even if the converter catches the error,
    and for random numbers.
    """
    # Random numbers would differ from rank to rank, and between the trace and the conversion.
    randomness = torch.get_rng_state()
    # Outermost first: refusals are raised even if the converter catches them; constants that it keeps get
    # elements after recording ends; torch's factories make constants.
    recording = _Recording()  # type: ignore[no-untyped-call]
    with raise_refusals(), materialise_constants(), recording:
        try:
            result = function()
        except RuntimeError as error:
            if not asks_for_memory(error):
                raise
            first, *_ = str(error).splitlines()
            raise refusal(
                f"{name} asks for the memory of a tensor, but a conversion is traced with tensors that "
                f"have no data; leave this out of the conversion ({first})"
            ) from error
    # Other threads may draw from the same generator, such as an engine that generates text.
    is_only_thread = threading.active_count() == 1
    if (recording.draws or is_only_thread) and not torch.equal(randomness, torch.get_rng_state()):
        torch.set_rng_state(randomness)
        raise ConversionError(
            f"{name} draws random numbers, which would differ from rank to rank; leave out the "
            "tensors that it makes of them, and pass strict=False to have them initialised"
        )
    return result
