"""Ranks that share sequences train as one process that sees the whole batch."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import zerostart
from tests.identity.parallel import Layout, clip, gradients, whole
from tests.parity import CLIP, Trace, checkpoint, differences, optimizer
from tests.ranks import run_ranks
from tests.sequences import IGNORED, ROWS, alone, loss_of, part_of, shifted, steps

FSDP2 = partial(Layout, "fsdp2")
SLOW = pytest.mark.slow
SIZE = 2
HOST = {"device": "cpu"}
WINDOW = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}


@dataclass(frozen=True)
class Case:
    """A training on DeepSpeed: batches, stage, ranks, and what else is set."""

    kind: str
    stage: int
    world: int
    experts: int = 1
    zero: tuple[tuple[str, Any], ...] = ()
    options: tuple[tuple[str, Any], ...] = ()
    first: bool = False


def others() -> Iterator[Case]:
    for stage in (1, 2):
        yield Case("packed", stage, 2)
    for stage in (2, 3):
        yield Case("padded", stage, 4)
        yield Case("packed", stage, 2, experts=2)
        yield Case("packed", stage, 4, experts=4)
    # A window of 4 tokens in one of two layers, within a packed document and in padded sequences.
    for kind in ("packed", "padded"):
        yield Case(kind, 3, 2, options=tuple(WINDOW.items()))
    # Ulysses is registered by the name of the model before the load, as DeepSpeed's documentation has it.
    yield Case("packed", 2, 2, first=True)
    for zero in (("offload_optimizer", HOST), ("offload_param", HOST), ("zero_hpz_partition_size", 2)):
        yield Case("packed", 3, 4, zero=(zero,))


@pytest.mark.parametrize("case", [Case("packed", 3, 2), *(pytest.param(c, marks=SLOW) for c in others())])
def test_ulysses_trains_as_one_process(case: Case, folder: Path) -> None:
    path = checkpoint("qwen3_moe" if case.experts > 1 else "qwen3", folder, **dict(case.options))
    wanted = run_ranks(alone, 1, path, case.kind)[0]
    for found in run_ranks(train, case.world, path, case):
        assert differences(found, wanted) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "world", "layout"),
    [
        ("mixtral", 4, FSDP2(experts=2, tensors=2)),
        ("mixtral", 8, FSDP2(experts=2, tensors=2, settings="all")),
        *(("qwen3", 2, FSDP2(stage=stage)) for stage in (1, 2, 3)),
        *(("qwen3_moe", 4, FSDP2(experts=2, settings=name)) for name in ("offload", "replicas", "")),
        *(("qwen3", 4, FSDP2(tensors=2, settings=name)) for name in ("offload", "dimensions")),
    ],
    ids=str,
)
def test_context_parallelism_trains_as_one_process(
    kind: str, world: int, layout: Layout, folder: Path
) -> None:
    path = checkpoint(kind, folder)
    wanted = run_ranks(alone, 1, path, "padded")[0]
    for found in run_ranks(train_fsdp2, world, path, layout):
        assert differences(found, wanted) == []


def train(path: Path, case: Case, accumulation: int = 2) -> Trace:
    import deepspeed
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

    stage, size, rank = case.stage, SIZE, dist.get_rank()
    groups = dist.get_world_size() // size
    rows = ROWS // (groups * accumulation)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": rows,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": CLIP,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, **dict(case.zero)},
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
    }
    register = UlyssesSPAttentionHF.register_with_transformers
    mpu = None
    if case.first:
        deepspeed.init_distributed()
        mpu = register(str(path), "sdpa", size, rows)
    model = zerostart.load(
        path,
        engine="deepspeed",
        zero_stage=stage,
        engine_config=config,
        sequence_parallel=size,
        expert_parallel=case.experts,
        progress=False,
    )
    model.train()
    if mpu is None:
        with pytest.raises(zerostart.errors.ConfigError, match="does not share sequences yet"):
            model(input_ids=torch.ones(1, 2, dtype=torch.int64))
        mpu = register(model, "sdpa", size, rows)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer(model), config=config, mpu=mpu)
    trace = Trace()
    for batch in steps(case.kind):
        predicted = (shifted(batch["labels"]) != IGNORED).sum()
        total = torch.zeros(())
        for part in range(accumulation):
            first = (rank // size * accumulation + part) * rows
            own = part_of({k: v[first : first + rows] for k, v in batch.items()}, rank % size, size)
            logits = engine(own["input_ids"], position_ids=own["position_ids"], use_cache=False).logits
            loss = loss_of(logits, own["labels"]) / predicted
            # DeepSpeed takes the mean over all ranks at stage 3, over those with a batch of their own before.
            mean = dist.get_world_size() if stage == 3 else groups
            engine.backward(loss * mean * accumulation)
            total += loss.detach()
            if part == accumulation - 1 and not trace.gradients:
                trace.gradients = gradients(model, case.experts)
            engine.step()
        dist.all_reduce(total)
        trace.losses.append(total.item())
        trace.norms.append(float(engine.get_global_grad_norm()))
    for name, value in zerostart.full_tensors(engine, rank=None):
        assert value is not None
        trace.weights[name] = value
    return trace


def train_fsdp2(path: Path, layout: Layout) -> Trace:
    from accelerate.big_modeling import _attach_context_parallel_hooks
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel

    options: dict[str, Any] = {"sequence_parallel": SIZE, "progress": False}
    model = zerostart.load(path, **layout.options(), **options)
    _attach_context_parallel_hooks(model)
    model.train()
    tensors, accumulation = layout.tensors, 2
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
