"""Which gradients a step has taken is known of models of ours, as long as they live, and of no others."""

import gc
from typing import Any

import torch
from torch import nn
from torch.optim import optimizer as torchs

import zerostart


def stepped(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer


def hooks() -> list[Any]:
    return list(torchs._global_optimizer_post_hooks.values())


def marks(model: nn.Module) -> set[str]:
    return {name for p in model.parameters() for name in vars(p.grad if p.grad is not None else p)}


def test_steps_of_others_are_not_looked_at() -> None:
    gc.collect()
    before = hooks()
    loaded, other = zerostart.load(None, model=nn.Linear(2, 2), progress=False), nn.Linear(2, 2)
    with zerostart.enabled():
        stepped(loaded)
        stepped(other)
        assert marks(loaded)
        assert not marks(other)
    later = nn.Linear(2, 2)
    stepped(later)
    assert not marks(later)
    assert len(hooks()) == len(before) + 1
    del loaded
    gc.collect()
    assert hooks() == before


def test_a_model_that_is_collected_within_a_step_leaves_the_other_hooks_alone() -> None:
    gc.collect()
    before = hooks()
    loaded: list[nn.Module] = [zerostart.load(None, model=nn.Linear(2, 2), progress=False)]

    def drop(*_: Any) -> None:
        loaded.clear()
        gc.collect()

    first = torchs.register_optimizer_step_post_hook(drop)
    calls: list[Any] = []
    last = torchs.register_optimizer_step_post_hook(lambda *_: calls.append(_))
    try:
        stepped(nn.Linear(2, 2))
    finally:
        first.remove()
        last.remove()
    assert len(calls) == 1
    assert not loaded
    with zerostart.enabled():
        pass
    assert hooks() == before


def test_nothing_remains_after_disable() -> None:
    gc.collect()
    before = hooks()
    with zerostart.enabled():
        other = nn.Linear(2, 2)
        stepped(other)
        assert not marks(other)
    assert hooks() == before
