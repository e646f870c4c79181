"""DeepSpeed leaf modules: experts whose routing differs between ranks."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zerostart
from tests.ranks import run_ranks

HIDDEN, EXPERTS = 8, 4


class Mixture(nn.Module):
    """Route each token through one expert."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(HIDDEN, 6), nn.ReLU(), nn.Linear(6, HIDDEN)) for _ in range(EXPERTS)
        )

    def forward(self, hidden: torch.Tensor, routes: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(hidden)
        for number in routes.unique().tolist():
            rows = routes == number
            out = out.index_put((rows.nonzero()[:, 0],), self.experts[number](hidden[rows]))
        return out


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.mixture, self.last = nn.Linear(HIDDEN, HIDDEN), Mixture(), nn.Linear(HIDDEN, 1)

    def forward(self, rows: torch.Tensor, routes: torch.Tensor) -> torch.Tensor:
        return self.last(rows + self.mixture(self.first(rows), routes)).square().mean()


#: Experts of each rank's tokens, by step; their number differs, too.
ROUTES = (([0, 0, 0, 0], [3, 2, 1, 2]), ([1, 2, 1, 2], [3, 3, 3, 3]), ([0, 1, 2, 3], [0, 0, 1, 1]))


def rows(step: int) -> torch.Tensor:
    return torch.randn((2, 4, HIDDEN), generator=torch.Generator().manual_seed(step))


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)


def train_alone(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    model = Model()
    model.load_state_dict(weights)
    optimizer = make_optimizer(model)
    for step, routes in enumerate(ROUTES):
        losses = [model(rows(step)[rank], torch.tensor(routes[rank])) for rank in range(2)]
        (sum(losses) / 2).backward()  # type: ignore[union-attr]
        # A leaf gives unused experts gradients of zero.
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        optimizer.step()
        optimizer.zero_grad()
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def leaf_config(**zero: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0, **zero},
        "zero_allow_untested_optimizer": True,
    }


def train_on_ranks(weights: dict[str, torch.Tensor], case: str) -> tuple[dict[str, torch.Tensor], list[str]]:
    """Return the final weights and the leaves' names."""
    import deepspeed

    sections: dict[str, dict[str, Any]] = {
        "names": {"names": ["mixture"]},
        "classes": {"classes": ["Mixture"]},
        "suffixes": {"name_suffixes": ["xture"]},
    }
    config = leaf_config(**({"leaf_module": sections[case]} if case in sections else {}))
    model = zerostart.load(weights, Model, engine_config=config, progress=False)
    leaves = [name for name, module in model.named_modules() if getattr(module, "_z3_leaf", False)]
    assert leaves == ([] if case in sections else ["mixture"])
    engine, *_ = deepspeed.initialize(model=model, optimizer=make_optimizer(model), config=config)
    for step, routes in enumerate(ROUTES):
        engine.backward(engine(rows(step)[dist.get_rank()], torch.tensor(routes[dist.get_rank()])))
        engine.step()
    leaves = [name for name, module in model.named_modules() if getattr(module, "_z3_leaf", False)]
    return {n: t for n, t in zerostart.full_tensors(engine, rank=None) if t is not None}, leaves


@pytest.mark.slow
@pytest.mark.parametrize("case", ["default", "names", "classes", "suffixes"])
def test_different_routing_on_ranks(case: str) -> None:
    torch.manual_seed(0)
    weights = copy.deepcopy(Model().state_dict())
    expected = train_alone(weights)
    for weights_of_rank, leaves in run_ranks(train_on_ranks, 2, weights, case, timeout=60):
        assert leaves == ["mixture"]
        for name, tensor in expected.items():
            torch.testing.assert_close(weights_of_rank[name], tensor, rtol=1e-5, atol=1e-6)
