"""What an engine's hooks would do to a call of a module beside their own work, and how it is kept from them.

ZeRO-3 and FSDP2 gather parameters in hooks around a module's forward, and rebuild lists and dicts among the
arguments on the way. Code that changes such an argument in place (the feature caches of video VAEs) would
then change a copy. And what is gathered under ``torch.inference_mode()`` are inference tensors, which stay
in the engine's hands and fail in the next backward.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import torch

#: A container of the caller's, the engine's copy of it, and what the copy held when it was handed on.
Rebuilt = tuple[Any, Any, Any]


def has_containers(values: Any) -> bool:
    """Whether a list or a dict is among ``values``, or within tuples there."""
    return any(
        isinstance(value, (list, dict)) or (isinstance(value, tuple) and has_containers(value))
        for value in values
    )


class OutsideInferenceMode:
    """Leaves ``torch.inference_mode()``, without gradients, until ``close`` is called.

    Inputs from inside it may not be changed in place out here: modules get copies, and what they do to these
    is done to the inputs in the end.
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
    """Leave ``torch.inference_mode()`` for a call with these arguments, and the arguments for it.

    Closing what is returned first enters the mode again; None where this thread is not in it.
    """
    if not torch.is_inference_mode_enabled():
        return None, args, kwargs
    left = OutsideInferenceMode()
    return left, tuple(map(left.ordinary, args)), {key: left.ordinary(v) for key, v in kwargs.items()}


def rebuilt(given: object, handed: object) -> Iterator[Rebuilt]:
    """The containers among ``given`` of which ``handed`` has a copy in the same place, outermost first."""
    if isinstance(given, dict) and isinstance(handed, dict):
        if given is not handed:
            yield given, handed, dict(handed)
        for key in given.keys() & handed.keys():
            yield from rebuilt(given[key], handed[key])
    elif isinstance(given, (list, tuple)) and type(given) is type(handed) and len(given) == len(handed):
        if isinstance(given, list) and given is not handed:
            yield given, handed, list(handed)
        for one, other in zip(given, handed, strict=True):
            yield from rebuilt(one, other)


def write_back(pairs: list[Rebuilt]) -> None:
    """Write what changed in copies of containers back to the caller's own containers."""
    for given, handed, before in pairs:
        if isinstance(given, dict):
            # By identity, not equality: tensors have no truth value, and their order counts.
            if list(handed) == list(before) and all(handed[key] is before[key] for key in before):
                continue
            own = {id(before[key]): given[key] for key in before}
            changed = {key: own.get(id(value), value) for key, value in handed.items()}
            given.clear()
            given.update(changed)
        elif len(handed) != len(before) or any(a is not b for a, b in zip(handed, before, strict=True)):
            own = {id(copy): mine for copy, mine in zip(before, given, strict=True)}
            given[:] = [own.get(id(value), value) for value in handed]
