"""The layouts that a checkpoint of a diffusers model may have, and the one that fits.

A file may hold the model under its own names, under those of the original release, for which diffusers
registers a converter, and either with a prefix, beside other components. Nothing in a file says which. Each
reading is tried in turn on symbolic tensors, and the one that covers most of the model is taken, the first of
equals: so a checkpoint that merely lacks a tensor is not mistaken for one in another layout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from zerostart.errors import ConversionError
from zerostart.recipe import SymbolicTensor, Target, run_converter
from zerostart.upstream.diffusers.weights import fix_names, original_layout

Symbols = Mapping[str, SymbolicTensor]


@dataclass(frozen=True)
class Reading:
    """Tensors by the model's names, and checkpoint names that belong to other components."""

    tensors: dict[str, SymbolicTensor]
    others: tuple[str, ...] = ()


def convert(model: Any, symbols: Symbols, targets: Mapping[str, Target]) -> Reading:
    """The reading of ``symbols`` that covers most of ``targets``, by name and shape.

    Raises ConversionError if the registered converter fails and the names are not the model's own either.
    """
    best, most = Reading({}), -1
    failure: ConversionError | None = None
    for read in _readings(model, symbols):
        try:
            reading = read()
        except ConversionError as error:  # it looks up keys that a file in another layout has not
            failure = failure or error
            continue
        covered = sum(
            name in reading.tensors and tuple(reading.tensors[name].shape) == target.shape
            for name, target in targets.items()
        )
        if covered > most:
            best, most = reading, covered
        if covered == len(targets):
            break
    if failure is not None and 2 * most < len(targets):
        raise ConversionError(
            f"the checkpoint has {most} of the {len(targets)} tensors of {type(model).__name__}, and is not "
            f"in the original layout that diffusers converts: {failure}"
        ) from failure
    return best


def _readings(model: Any, symbols: Symbols) -> Iterator[Callable[[], Reading]]:
    """The ways to read the checkpoint, the plainest first."""

    def as_it_is(part: Symbols, others: tuple[str, ...] = ()) -> Reading:
        tensors = dict(part)
        fix_names(model, tensors)
        return Reading(tensors, others)

    yield lambda: as_it_is(symbols)
    converter, prefixes = original_layout(type(model))
    part, stripped, others = _component(symbols, prefixes)
    if stripped is not None:
        yield lambda: as_it_is(stripped, others)
    if converter is not None:
        yield lambda: Reading(_converted(converter, model, part), others)
        if stripped is not None:
            yield lambda: Reading(_converted(converter, model, stripped), others)


def _component(
    symbols: Symbols, prefixes: tuple[str, ...]
) -> tuple[Symbols, Symbols | None, tuple[str, ...]]:
    """The component's tensors, the same without their prefix (None if they have none), and the others."""
    prefix = next((p for p in reversed(prefixes) if any(name.startswith(p) for name in symbols)), None)
    if prefix is None:
        return symbols, None, ()
    part = {name: tensor for name, tensor in symbols.items() if name.startswith(prefix)}
    stripped = {name.removeprefix(prefix): tensor for name, tensor in part.items()}
    return part, stripped, tuple(name for name in symbols if name not in part)


def _converted(converter: Callable[..., Any], model: Any, part: Symbols) -> dict[str, SymbolicTensor]:
    """What diffusers' own converter makes of the component."""

    def convert(state_dict: dict[str, Any]) -> dict[str, Any]:
        made = converter(config=dict(model.config), checkpoint=state_dict)
        # One that looks for a key with `get` leaves None where the checkpoint has none.
        return {name: value for name, value in made.items() if value is not None}

    return run_converter(convert, part, getattr(converter, "__name__", "of diffusers"))
