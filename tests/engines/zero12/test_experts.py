"""Experts of DeepSpeed's ``MoE`` at stages 1 and 2, flattened over their ranks."""

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
    """Model with a language model's signature and experts spread over ``ranks`` ranks."""

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


def random_state(ranks: int, share: int) -> dict[str, torch.Tensor]:
    """Return a state dict that depends on the ``share`` of the experts."""
    with torch.device("meta"):
        shapes = {name: p.shape for name, p in Mixture(ranks).named_parameters()}
    tensors = {}
    for number, (name, shape) in enumerate(shapes.items()):
        seed = number + (1000 * (1 + share) if "experts" in name else 0)
        generator = torch.Generator().manual_seed(seed)
        tensors[name] = torch.randn(shape, generator=generator) * 0.3
    return tensors


def parameter_groups(model: nn.Module) -> list[dict[str, Any]]:
    from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer

    named = list(model.named_parameters())
    return split_params_into_different_moe_groups_for_optimizer(
        [
            {"params": [p for _, p in named if p.ndim > 1], "weight_decay": 0.1, "name": "decayed"},
            {"params": [p for _, p in named if p.ndim == 1], "name": "others"},
        ]
    )


def start_engine(model: nn.Module, case: Case) -> Any:
    import deepspeed

    optimizer = torch.optim.AdamW(parameter_groups(model), lr=1e-2)
    config = routes.config_of(case)
    return deepspeed.initialize(model=model.train(), optimizer=optimizer, config=config)[0]


def trace_training(model: nn.Module, case: Case) -> dict[str, Any]:
    engine = start_engine(model, case)
    trace = {f"start {key}": value for key, value in routes.state_of(engine).items()}
    trace["losses"] = routes.losses(engine)
    trace |= {f"end {key}": value for key, value in routes.state_of(engine).items()}
    engine.destroy()
    return trace


def compare(ranks: int) -> dict[str, list[str]]:
    import deepspeed

    deepspeed.init_distributed(dist_backend="gloo", dist_init_required=False)
    state = random_state(ranks, dist.get_rank() % ranks)
    lines_by_case = {}
    for name, case in CASES.items():
        model: nn.Module = Mixture(ranks)
        model.load_state_dict(state)
        expected = trace_training(model.to(case.dtype), case)
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
        loaded_at = {p.untyped_storage().data_ptr() for p in model.parameters()}
        lines_by_case[name] = routes.differing_keys(trace_training(model, case), expected)
        if {p.untyped_storage().data_ptr() for p in model.parameters()} != loaded_at or len(loaded_at) != 2:
            lines_by_case[name].append("the parameters have left the buffers that they were loaded into")
    return lines_by_case


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world_size", "ranks"),
    [(2, 1), (4, 2), (2, 2)],
)
def test_experts_train_like_the_stock_route(world_size: int, ranks: int) -> None:
    for lines_by_case in run_ranks(compare, world_size, ranks, timeout=280):
        assert not {name: lines for name, lines in lines_by_case.items() if lines}
