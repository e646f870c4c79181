"""Leaf modules of DeepSpeed on loaded models, and experts to which ranks send their tokens differently."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zerostart
from tests.parity import checkpoint
from tests.ranks import run_ranks

HIDDEN, EXPERTS = 8, 4


class Mixture(nn.Module):
    """Each token goes through one of several experts, modules of their own; others do not run."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(HIDDEN, 6), nn.ReLU(), nn.Linear(6, HIDDEN)) for _ in range(EXPERTS)
        )

    def forward(self, hidden: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(hidden)
        for number in chosen.unique().tolist():
            rows = chosen == number
            out = out.index_put((rows.nonzero()[:, 0],), self.experts[number](hidden[rows]))
        return out


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.mixture, self.last = nn.Linear(HIDDEN, HIDDEN), Mixture(), nn.Linear(HIDDEN, 1)

    def forward(self, rows: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        return self.last(rows + self.mixture(self.first(rows), chosen)).square().mean()


#: Experts of each rank's tokens, by step: other ones, and another number of them.
CHOSEN = (([0, 0, 0, 0], [3, 2, 1, 2]), ([1, 2, 1, 2], [3, 3, 3, 3]), ([0, 1, 2, 3], [0, 0, 1, 1]))


def rows(step: int) -> torch.Tensor:
    return torch.randn((2, 4, HIDDEN), generator=torch.Generator().manual_seed(step))


def stepped(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)


def alone(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    model = Model()
    model.load_state_dict(weights)
    optimizer = stepped(model)
    for step, chosen in enumerate(CHOSEN):
        both = [model(rows(step)[rank], torch.tensor(chosen[rank])) for rank in range(2)]
        (sum(both) / 2).backward()  # type: ignore[union-attr]
        # What no rank has sent a token to has a gradient of zero, as a leaf gives it.
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        optimizer.step()
        optimizer.zero_grad()
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def configured(**zero: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0, **zero},
        "zero_allow_untested_optimizer": True,
    }


def apart(weights: dict[str, torch.Tensor], case: str) -> tuple[dict[str, torch.Tensor], list[str]]:
    """The weights at the end, and the names of the leaves."""
    import deepspeed

    sections: dict[str, dict[str, Any]] = {
        "names": {"names": ["mixture"]},
        "classes": {"classes": ["Mixture"]},
        "suffixes": {"name_suffixes": ["xture"]},
    }
    config = configured(**({"leaf_module": sections[case]} if case in sections else {}))
    given = weights if dist.get_rank() == 0 else None
    model = zerostart.load(given, Model, engine_config=config, progress=False)
    leaves = [name for name, module in model.named_modules() if getattr(module, "_z3_leaf", False)]
    assert leaves == ([] if case in sections else ["mixture"])
    engine, *_ = deepspeed.initialize(model=model, optimizer=stepped(model), config=config)
    for step, chosen in enumerate(CHOSEN):
        engine.backward(engine(rows(step)[dist.get_rank()], torch.tensor(chosen[dist.get_rank()])))
        engine.step()
    leaves = [name for name, module in model.named_modules() if getattr(module, "_z3_leaf", False)]
    return {n: t for n, t in zerostart.full_tensors(engine, rank=None) if t is not None}, leaves


@pytest.mark.parametrize(
    "case",
    ["nothing said", *(pytest.param(c, marks=pytest.mark.slow) for c in ("names", "classes", "suffixes"))],
)
def test_routing_that_differs_between_ranks(case: str) -> None:
    torch.manual_seed(0)
    weights = copy.deepcopy(Model().state_dict())
    expected = alone(weights)
    for found, leaves in run_ranks(apart, 2, weights, case, timeout=60):
        assert leaves == ["mixture"]
        for name, tensor in expected.items():
            torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-6)


def transformed(path: Path, when: str) -> list[tuple[list[str], list[float]]]:
    """Leaves and losses of a model of transformers, loaded here and on the stock route."""
    import deepspeed
    from deepspeed.utils import get_z3_leaf_modules, set_z3_leaf_modules
    from transformers import AutoModelForCausalLM
    from transformers.integrations.deepspeed import HfDeepSpeedConfig

    found = []
    for ours in (True, False):
        config = configured() if when != "section" else configured(leaf_module={"name_suffixes": ["mlp"]})
        kept = HfDeepSpeedConfig(config)
        if ours:
            model = zerostart.load(path, engine_config=config, progress=False)
        else:
            model = AutoModelForCausalLM.from_pretrained(path)
        model.train()
        kind = type(model.model.layers[0].mlp)
        if when == "before":
            assert len(set_z3_leaf_modules(model, [kind])) == 2
        optimizer = stepped(model)
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        if when == "after":
            assert len(set_z3_leaf_modules(model, [kind])) == 2
        losses = []
        for step in range(3):
            # Each rank its own few tokens, which go to other experts.
            generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
            tokens = torch.randint(3, 96, (1, 3), generator=generator)
            loss = engine(input_ids=tokens, labels=tokens, use_cache=False).loss
            engine.backward(loss)
            engine.step()
            losses.append(float(loss.detach()))
        found.append(([type(module).__name__ for module in get_z3_leaf_modules(model)], losses))
        del kept
    return found


@pytest.mark.parametrize(
    "when", ["before", *(pytest.param(w, marks=pytest.mark.slow) for w in ("after", "section", "never"))]
)
def test_leaves_of_a_model_of_transformers_as_on_the_stock_route(when: str, tmp_path: Path) -> None:
    path = checkpoint("gpt_oss", tmp_path)
    for ours, stock in run_ranks(transformed, 2, path, when, timeout=90):
        assert ours == stock
        assert ours[0] == ([] if when == "never" else ["GptOssMLP"] * 2)


def switched(path: Path) -> tuple[list[str], bool]:
    """Experts in a container that is run itself: the leaves, and whether all is finite after two steps."""
    import deepspeed

    config = configured()
    model = zerostart.load(path, engine_config=config, progress=False)
    engine, *_ = deepspeed.initialize(model=model.train(), optimizer=stepped(model), config=config)
    for step in range(2):
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        tokens = torch.randint(3, 64, (1, 2), generator=generator)
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
    leaves = [type(module).__name__ for module in model.modules() if getattr(module, "_z3_leaf", False)]
    return leaves, bool(loss.isfinite())


@pytest.mark.slow
def test_experts_of_a_container_with_a_forward(tmp_path: Path) -> None:
    from transformers import AutoConfig, SwitchTransformersForConditionalGeneration

    config = AutoConfig.for_model(
        "switch_transformers",
        vocab_size=64,
        d_model=16,
        d_kv=4,
        d_ff=24,
        num_layers=2,
        num_heads=4,
        num_decoder_layers=2,
        num_sparse_encoder_layers=1,
        num_sparse_decoder_layers=1,
        num_experts=4,
        decoder_start_token_id=0,
    )
    torch.manual_seed(0)
    SwitchTransformersForConditionalGeneration(config).save_pretrained(tmp_path)
    for leaves, finite in run_ranks(switched, 2, tmp_path, timeout=90):
        assert set(leaves) == {"SwitchTransformersExperts"}
        assert finite
