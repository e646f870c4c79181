"""ZeRO-3 with experts over several ranks: loads bit for bit, and trains as one process does."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import zerostart
from tests.parity import CLIP, ROUNDING, Trace, batches, checkpoint, differences, optimizer, reference
from tests.ranks import run_ranks

MODELS = ["qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3"]


SIZES = {
    "ep2xdp1": (2, 2, 1),
    "ep2xdp1-accumulated": (2, 2, 2),
    "ep1xdp2": (1, 2, 1),
    "ep2xdp2": (2, 4, 1),
    "ep4xdp1": (4, 4, 1),
}
FAST = {
    ("qwen3_moe", "ep2xdp2"),
    ("mixtral", "ep2xdp1"),
    ("gpt_oss", "ep2xdp1-accumulated"),
    ("deepseek_v3", "ep2xdp1"),
}


@pytest.mark.parametrize(
    ("kind", "experts", "world", "accumulation"),
    [
        pytest.param(
            kind, *sizes, marks=() if (kind, name) in FAST else pytest.mark.slow, id=f"{kind}-{name}"
        )
        for kind in MODELS
        for name, sizes in SIZES.items()
    ],
)
def test_experts_train_as_in_one_process(
    kind: str, experts: int, world: int, accumulation: int, folder: Path
) -> None:
    path = checkpoint(kind, folder)
    wanted = reference(path)
    for found in run_ranks(train, world, path, accumulation, experts):
        assert differences(found, wanted) == []


@pytest.mark.parametrize(
    ("kind", "experts", "world", "accumulation"),
    [
        *((kind, 2, 2, 2) for kind in MODELS),
        ("gpt_oss", 2, 4, 1),
        *(pytest.param(kind, 2, 4, 1, marks=pytest.mark.slow) for kind in MODELS if kind != "gpt_oss"),
        # Its expert plan has styles of tensors for the dense part as well.
        pytest.param("gemma4_text", 2, 2, 2, marks=pytest.mark.slow),
        pytest.param("qwen3_moe", 4, 4, 1, marks=pytest.mark.slow),
        ("mixtral", 1, 2, 1),
    ],
)
def test_at_stage_2(kind: str, experts: int, world: int, accumulation: int, folder: Path) -> None:
    path = checkpoint(kind, folder)
    wanted = reference(path)
    for found in run_ranks(train, world, path, accumulation, experts, 2):
        assert differences(found, wanted, ROUNDING.get(kind, 1e-5)) == []


@pytest.mark.parametrize(
    ("kind", "world", "accumulation"),
    [
        ("gpt_oss", 2, 2),
        *(pytest.param(kind, 4, 1, marks=pytest.mark.slow) for kind in MODELS),
        *(pytest.param(kind, 2, 2, marks=pytest.mark.slow) for kind in MODELS if kind != "gpt_oss"),
    ],
)
def test_at_stage_1(kind: str, world: int, accumulation: int, folder: Path) -> None:
    path = checkpoint(kind, folder)
    wanted = reference(path)
    for found in run_ranks(train, world, path, accumulation, 2, 1):
        assert differences(found, wanted) == []


def train(path: Path, accumulation: int, experts: int, stage: int = 3) -> Trace:
    import deepspeed

    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": CLIP,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "zero_allow_untested_optimizer": True,
    }
    model = zerostart.load(
        path,
        engine="deepspeed",
        zero_stage=stage,
        engine_config=config,
        expert_parallel=experts,
        progress=False,
    )
    model.train()
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer(model), config=config)
    trace, rank = Trace(), dist.get_rank()
    for batch in batches(dist.get_world_size() * accumulation):
        total = torch.zeros(())
        for part in range(accumulation):
            tokens = batch[rank * accumulation + part]
            loss = engine(input_ids=tokens, labels=tokens, use_cache=False).loss
            engine.backward(loss)
            total += loss.detach() / accumulation
            if part == accumulation - 1 and not trace.gradients:
                trace.gradients = gradients(model, experts)
            engine.step()
        dist.all_reduce(total)
        trace.losses.append(total.item() / dist.get_world_size())
        trace.norms.append(float(engine.get_global_grad_norm()))
    for name, value in zerostart.full_tensors(engine, rank=None):
        assert value is not None
        trace.weights[name] = value
    return trace


def gradients(model: torch.nn.Module, experts: int) -> dict[str, torch.Tensor]:
    """Whole gradients, by DeepSpeed's own means; experts put together by torch."""
    from deepspeed.utils import groups, safe_get_full_grad

    found = {}
    for name, parameter in model.named_parameters():
        gradient = safe_get_full_grad(parameter).clone()
        if ".experts." in name and experts > 1:
            group = groups._get_expert_parallel_group(f"ep_size_{experts}")
            parts = [torch.empty_like(gradient) for _ in range(experts)]
            dist.all_gather(parts, gradient.contiguous(), group=group)
            gradient = torch.cat(parts)
        found[name] = gradient
    return found


@pytest.mark.parametrize(
    ("kind", "count", "ranks", "stage"),
    [("gpt_oss", 32, 4, 3), ("mixtral", 5, 3, 3), ("qwen3_moe", 6, 3, 3), ("mixtral", 5, 3, 2)],
)
def test_each_rank_holds_its_own_experts(kind: str, count: int, ranks: int, stage: int, folder: Path) -> None:
    """The check of transformers' pull request 45548, 32 experts on 4 ranks, 8 on each; and uneven."""
    from transformers import AutoModelForCausalLM

    name = "num_experts" if kind == "qwen3_moe" else "num_local_experts"
    path = checkpoint(kind, folder, **{name: count})
    stock = AutoModelForCausalLM.from_pretrained(path).state_dict()
    results = run_ranks(look, ranks, path, stage)
    each = -(-count // ranks)
    for rank, (local, gathered, _) in enumerate(results):
        assert gathered.keys() == stock.keys()
        assert all(torch.equal(gathered[n], stock[n]) for n in stock)
        assert len(local) >= 2
        for name, tensor in local.items():
            assert torch.equal(tensor, stock[name][rank * each : (rank + 1) * each])
    stored = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    if stage == 3:
        assert sum(read_bytes for _, _, read_bytes in results) < stored
    planned = zerostart.plan(path, world_size=ranks, zero_stage=stage, expert_parallel=ranks)
    assert [rank.read_bytes for rank in planned.ranks] == [read_bytes for _, _, read_bytes in results]


def look(path: Path, stage: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], int]:
    import deepspeed

    size = dist.get_world_size()
    model = zerostart.load(path, zero_stage=stage, expert_parallel=size, progress=False)
    experts = {n: p for n, p in model.named_parameters() if ".experts." in n}
    with deepspeed.zero.GatheredParameters(list(experts.values())):
        local = {n: p.detach().clone() for n, p in experts.items()}
    gathered = {n: t for n, t in zerostart.full_tensors(model, rank=None) if t is not None}
    return local, gathered, zerostart.report(model).read_bytes
