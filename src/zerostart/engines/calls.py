"""Keep an engine's hooks from changing the arguments and tensors of module calls.

ZeRO-3 and FSDP2 gather parameters in hooks around a module's forward, and rebuild lists and dicts among the
arguments. Code that changes such an argument in place (the feature caches of video VAEs) would change a copy.
Parameters gathered under ``torch.inference_mode()`` are inference tensors, which remain in the engine and
fail in the next backward.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import torch

#: A container of the caller, the engine's copy of it, and the first contents of the copy.
Rebuilt = tuple[Any, Any, Any]


def has_containers(values: Any) -> bool:
    """True if a list or a dict is among ``values``, or in tuples there."""
    return any(
        isinstance(value, (list, dict)) or (isinstance(value, tuple) and has_containers(value))
        for value in values
    )


class OutsideInferenceMode:
    """Leaves ``torch.inference_mode()``, without gradients, until ``close``.

    Inference tensors may not be changed in place outside. Modules receive copies, and changes of these are
    copied back in the end.
    """

    def __init__(self) -> None:
        self._left = ExitStack()
        # The order matters: outside of inference mode gradients would be on.
        self._left.enter_context(torch.inference_mode(False))
        self._left.enter_context(torch.no_grad())
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []

    def ordinary(self, value: object) -> object:
        """Return ``value``, or a copy of it if it is an inference tensor."""
        if not isinstance(value, torch.Tensor) or not value.is_inference():
            return value
        self._copies.append((value, value.clone()))
        return self._copies[-1][1]

    def close(self) -> None:
        """Enter ``torch.inference_mode()`` again."""
        self._left.close()
        for value, copy in self._copies:
            # Version 0: nobody has written to the copy, and the input needs no copy back.
            if copy._version:
                value.copy_(copy)


def leave_inference_mode(
    args: tuple[object, ...], kwargs: dict[str, object]
) -> tuple[OutsideInferenceMode | None, tuple[object, ...], dict[str, object]]:
    """Leave ``torch.inference_mode()`` for a call, and return arguments for it.

    ``close`` of the first result enters the mode again; None if this thread is not in it.
    """
    if not torch.is_inference_mode_enabled():
        return None, args, kwargs
    outside = OutsideInferenceMode()
    return (
        outside,
        tuple(map(outside.ordinary, args)),
        {key: outside.ordinary(v) for key, v in kwargs.items()},
    )


def find_rebuilt(original: object, handed: object) -> Iterator[Rebuilt]:
    """Yield the containers of ``given`` that ``handed`` copies at the same place, outermost first."""
    if isinstance(original, dict) and isinstance(handed, dict):
        if original is not handed:
            yield original, handed, dict(handed)
        for key in original.keys() & handed.keys():
            yield from find_rebuilt(original[key], handed[key])
    elif (
        isinstance(original, (list, tuple))
        and type(original) is type(handed)
        and len(original) == len(handed)
    ):
        if isinstance(original, list) and original is not handed:
            yield original, handed, list(handed)
        for one, other in zip(original, handed, strict=True):
            yield from find_rebuilt(one, other)


def write_back(pairs: list[Rebuilt]) -> None:
    """Write what changed in copies of containers back to the caller's own containers."""
    for given, handed, before in pairs:
        if isinstance(given, dict):
            # By identity, not equality: tensors have no truth value, and the order of keys counts.
            if list(handed) == list(before) and all(handed[key] is before[key] for key in before):
                continue
            own = {id(before[key]): given[key] for key in before}
            changed = {key: own.get(id(value), value) for key, value in handed.items()}
            given.clear()
            given.update(changed)
        elif len(handed) != len(before) or any(a is not b for a, b in zip(handed, before, strict=True)):
            own = {id(copy): mine for copy, mine in zip(before, given, strict=True)}
            given[:] = [own.get(id(value), value) for value in handed]
