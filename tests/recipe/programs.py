"""Random converters as source text, made while eager torch runs them.

Each line is drawn to fit the tensors that eager torch has at that point, and is kept if eager torch has no
error with it. So a program is a converter as a user might write it, and its failures can be read.
"""

import copy
import random
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import einops
import numpy as np
import torch

from tests.recipe.program_lines import LINES, READS, Draw

Tensors = dict[str, torch.Tensor]
MOST_ELEMENTS = 3000
SOURCES: tuple[tuple[tuple[int, ...], torch.dtype], ...] = (
    ((8, 6), torch.float32),
    ((6, 8), torch.bfloat16),
    ((4, 4, 3), torch.float32),
    ((12,), torch.float16),
    ((2, 3, 4, 2), torch.float32),
    ((4, 6), torch.complex64),
    ((5, 7), torch.int32),
    ((16, 10), torch.float32),
    ((6, 8), torch.float64),
    ((9,), torch.complex64),
)


@dataclass
class Program:
    """A converter: ``lines`` that work on the variables ``v0``, ``v1``... and the names of its results."""

    seed: int
    sources: Tensors
    lines: list[str] = field(default_factory=list)
    results: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The converter as Python."""
        shapes = [f"# {name}: {tuple(t.shape)} {t.dtype}" for name, t in self.sources.items()]
        given = [f"v{n} = d['{name}']" for n, name in enumerate(self.sources)]
        returned = "return {" + ", ".join(f"'{r}': {r}" for r in self.results) + "}"
        return "\n".join(["def convert(d):", *(f"    {x}" for x in [*shapes, *given, *self.lines, returned])])

    def converter(self) -> Callable[[Mapping[str, torch.Tensor]], Tensors]:
        """The converter as a function from state dict to state dict."""
        space = _modules()
        exec(self.text, space)
        found: Callable[[Mapping[str, torch.Tensor]], Tensors] = space["convert"]
        return found

    def eager(self) -> Tensors:
        """What eager torch makes of the sources."""
        with quiet():
            made = self.converter()({name: tensor.clone() for name, tensor in self.sources.items()})
            return {name: tensor.resolve_conj().resolve_neg().clone() for name, tensor in made.items()}

    def variables(self, sources: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """What the lines work on, before the first of them."""
        return _modules() | {f"v{n}": tensor for n, tensor in enumerate(sources.values())}


class quiet(warnings.catch_warnings):  # a context manager, by the name that reads best
    """Inside, no gradients and no warnings; what torch says it will refuse some day is an error."""

    def __enter__(self) -> None:  # type: ignore[override]
        super().__enter__()
        warnings.simplefilter("ignore")
        warnings.filterwarnings("error", "An output with one or more elements was resized")
        self._no_grad = torch.no_grad()
        self._no_grad.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._no_grad.__exit__(*error)
        super().__exit__(*error)


def draw_program(seed: int, *, reads: bool = False, dtype: torch.dtype | None = None) -> Program:
    """The program number ``seed``.

    With ``reads`` it asks once for values, memory or addresses too; ``dtype`` is that of all sources.
    """
    rng = random.Random(seed)
    chosen = rng.sample(SOURCES, rng.randint(1, 3))
    sources = {f"s{n}": _tensor(seed * 10 + n, shape, dtype or own) for n, (shape, own) in enumerate(chosen)}
    made = Program(seed, sources)
    draw = Draw(rng, _started(made), len(sources))
    wanted = rng.randint(2, 12)
    reading_at = rng.randrange(wanted) if reads else -1
    while len(made.lines) < wanted and draw.tries < 200:
        line = draw.line(READS if len(made.lines) == reading_at else LINES)
        if line is None:
            continue
        if _runs(line, draw.space):
            made.lines.append(line)
            draw.next_name(line)
        else:  # it may have changed something before it failed
            draw.space = _started(made)
    made.results = _results(rng, draw.space)
    return made


def _tensor(number: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Small numbers that every dtype here can hold."""
    generator = torch.Generator().manual_seed(number)
    made = torch.randint(-31, 32, shape, generator=generator).to(torch.float32) / 8
    if dtype.is_complex:
        return torch.complex(made, made.flip(0) + 0.5).to(dtype)
    return made.to(dtype)


def _modules() -> dict[str, Any]:
    return {"torch": torch, "np": np, "einops": einops, "copy": copy, "F": torch.nn.functional}


def _started(made: Program) -> dict[str, Any]:
    """The variables after the lines that the program has so far."""
    space = made.variables({name: tensor.clone() for name, tensor in made.sources.items()})
    assert all(_runs(line, space) for line in made.lines)
    return space


def _runs(line: str, space: dict[str, Any]) -> bool:
    """Whether eager torch takes the line."""
    with quiet():
        try:
            exec(line, space)
        except (RuntimeError, TypeError, ValueError, IndexError, ArithmeticError, BufferError, UserWarning):
            return False
    return True


def _results(rng: random.Random, space: dict[str, Any]) -> list[str]:
    """The last tensor and some of the others; views of each other, and sources, may be among them."""
    named = [
        name
        for name, value in space.items()
        if name[0] == "v" and isinstance(value, torch.Tensor) and 0 < value.numel() <= MOST_ELEMENTS
    ]
    others = rng.sample(named, min(len(named), rng.randint(1, 3)))
    return sorted({named[-1], *others}, key=lambda name: int(name[1:]))
