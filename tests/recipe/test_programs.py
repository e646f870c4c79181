"""Random converters, traced and loaded in shards, against eager torch: the same bits, or one named error.

Programs are numbered, so that a failure is a number; its converter is printed. They are drawn by
``programs.draw_program``, and each is run as a callable, as an operation in a list of transformers
conversions, or line by line.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import pytest
import torch

from tests.recipe.lists import convert_with
from tests.recipe.programs import Program, draw_program, quiet
from tests.recipe.shards import compare, module_with, symbols_of
from tests.recipe.tracing import trace
from zerostart.checkpoint.memory import memory_catalog
from zerostart.errors import ConversionError
from zerostart.recipe import Recipe, Target
from zerostart.recipe.recording import recorded

Traced = Callable[[Program, Mapping[str, torch.Tensor]], Mapping[str, Recipe]]

CHUNKS = (64, 256, 1024, 1 << 16)
#: Of the programs that ask for no values, how many may be refused.
MOST_REFUSED = 0.05


def as_callable(program: Program, expected: Mapping[str, torch.Tensor]) -> Mapping[str, Recipe]:
    """The recipes of the program as a caller's converter."""
    targets = {name: Target(name, tuple(t.shape), t.dtype) for name, t in expected.items()}
    model = module_with(expected)
    return trace(memory_catalog(program.sources, (0,)), model, targets, program.converter()).by_name


def as_list(program: Program, expected: Mapping[str, torch.Tensor]) -> Mapping[str, Recipe]:
    """The recipes of the program as an operation in a list of transformers conversions."""
    return convert_with(program.converter(), program.sources, expected)


def refused(program: Program, traced: Traced) -> str:
    """Why the program was refused; empty if it was not, and every shard of what it makes is right."""
    expected = program.eager()
    try:
        with quiet():
            made = traced(program, expected)
        world, chunk = 1 + program.seed % 5, CHUNKS[program.seed % len(CHUNKS)]
        compare(made, expected, program.sources, world, chunk)
    except ConversionError as error:
        return str(error)
    except Exception as error:
        raise AssertionError(f"program {program.seed}:\n{program.text}") from error
    return ""


def check(programs: Iterable[Program], traced: Traced) -> None:
    """Every program is right, and few are refused; none because something fails that eager torch does."""
    reasons = [refused(program, traced) for program in programs]
    found = [reason for reason in reasons if reason]
    assert len(found) <= MOST_REFUSED * len(reasons), found
    assert not [reason for reason in found if "failed:" in reason or "cannot be traced" in reason]


def callables(seeds: range) -> Iterator[Program]:
    """Programs on tensors of any dtypes."""
    return (draw_program(seed) for seed in seeds)


def operations(seeds: range) -> Iterator[Program]:
    """Programs on tensors of one dtype, which transformers casts all to."""
    for seed in seeds:
        dtype = (torch.float32, torch.bfloat16, torch.complex64)[seed % 3]
        program = draw_program(seed, dtype=dtype)
        if any(tensor.dtype == dtype for tensor in program.eager().values()):
            yield program


def check_layouts(seed: int) -> None:
    """Run a program line by line: every tensor lies in memory as eager torch has it."""
    program = draw_program(seed)
    eager = program.variables({name: tensor.clone() for name, tensor in program.sources.items()})
    traced = program.variables(symbols_of(program.sources))

    def run() -> None:
        for line in program.lines:
            exec(line, traced)

    with quiet():
        for line in program.lines:
            exec(line, eager)
        try:
            recorded("the converter", run)
        except ConversionError:
            return
    for name, tensor in eager.items():
        if name[0] == "v" and isinstance(tensor, torch.Tensor):
            assert layout(traced[name]) == layout(tensor), f"{name} of program {seed}:\n{program.text}"


def layout(t: torch.Tensor) -> Any:
    sizes = tuple(t.shape), t.dtype, t.storage_offset()
    if not t.numel():
        return sizes
    strides = [stride for size, stride in zip(t.shape, t.stride(), strict=True) if size > 1]
    return sizes, strides, t.is_contiguous(), t.is_conj(), t.is_neg()


def check_reading(seed: int) -> None:
    """A program that asks for values or memory is refused, or, where it asks its own constants, right."""
    refused(draw_program(seed, reads=True), as_callable)


def test_callables_give_what_eager_torch_gives() -> None:
    check(callables(range(25)), as_callable)


def test_operations_in_a_list_give_what_eager_torch_gives() -> None:
    check(operations(range(25)), as_list)


def test_tensors_lie_in_memory_as_those_of_eager_torch() -> None:
    for seed in range(1000, 1030):
        check_layouts(seed)


def test_what_asks_for_values_or_memory_is_refused_or_right() -> None:
    for seed in range(2000, 2030):
        check_reading(seed)


@pytest.mark.slow
@pytest.mark.parametrize("block", range(10))
def test_a_thousand_callables(block: int) -> None:
    check(callables(range(10_000 + 100 * block, 10_100 + 100 * block)), as_callable)


@pytest.mark.slow
@pytest.mark.parametrize("block", range(10))
def test_five_hundred_operations_in_lists(block: int) -> None:
    check(operations(range(20_000 + 50 * block, 20_050 + 50 * block)), as_list)


@pytest.mark.slow
def test_five_hundred_programs_line_by_line() -> None:
    for seed in range(30_000, 30_500):
        check_layouts(seed)


@pytest.mark.slow
def test_five_hundred_programs_that_ask_for_values_or_memory() -> None:
    for seed in range(40_000, 40_500):
        check_reading(seed)
