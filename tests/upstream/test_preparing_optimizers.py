"""What accelerate's preparation of FSDP2 does to optimizers: parameters that are replaced are let go."""

import weakref
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from zerostart.upstream.accelerate import preparing as accelerate_preparing


def test_whole_parameters_are_not_held_while_they_are_replaced() -> None:
    """Else a model that zerostart has not loaded would be in memory whole beside its shards."""
    model = nn.Linear(2, 3, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    whole = weakref.ref(model.weight)
    held: list[bool] = []

    def prepare(accelerator: Any, *args: Any) -> Any:
        model.weight = nn.Parameter(torch.zeros(2, 3))
        optimizer.param_groups[0]["params"] = [model.weight]
        held.append(whole() is not None)
        return args

    prepared = accelerate_preparing._keeps_parameters(prepare)(SimpleNamespace(), model, optimizer)
    assert held == [False]
    assert prepared == (model, optimizer)
    assert optimizer.param_groups[0]["params"][0] is model.weight
