"""Random plain modules against ``load_state_dict`` of the unsharded one: equal, or refused as that is."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import nn

import zerostart
from tests.identity.random_modules import WIDTH, RandomModule, checkpoint, module
from tests.ranks import run_ranks

ENGINES = (("fsdp2", 3), ("deepspeed", 3), ("deepspeed", 2), ("fsdp2", 0))
FAST, SLOW = 12, 300


def expected(number: int) -> tuple[RandomModule, list[str]]:
    """The module loaded by torch, and what its strict load would complain of.

    A tensor with several names counts as there if one of them is: checkpoints store it once.
    """
    torch.manual_seed(0)
    model = RandomModule(number)
    tensors = {**dict(model.named_parameters(remove_duplicate=False)), **model.state_dict(keep_vars=True)}
    state = checkpoint(number)
    keys = model.load_state_dict(state, strict=False)
    supplied = {id(t) for name, t in tensors.items() if name in state}
    lacking = [name for name in keys.missing_keys if id(tensors[name]) not in supplied]
    return model.eval(), [*lacking, *keys.unexpected_keys]


@contextlib.contextmanager
def whole(model: nn.Module, engine: str, zero_stage: int) -> Iterator[None]:
    """Inside, a forward of ``model`` can run without the engine around it."""
    if engine == "deepspeed" and zero_stage == 3:
        import deepspeed

        with deepspeed.zero.GatheredParameters(list(model.parameters())):
            yield
    else:
        yield


def compare(number: int, engine: str, zero_stage: int) -> tuple[bool, list[str]]:
    """Whether the load was refused, and one line for each difference."""
    reference, open_names = expected(number)
    where = f"module {number} on {engine} {zero_stage}"
    try:
        model: Any = zerostart.load(
            checkpoint(number), module(number), engine=engine, zero_stage=zero_stage, progress=False
        )
    except zerostart.ZerostartError as error:
        named = open_names and all(name in str(error) for name in open_names[:8])
        return True, [] if named else [f"{where}: {error}"]
    if open_names:
        return False, [f"{where} was loaded without {open_names}"]
    lines = [f"{where}: {line}" for line in model.strangers()]
    found = dict(zerostart.full_tensors(model, rank=None))
    found |= dict(model.named_buffers(remove_duplicate=False))
    wanted = {**reference.state_dict(), **dict(reference.named_buffers(remove_duplicate=False))}
    for name, t in wanted.items():
        if not torch.equal(found[name], t):  # type: ignore[arg-type]  # every rank has all
            lines.append(f"{where}: {name} differs")
    x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(1))
    with whole(model, engine, zero_stage), torch.no_grad():
        if not torch.equal(model(x), reference(x)):
            lines.append(f"{where}: the forward differs")
    return False, lines


def compare_all(numbers: Sequence[int]) -> tuple[int, list[str]]:
    """How many loads were refused, and the differences of all."""
    found = [compare(n, *engine) for n in numbers for engine in ENGINES]
    return sum(refused for refused, _ in found), [line for _, lines in found for line in lines]


@pytest.mark.slow
def test_random_modules() -> None:
    for refused, lines in run_ranks(compare_all, 2, range(FAST)):
        assert not lines, "\n".join(lines)
        assert refused < FAST * len(ENGINES) / 2


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 3])
def test_many_random_modules(world_size: int) -> None:
    for _, lines in run_ranks(compare_all, world_size, range(FAST, SLOW), timeout=900.0):
        assert not lines, "\n".join(lines)
