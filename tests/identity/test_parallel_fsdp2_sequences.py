"""Ranks that share sequences on FSDP2, with experts, tensors and placements: they train as one process."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import zerostart
from tests.identity.test_parallel_fsdp2 import clip, whole
from tests.identity.test_parallel_fsdp2_placements import BOTH, EXPERTS, PLACED, TENSORS
from tests.parity import Trace, checkpoint, differences, optimizer
from tests.ranks import run_ranks
from tests.sequences import IGNORED, ROWS, alone, loss_of, shifted, steps

SIZE = 2
PLACEMENTS = {**PLACED, "device": dict, "pairs": lambda: {"reshard_after_forward": 2}}
ALONE = ["offload", "replicas", "dimensions"]


def wider(*cases: tuple[Any, ...]) -> list[Any]:
    return [pytest.param(*case, marks=pytest.mark.slow) for case in cases]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "stage", "world", "placed", "axes"),
    [
        ("mixtral", 3, 4, "device", BOTH),
        *wider(
            *(("qwen3", *case, {}) for case in [(3, 2, "device"), (1, 2, "device"), (2, 4, "device")]),
            ("qwen3_moe", 3, 2, "device", EXPERTS),
            ("qwen3_moe", 3, 4, "device", EXPERTS),
            *(("qwen3", 3, 4, placed, {}) for placed in PLACEMENTS),
            *(("qwen3_moe", 3, 4, placed, EXPERTS) for placed in ALONE),
            *(("qwen3", 3, 4, placed, TENSORS) for placed in [*ALONE, "device"]),
            ("qwen3", 1, 4, "device", TENSORS),
            ("mixtral", 3, 8, "all", BOTH),
        ),
    ],
)
def test_keys_and_values_travel(
    kind: str, stage: int, world: int, placed: str, axes: dict[str, int], folder: Path
) -> None:
    path = checkpoint(kind, folder)
    wanted = run_ranks(alone, 1, path, "padded")[0]
    for found in run_ranks(train, world, path, stage, placed, axes):
        assert differences(found, wanted) == []


def train(path: Path, stage: int, placed: str, axes: dict[str, int]) -> Trace:
    from accelerate.big_modeling import _attach_context_parallel_hooks
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel

    model = zerostart.load(
        path,
        engine="fsdp2",
        zero_stage=stage,
        engine_config=PLACEMENTS[placed](),
        sequence_parallel=SIZE,
        progress=False,
        **axes,  # type: ignore[arg-type]
    )
    _attach_context_parallel_hooks(model)
    model.train()
    tensors, accumulation = axes.get("tensor_parallel", 1), 2
    groups = dist.get_world_size() // (SIZE * tensors)
    mesh = init_device_mesh("cpu", (groups, SIZE, tensors), mesh_dim_names=("batch", "cp", "tp"))["cp"]
    rows, own_batch = ROWS // (groups * accumulation), dist.get_rank() // (SIZE * tensors)
    optim, trace = optimizer(model), Trace()
    for batch in steps("padded"):
        wanted = shifted(batch["labels"])
        predicted, total = (wanted != IGNORED).sum(), torch.zeros(())
        for part in range(accumulation):
            first = (own_batch * accumulation + part) * rows
            own = [
                tensor[first : first + rows].clone()
                for tensor in (batch["input_ids"], batch["position_ids"], wanted)
            ]
            with context_parallel(mesh, buffers=own, buffer_seq_dims=[1] * 3, no_restore_buffers=set(own)):
                logits = model(own[0], position_ids=own[1], use_cache=False).logits
                loss = loss_of(logits, own[2]) / predicted
                # fully_shard takes the mean over all ranks that have tokens of their own.
                (loss * groups * SIZE).backward()
            total += loss.detach()
        if not trace.gradients:
            trace.gradients = {name: whole(p.grad) for name, p in model.named_parameters()}
        dist.all_reduce(total)
        trace.losses.append(total.item() / tensors)
        trace.norms.append(clip(model))
        optim.step()
        optim.zero_grad()
    for name, value in zerostart.full_tensors(model, rank=None):
        assert value is not None
        trace.weights[name] = value
    return trace
