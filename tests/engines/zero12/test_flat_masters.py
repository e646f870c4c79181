"""fp32 masters at stages 1 and 2 start from what the checkpoint stores in fp32."""

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


def stored(path: Path) -> Tensors:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    return {name: p.detach() for name, p in model.named_parameters()}


def masters_in(engine: Any) -> Tensors:
    """The masters of all ranks, put together.

    DeepSpeed's ``safe_get_full_fp32_param`` looks at the wrong place with ``round_robin_gradients``.
    """
    o, names = engine.optimizer, {id(p): name for name, p in engine.module.named_parameters()}
    if hasattr(o, "bf16_groups"):
        groups, partitions = o.bf16_groups, o.fp32_groups_flat_partition
        ends = [list(accumulate((p.numel() for p in group), initial=0)) for group in groups]
    else:
        groups, partitions = o.round_robin_bit16_groups, o.single_partition_of_fp32_groups
        ends = o.round_robin_bit16_offsets
    found = {}
    for group, offsets, partition in zip(groups, ends, partitions, strict=True):
        parts = [torch.empty_like(partition) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, partition.detach().clone())
        flat = torch.cat(parts)
        for parameter, offset in zip(group, offsets, strict=False):
            found[names[id(parameter)]] = flat[offset : offset + parameter.numel()].view(parameter.shape)
    return found


def unlike(found: Tensors, wanted: Tensors) -> list[str]:
    return [name for name, tensor in found.items() if not torch.equal(tensor, wanted[name])]


def check(path: Path) -> dict[str, list[str]]:
    full = stored(path)
    lines = {}
    for name in NAMES:
        model = routes.ours(path, CASES[name])
        engine = routes.started(model, CASES[name])
        trained = [p.requires_grad for p in model.parameters()]
        lines[name] = unlike(masters_in(engine), full)
        lines[name] += unlike({n: p.detach() for n, p in model.named_parameters()}, halved(full))
        if len(masters_in(engine)) != sum(trained):
            lines[name].append("masters are missing")
        engine.destroy()
    case = CASES["decay"]
    wanted = routes.followed(routes.stock(path, case), case)
    lines["rounded"] = routes.differing(
        routes.followed(routes.ours(path, case, fp32_masters=False), case), wanted
    )
    model = routes.ours(path, case)
    with torch.no_grad():
        for parameter in list(model.parameters())[::2]:
            parameter.mul_(2)
    engine = routes.started(model, case)
    every_other = dict(list(full.items())[::2])
    lines["changed"] = unlike(
        masters_in(engine), full | {n: t * 2 for n, t in halved(every_other, torch.float32).items()}
    )
    engine.destroy()
    return lines


def halved(full: Tensors, dtype: torch.dtype = torch.bfloat16) -> Tensors:
    return {name: tensor.to(torch.bfloat16).to(dtype) for name, tensor in full.items()}


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 3])
def test_masters_are_what_the_checkpoint_stores(world_size: int, checkpoints: TinyCheckpoints) -> None:
    path = checkpoints("qwen3_moe_aligned", torch.float32, sharded=True)
    for found in run_ranks(check, world_size, path, timeout=240):
        assert not {name: lines for name, lines in found.items() if lines}


@pytest.mark.slow
def test_a_model_with_modules_kept_in_fp32(checkpoints: TinyCheckpoints) -> None:
    """DeepSpeed casts them: buffers are equal to the stock route's, and masters have the stored values."""
    path = checkpoints("flint", torch.float32)
    for lines in run_ranks(check_kept, 2, path, timeout=120):
        assert lines == []


def check_kept(path: Path) -> list[str]:
    case = CASES["stage 2, exchanged"]
    wanted = routes.followed(routes.stock(path, case), case)
    lines = routes.differing(routes.followed(routes.ours(path, case, fp32_masters=False), case), wanted)
    model = routes.ours(path, case)
    engine = routes.started(model, case)
    lines += unlike(masters_in(engine), stored(path))
    engine.destroy()
    return lines
