"""fp32 masters at stages 1 and 2 start from the checkpoint's fp32 values."""

from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.engines.zero12 import routes
from tests.engines.zero12.routes import CASES
from tests.ranks import run_ranks
from tests.tiny import TinyCheckpoints

NAMES = [
    "stage 1",
    "stage 2, exchanged",
    "decay, round robin, aligned",
    "frozen",
    "offloaded",
    "BF16_Optimizer, decay",
    "fp32 accumulation",
]
Tensors = dict[str, torch.Tensor]


def stored_tensors(path: Path) -> Tensors:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    return {name: p.detach() for name, p in model.named_parameters()}


def masters_in(engine: Any) -> Tensors:
    """Join the masters of all ranks.

    DeepSpeed's ``safe_get_full_fp32_param`` reads a wrong offset with ``round_robin_gradients``.
    """
    o, names = engine.optimizer, {id(p): name for name, p in engine.module.named_parameters()}
    if hasattr(o, "bf16_groups"):
        groups, partitions = o.bf16_groups, o.fp32_groups_flat_partition
        ends = [list(accumulate((p.numel() for p in group), initial=0)) for group in groups]
    else:
        groups, partitions = o.round_robin_bit16_groups, o.single_partition_of_fp32_groups
        ends = o.round_robin_bit16_offsets
    masters = {}
    for group, offsets, partition in zip(groups, ends, partitions, strict=True):
        parts = [torch.empty_like(partition) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, partition.detach().clone())
        flat = torch.cat(parts)
        for parameter, offset in zip(group, offsets, strict=False):
            masters[names[id(parameter)]] = flat[offset : offset + parameter.numel()].view(parameter.shape)
    return masters


def differing_names(actual: Tensors, expected: Tensors) -> list[str]:
    return [name for name, tensor in actual.items() if not torch.equal(tensor, expected[name])]


def check_masters(path: Path) -> dict[str, list[str]]:
    full = stored_tensors(path)
    lines = {}
    for name in NAMES:
        model = routes.ours(path, CASES[name])
        engine = routes.start_engine(model, CASES[name])
        trained = [p.requires_grad for p in model.parameters()]
        lines[name] = differing_names(masters_in(engine), full)
        lines[name] += differing_names(
            {n: p.detach() for n, p in model.named_parameters()}, round_to_bf16(full)
        )
        if len(masters_in(engine)) != sum(trained):
            lines[name].append("masters are missing")
        engine.destroy()
    case = CASES["decay"]
    expected = routes.trace_training(routes.stock(path, case), case)
    lines["rounded"] = routes.differing_keys(
        routes.trace_training(routes.ours(path, case, fp32_masters=False), case), expected
    )
    model = routes.ours(path, case)
    with torch.no_grad():
        for parameter in list(model.parameters())[::2]:
            parameter.mul_(2)
    engine = routes.start_engine(model, case)
    every_other = dict(list(full.items())[::2])
    lines["changed"] = differing_names(
        masters_in(engine), full | {n: t * 2 for n, t in round_to_bf16(every_other, torch.float32).items()}
    )
    engine.destroy()
    return lines


def round_to_bf16(full: Tensors, dtype: torch.dtype = torch.bfloat16) -> Tensors:
    return {name: tensor.to(torch.bfloat16).to(dtype) for name, tensor in full.items()}


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 3])
def test_masters_have_the_stored_values(world_size: int, checkpoints: TinyCheckpoints) -> None:
    path = checkpoints("qwen3_moe_aligned", torch.float32, sharded=True)
    for lines_by_case in run_ranks(check_masters, world_size, path, timeout=240):
        assert not {name: lines for name, lines in lines_by_case.items() if lines}


@pytest.mark.slow
def test_a_model_with_modules_kept_in_fp32(checkpoints: TinyCheckpoints) -> None:
    """DeepSpeed casts them: buffers equal the stock route's, and masters have the stored values."""
    path = checkpoints("flint", torch.float32)
    for lines in run_ranks(check_fp32_modules, 2, path, timeout=120):
        assert lines == []


def check_fp32_modules(path: Path) -> list[str]:
    case = CASES["stage 2, exchanged"]
    expected = routes.trace_training(routes.stock(path, case), case)
    lines = routes.differing_keys(
        routes.trace_training(routes.ours(path, case, fp32_masters=False), case), expected
    )
    model = routes.ours(path, case)
    engine = routes.start_engine(model, case)
    lines += differing_names(masters_in(engine), stored_tensors(path))
    engine.destroy()
    return lines
