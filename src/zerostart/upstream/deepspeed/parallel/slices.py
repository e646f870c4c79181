"""Private parts of DeepSpeed: what parameters that AutoTP has sliced say of themselves.

They say it for universal checkpoints: along which dimension, in which sizes, or as a list of strided pieces.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from zerostart.upstream.registry import Use
from zerostart.upstream.shapes import Shape
from zerostart.upstream.versions import DEEPSPEED

_LAYERS = "deepspeed.module_inject.layers"
TOUCHED = (
    Use(
        library=DEEPSPEED,
        owner=_LAYERS,
        names=("DS_AUTOTP_UC_META", "_build_param_uc_restore_meta"),
        why="what a sliced parameter says of itself: which elements of the whole one each rank has",
        shapes=(
            Shape(
                f"{_LAYERS}:_build_param_uc_restore_meta",
                takes=("partition_dim", "partition_sizes", "original_shape", "replicated", "affine_map"),
            ),
        ),
    ),
)


@dataclass(frozen=True)
class Slice:
    """Of a parameter of ``shape``: the index ranges along ``dim`` that each rank has, in order.

    ``reason``: why that cannot be told, "" where it can.
    """

    shape: tuple[int, ...]
    dim: int
    ranks: tuple[tuple[tuple[int, int], ...], ...]
    reason: str = ""


def slices_of(model: nn.Module) -> dict[str, Slice]:
    """What the parameters of a model that DeepSpeed has sliced say of themselves, aliases included."""
    from deepspeed.module_inject.layers import DS_AUTOTP_UC_META

    found: dict[str, Slice] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        said = getattr(parameter, DS_AUTOTP_UC_META, None)
        if said and not said["replicated"]:
            found[name] = _slice(said)
    return found


def _slice(said: Mapping[str, Any]) -> Slice:
    shape = tuple(said["original_shape"])
    ranks = (said["conversion"].get("affine_map") or {}).get("ranks")
    if ranks is None and said["partition_sizes"] is not None:
        return Slice(shape, said["partition_dim"], _one_after_the_other(said["partition_sizes"]))
    if ranks is None:
        return Slice(shape, 0, (), said["unsupported_reason"] or "it does not say how")
    ordered = [ranks[rank]["pieces"] for rank in sorted(ranks)]
    if any("scale" in piece or len(piece["locations"]) > 1 for pieces in ordered for piece in pieces):
        return Slice(shape, 0, (), "parts of it are on several ranks")
    rows = [[run for piece in pieces for run in _runs(piece)] for pieces in ordered]
    width = shape[1] if len(shape) > 1 else 1
    if len(shape) == 1 or all(n % width == 0 and at % width == 0 for runs in rows for _, at, n in runs):
        return Slice(
            shape, 0, tuple(_merged([(to, at // width, n // width) for to, at, n in runs]) for runs in rows)
        )
    # Columns: each row has the same ones.
    first = [[(to, at, n) for to, at, n in runs if at < width] for runs in rows]
    return Slice(shape, 1, tuple(_merged(runs) for runs in first))


def _one_after_the_other(sizes: Any) -> tuple[tuple[tuple[int, int], ...], ...]:
    ends = [sum(sizes[: rank + 1]) for rank in range(len(sizes))]
    return tuple(((end - n, end),) if n else () for n, end in zip(sizes, ends, strict=True))


def _runs(piece: Mapping[str, Any]) -> Iterator[tuple[int, int, int]]:
    """A piece as unbroken runs of the row-major order: place in the slice, first element, and count."""
    shape, (at, strides), (to, places) = piece["shape"], piece["source"], piece["dest"]
    if 0 in shape:
        return
    split, step = len(shape), 1
    while split and (shape[split - 1] == 1 or strides[split - 1] == places[split - 1] == step):
        split -= 1
        step *= shape[split]
    starts = [(to, at)]
    for size, source, place in zip(shape[:split], strides, places, strict=False):
        starts = [(t + i * place, a + i * source) for t, a in starts for i in range(size)]
    yield from ((t, a, step) for t, a in starts)


def _merged(runs: list[tuple[int, int, int]]) -> tuple[tuple[int, int], ...]:
    """Runs as index ranges, in the order in which they lie in the slice; neighbours are one."""
    found: list[tuple[int, int]] = []
    for _, first, count in sorted(runs):
        if found and found[-1][1] == first:
            found[-1] = (found[-1][0], first + count)
        elif count:
            found.append((first, first + count))
    return tuple(found)
