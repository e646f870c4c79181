"""FSDP2 with experts over several ranks: loads bit for bit, and trains as one process does."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

import zerostart
from tests.parity import CLIP, ROUNDING, Trace, batches, checkpoint, differences, optimizer, reference
from tests.ranks import run_ranks

MODELS = ["qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3"]
SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("kind", "experts", "world", "accumulation"),
    [
        *((kind, 2, 2, 2) for kind in MODELS),
        ("deepseek_v3", 2, 4, 1),
        *(pytest.param(kind, 2, 4, 1, marks=SLOW) for kind in MODELS if kind != "deepseek_v3"),
        # Its expert plan has styles of tensors for the dense part as well.
        pytest.param("gemma4_text", 2, 4, 1, marks=SLOW),
        *(
            pytest.param(kind, *case, marks=SLOW)
            for kind in MODELS
            for case in [(2, 2, 1), (1, 2, 1), (4, 4, 1)]
        ),
    ],
)
def test_experts_train_as_in_one_process(
    kind: str, experts: int, world: int, accumulation: int, folder: Path
) -> None:
    path = checkpoint(kind, folder)
    wanted = reference(path)
    options = {"expert_parallel": experts}
    for found in run_ranks(train, world, path, accumulation, options):
        assert differences(found, wanted, ROUNDING.get(kind, 1e-5)) == []


def train(path: Path, accumulation: int, options: dict[str, Any]) -> Trace:
    model = zerostart.load(path, engine="fsdp2", progress=False, **options)
    model.train()
    optim, trace = optimizer(model), Trace()
    tensor = options.get("tensor_parallel", 1)
    rank, size = dist.get_rank() // tensor, dist.get_world_size() // tensor
    for batch in batches(size * accumulation):
        total = torch.zeros(())
        for part in range(accumulation):
            model.set_requires_gradient_sync(part == accumulation - 1)  # type: ignore[operator]
            tokens = batch[rank * accumulation + part]
            loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss / accumulation
            loss.backward()
            total += loss.detach()
        dist.all_reduce(total)
        trace.losses.append(total.item() / dist.get_world_size())
        if not trace.gradients:
            trace.gradients = {n: whole(p.grad) for n, p in model.named_parameters()}
        trace.norms.append(clip(model))
        optim.step()
        optim.zero_grad()
    for name, value in zerostart.full_tensors(model, rank=None):
        assert value is not None
        trace.weights[name] = value
    return trace


def whole(gradient: torch.Tensor | None) -> torch.Tensor:
    assert gradient is not None
    return (gradient.full_tensor() if isinstance(gradient, DTensor) else gradient).clone()


def clip(model: nn.Module) -> float:
    """As accelerate does it: a norm for each mesh, put together."""
    meshes: dict[object, list[nn.Parameter]] = {}
    for parameter in model.parameters():
        mesh = parameter.grad.device_mesh if isinstance(parameter.grad, DTensor) else None
        meshes.setdefault(mesh, []).append(parameter)
    norms = [whole(torch.nn.utils.get_total_norm([p.grad for p in group])) for group in meshes.values()]
    total = torch.linalg.vector_norm(torch.stack(norms))
    for group in meshes.values():
        torch._foreach_mul_([p.grad for p in group], min(1.0, CLIP / (total.item() + 1e-6)))
    return total.item()


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "count"), [("gpt_oss", 32), ("mixtral", 8), ("qwen3_moe", 6)])
def test_each_rank_holds_its_own_experts(kind: str, count: int, folder: Path) -> None:
    """The check of transformers' pull request 45548: 32 experts on 4 ranks, 8 on each."""
    name = "num_experts" if kind == "qwen3_moe" else "num_local_experts"
    path = checkpoint(kind, folder, **{name: count})
    from transformers import AutoModelForCausalLM

    stock = AutoModelForCausalLM.from_pretrained(path).state_dict()
    ranks = 3 if count == 6 else 4
    results = run_ranks(look, ranks, path)
    for rank, (local, gathered, _) in enumerate(results):
        assert gathered.keys() == stock.keys()
        assert all(torch.equal(gathered[n], stock[n]) for n in stock)
        each = count // ranks
        for name, tensor in local.items():
            assert torch.equal(tensor, stock[name][rank * each : (rank + 1) * each])
        assert len(local) >= 2
    stored = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    assert sum(read_bytes for _, _, read_bytes in results) < stored


def look(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], int]:
    model = zerostart.load(path, engine="fsdp2", expert_parallel=dist.get_world_size(), progress=False)
    local = {n: p.to_local().detach() for n, p in model.named_parameters() if ".experts." in n}
    gathered = {n: t for n, t in zerostart.full_tensors(model, rank=None) if t is not None}
    return local, gathered, zerostart.report(model).read_bytes


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "world", "accumulation"),
    [
        ("qwen3", 2, 2),
        ("mixtral", 4, 1),
        *(
            pytest.param(*case, marks=SLOW)
            for case in [("qwen3", 2, 1), ("qwen3", 4, 1), ("mixtral", 2, 1), ("mixtral", 2, 2)]
        ),
    ],
)
def test_tensors_train_as_in_one_process(kind: str, world: int, accumulation: int, folder: Path) -> None:
    path = checkpoint(kind, folder)
    wanted = reference(path)
    for found in run_ranks(train, world, path, accumulation, {"tensor_parallel": 2}):
        assert differences(found, wanted) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "world", "experts", "accumulation"),
    [
        ("mixtral", 2, 2, 1),
        *(pytest.param(kind, 2, 2, 1, marks=SLOW) for kind in MODELS if kind != "mixtral"),
        ("gpt_oss", 4, 2, 2),
        ("deepseek_v3", 4, 4, 1),
        *(pytest.param(kind, 4, 2, 2, marks=SLOW) for kind in MODELS if kind != "gpt_oss"),
        *(pytest.param(kind, 4, 4, 1, marks=SLOW) for kind in MODELS if kind != "deepseek_v3"),
    ],
)
def test_experts_and_tensors_train_as_in_one_process(
    kind: str, world: int, experts: int, accumulation: int, folder: Path
) -> None:
    path = checkpoint(kind, folder)
    wanted = reference(path)
    options = {"expert_parallel": experts, "tensor_parallel": 2}
    for found in run_ranks(train, world, path, accumulation, options):
        assert differences(found, wanted) == []
