"""Inverted recipes, compared with converters on element numbers; tilings against counting."""

import random
from collections.abc import Callable
from math import prod

import pytest
import torch

from zerostart import geometry
from zerostart.checkpoint.catalog import TensorEntry
from zerostart.geometry.tiling import Strided, tiles
from zerostart.recipe import Recipe, SymbolicTensor, Target
from zerostart.recipe.inverse import find_reversible, invert_pieces
from zerostart.recipe.recipe import Coverage

Tensors = dict[str, torch.Tensor]
Convert = Callable[[Tensors], Tensors]

#: Converters with the shapes of their inputs, and whether each element is used once.
CASES: dict[str, tuple[Convert, dict[str, tuple[int, ...]], bool]] = {
    "as it is": (lambda t: {"w": t["a"]}, {"a": (3, 4)}, True),
    "transposed": (lambda t: {"w": t["a"].t()}, {"a": (3, 4)}, True),
    "fused": (
        lambda t: {"w": torch.cat([torch.stack([t["a"], t["b"]]), torch.stack([t["c"], t["d"]])], dim=1)},
        dict.fromkeys("abcd", (3, 4)),
        True,
    ),
    "rotated halves": (
        lambda t: {"w": t["a"].view(3, 2, 2, 5).transpose(1, 2).reshape(12, 5)},
        {"a": (12, 5)},
        True,
    ),
    "three in one": (
        lambda t: {n: t["a"].view(4, 3, 2, 5)[:, k].reshape(8, 5) for k, n in enumerate("qkv")},
        {"a": (24, 5)},
        True,
    ),
    "columns in turn": (lambda t: {"u": t["a"][:, 0::2], "v": t["a"][:, 1::2]}, {"a": (3, 8)}, True),
    "uneven parts": (lambda t: dict(zip("uvw", t["a"].split([1, 4, 2]), strict=True)), {"a": (7, 3)}, True),
    "a part": (lambda t: {"w": t["a"][:2]}, {"a": (3, 4)}, False),
    "twice": (lambda t: {"w": torch.cat([t["a"], t["a"]])}, {"a": (3, 4)}, False),
    "spread": (lambda t: {"w": t["a"].expand(3, 4)}, {"a": (1, 4)}, False),
    "shared": (lambda t: {"u": t["a"], "v": t["a"].t()}, {"a": (3, 4)}, False),
    "calculated": (lambda t: {"w": t["a"] * 2}, {"a": (3, 4)}, False),
    "constant beside": (lambda t: {"w": torch.cat([t["a"], torch.zeros(1, 4)])}, {"a": (3, 4)}, False),
}


def _traced(convert: Convert, shapes: dict[str, tuple[int, ...]]) -> dict[str, SymbolicTensor]:
    symbols: Tensors = {n: SymbolicTensor.of(n, shape, torch.float32) for n, shape in shapes.items()}
    return convert(symbols)  # type: ignore[return-value]  # symbolic tensors come out as they went in


@pytest.mark.parametrize("case", CASES)
def test_reversal(case: str) -> None:
    """Recipes that use every element once are reversible."""
    convert, shapes, whole = CASES[case]
    stored = {n: TensorEntry(n, "F32", shape, 0, 0, 4 * prod(shape)) for n, shape in shapes.items()}
    if case == "constant beside":
        result = {"w": SymbolicTensor.of("a", (3, 4), torch.float32)[:2]}
    else:
        result = _traced(convert, shapes)  # type: ignore[assignment]
    recipes = {n: Recipe(Target(n, tuple(t.shape), t.dtype), t.value.pieces) for n, t in result.items()}
    actual = find_reversible(recipes, stored)
    assert (set(actual.recipes) == set(recipes)) is whole
    assert set(actual.reasons) == (set() if whole else set(recipes))


@pytest.mark.parametrize("case", [case for case, (_, _, whole) in CASES.items() if whole])
def test_inverted(case: str) -> None:
    """Pieces of an inverse give the element numbers that the converter took."""
    convert, shapes, _ = CASES[case]
    result = _traced(convert, shapes)
    files = {n: (tuple(t.shape), t.value.pieces) for n, t in result.items()}
    back = invert_pieces(files, shapes)
    assert back.keys() == shapes.keys()
    numbers, total = {}, 0
    for name, shape in shapes.items():
        numbers[name] = torch.arange(total, total + prod(shape)).view(shape)
        total += prod(shape)
    converted = {name: t.contiguous().view(-1).clone() for name, t in convert(numbers).items()}
    for name, pieces in back.items():
        shape = shapes[name]
        actual = torch.full((prod(shape),), -1)
        box, strides = geometry.Box((0,) * len(shape), shape), geometry.row_major_strides(shape)
        for piece in pieces:
            for copy in geometry.copies_between(piece, box, 0, strides):
                sizes = [n for n, _, _ in copy.loops]
                source = converted[str(copy.source)].as_strided(
                    sizes, [s for _, s, _ in copy.loops], copy.start
                )
                actual.as_strided(sizes, [d for _, _, d in copy.loops], copy.to).copy_(source)
        assert torch.equal(actual.view(shape), numbers[name])


def _fragments(rng: random.Random) -> tuple[list[Strided], int]:
    """Return fragments of a randomly split range, some of them moved or left out."""
    sizes = [rng.randint(1, 4) for _ in range(rng.randint(1, 4))]
    strides = geometry.row_major_strides(sizes)
    parts: list[Strided] = [(0, tuple(zip(sizes, strides, strict=True)))]
    for _ in range(rng.randint(0, 4)):
        start, loops = parts.pop(rng.randrange(len(parts)))
        if not loops:
            parts.append((start, loops))
            continue
        at = rng.randrange(len(loops))
        (size, stride), rest = loops[at], (*loops[:at], *loops[at + 1 :])
        window = rng.randint(0, size)
        parts += [(start, (*rest, (window, stride)))] if window else []
        parts += [(start + window * stride, (*rest, (size - window, stride)))] if window < size else []
    if rng.random() < 0.5:
        at = rng.randrange(len(parts))
        start, loops = parts[at]
        parts[at] = (max(0, start + rng.choice([-1, 0, 1, 2])), loops)
    return parts, prod(sizes)


def test_tilings_against_counting() -> None:
    """Decisions on integers equal counting every address."""
    rng = random.Random(11)
    answers = []
    for _ in range(3000):
        parts, count = _fragments(rng)
        visited: list[int] = []
        for start, loops in parts:
            places = [start]
            for size, stride in loops:
                places = [p + i * stride for p in places for i in range(size)]
            visited += places
        expected = sorted(visited) == list(range(count))
        assert tiles(parts, count) is expected, (parts, count)
        answers.append(expected)
    assert 500 < sum(answers) < 2900


# Names that a model ignores by patterns.


def test_patterns_stand_for_themselves() -> None:
    """Flags and references to groups keep their meaning in each pattern."""
    coverage = Coverage(("Head.BIAS", "a.b.a", "a.b.c"), ("old.bias",))
    remaining = coverage.ignoring([r"x", r"(?i)bias$", r"^(\w)\.\w\.\1$"], [r"(?i)OLD"])
    assert remaining.missing == ("a.b.c",)
    assert remaining.unexpected == ()
    assert remaining.ignored == ("Head.BIAS", "a.b.a", "old.bias")
    assert coverage.ignoring([], []) == coverage
