"""Experts of DeepSpeed's ``MoE`` at stages 1 and 2: flattened over the ranks that share them."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zerostart
from tests.engines.zero12 import routes
from tests.engines.zero12.routes import Case
from tests.ranks import run_ranks

HIDDEN, EXPERTS = 8, 4
CASES = {
    "stage 2": Case(),
    "stage 1 in fp32": Case(stage=1, bf16=False),
    "aligned, round robin": Case(zero={"parameter_alignment": True, "round_robin_gradients": True}),
    "offloaded": Case(zero={"offload_optimizer": {"device": "cpu"}}),
    "stage 2, exchanged": Case(exchange=True),
    "BF16_Optimizer": Case(stage=1, top={"data_types": {"grad_accum_dtype": "fp32"}}, exchange=True),
}


class Mixture(nn.Module):
    """Called like a language model, with a mixture whose experts are spread over ``ranks`` ranks."""

    def __init__(self, ranks: int) -> None:
        from deepspeed.moe.layer import MoE

        super().__init__()
        self.embed = nn.Embedding(routes.VOCABULARY, HIDDEN)
        expert = nn.Sequential(nn.Linear(HIDDEN, 5), nn.ReLU(), nn.Linear(5, HIDDEN))
        self.mixture = MoE(HIDDEN, expert, num_experts=EXPERTS, ep_size=ranks, k=1, use_rts=False)
        self.head = nn.Linear(HIDDEN, routes.VOCABULARY)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor, use_cache: bool) -> Any:
        hidden = self.embed(input_ids)
        mixed, balance, _ = self.mixture(hidden)
        logits = self.head(hidden + mixed).float()
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return SimpleNamespace(loss=loss + 0.01 * balance)


def stored(ranks: int, share: int) -> dict[str, torch.Tensor]:
    """A state dict, the same on the ranks with the same ``share`` of the experts."""
    with torch.device("meta"):
        shapes = {name: p.shape for name, p in Mixture(ranks).named_parameters()}
    found = {}
    for number, (name, shape) in enumerate(shapes.items()):
        place = number + (1000 * (1 + share) if "experts" in name else 0)
        generator = torch.Generator().manual_seed(place)
        found[name] = torch.randn(shape, generator=generator) * 0.3
    return found


def groups(model: nn.Module) -> list[dict[str, Any]]:
    from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer

    named = list(model.named_parameters())
    return split_params_into_different_moe_groups_for_optimizer(
        [
            {"params": [p for _, p in named if p.ndim > 1], "weight_decay": 0.1, "name": "decayed"},
            {"params": [p for _, p in named if p.ndim == 1], "name": "others"},
        ]
    )


def started(model: nn.Module, case: Case) -> Any:
    import deepspeed

    optimizer = torch.optim.AdamW(groups(model), lr=1e-2)
    config = routes.config_of(case)
    return deepspeed.initialize(model=model.train(), optimizer=optimizer, config=config)[0]


def followed(model: nn.Module, case: Case) -> dict[str, Any]:
    engine = started(model, case)
    found = {f"start {key}": value for key, value in routes.state_of(engine).items()}
    found["losses"] = routes.losses(engine)
    found |= {f"end {key}": value for key, value in routes.state_of(engine).items()}
    engine.destroy()
    return found


def compare(ranks: int) -> dict[str, list[str]]:
    import deepspeed

    deepspeed.init_distributed(dist_backend="gloo", dist_init_required=False)
    state = stored(ranks, dist.get_rank() % ranks)
    found = {}
    for name, case in CASES.items():
        model: nn.Module = Mixture(ranks)
        model.load_state_dict(state)
        wanted = followed(model.to(case.dtype), case)
        with torch.device("meta"):
            model = Mixture(ranks)
        model = zerostart.load(
            state,
            model,
            zero_stage=case.stage,
            engine_config=routes.config_of(case),
            exchange=case.exchange,
            fp32_masters=False,
            progress=False,
        )
        born = {p.untyped_storage().data_ptr() for p in model.parameters()}
        found[name] = routes.differing(followed(model, case), wanted)
        if {p.untyped_storage().data_ptr() for p in model.parameters()} != born or len(born) != 2:
            found[name].append("the parameters have left the buffers that they were born in")
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world_size", "ranks"),
    [(2, 1), (4, 2), (2, 2)],
)
def test_experts_start_as_on_the_stock_route(world_size: int, ranks: int) -> None:
    for found in run_ranks(compare, world_size, ranks, timeout=280):
        assert not {name: lines for name, lines in found.items() if lines}
