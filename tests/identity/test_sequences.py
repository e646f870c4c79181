"""Sequence parallelism trains like one process."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import zerostart
from tests.identity.parallel import Layout, clip_gradients, full_tensor, gather_gradients
from tests.parity import CLIP, Trace, checkpoint, differences, optimizer
from tests.ranks import run_ranks
from tests.sequences import IGNORED, ROWS, part_of, shift, steps, summed_loss, train_alone

FSDP2 = partial(Layout, "fsdp2")
SLOW = pytest.mark.slow
SIZE = 2
HOST = {"device": "cpu"}
WINDOW = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}


@dataclass(frozen=True)
class Case:
    """A DeepSpeed training: batches, stage, ranks and options."""

    kind: str
    stage: int
    world: int
    experts: int = 1
    zero: tuple[tuple[str, Any], ...] = ()
    options: tuple[tuple[str, Any], ...] = ()
    registered_first: bool = False


def slow_cases() -> Iterator[Case]:
    for stage in (1, 2):
        yield Case("packed", stage, 2)
    for stage in (2, 3):
        yield Case("padded", stage, 4)
        yield Case("packed", stage, 2, experts=2)
        yield Case("packed", stage, 4, experts=4)
    # A window of 4 tokens in one of two layers, within a packed document and in padded sequences.
    for kind in ("packed", "padded"):
        yield Case(kind, 3, 2, options=tuple(WINDOW.items()))
    # As in DeepSpeed's documentation, Ulysses is registered by the model's name before the load.
    yield Case("packed", 2, 2, registered_first=True)
    for zero in (("offload_optimizer", HOST), ("offload_param", HOST), ("zero_hpz_partition_size", 2)):
        yield Case("packed", 3, 4, zero=(zero,))


@pytest.mark.parametrize("case", [Case("packed", 3, 2), *(pytest.param(c, marks=SLOW) for c in slow_cases())])
def test_ulysses_trains_as_one_process(case: Case, folder: Path) -> None:
    path = checkpoint("qwen3_moe" if case.experts > 1 else "qwen3", folder, **dict(case.options))
    expected = run_ranks(train_alone, 1, path, case.kind)[0]
    for trace in run_ranks(train, case.world, path, case):
        assert differences(trace, expected) == []


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
    expected = run_ranks(train_alone, 1, path, "padded")[0]
    for trace in run_ranks(train_fsdp2, world, path, layout):
        assert differences(trace, expected) == []


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
    if case.registered_first:
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
        predicted = (shift(batch["labels"]) != IGNORED).sum()
        total = torch.zeros(())
        for part in range(accumulation):
            row = (rank // size * accumulation + part) * rows
            inputs = part_of({k: v[row : row + rows] for k, v in batch.items()}, rank % size, size)
            logits = engine(inputs["input_ids"], position_ids=inputs["position_ids"], use_cache=False).logits
            loss = summed_loss(logits, inputs["labels"]) / predicted
            # DeepSpeed averages over all ranks at stage 3, and over ranks with different batches below.
            mean = dist.get_world_size() if stage == 3 else groups
            engine.backward(loss * mean * accumulation)
            total += loss.detach()
            if part == accumulation - 1 and not trace.gradients:
                trace.gradients = gather_gradients(model, case.experts)
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
    rows, group = ROWS // (groups * accumulation), dist.get_rank() // (SIZE * tensors)
    optim, trace = optimizer(model), Trace()
    for batch in steps("padded"):
        labels = shift(batch["labels"])
        predicted, total = (labels != IGNORED).sum(), torch.zeros(())
        for part in range(accumulation):
            row = (group * accumulation + part) * rows
            data = [
                tensor[row : row + rows].clone()
                for tensor in (batch["input_ids"], batch["position_ids"], labels)
            ]
            with context_parallel(mesh, buffers=data, buffer_seq_dims=[1] * 3, no_restore_buffers=set(data)):
                logits = model(data[0], position_ids=data[1], use_cache=False).logits
                loss = summed_loss(logits, data[2]) / predicted
                # fully_shard averages over all ranks with different tokens.
                (loss * groups * SIZE).backward()
            total += loss.detach()
        if not trace.gradients:
            trace.gradients = {name: full_tensor(p.grad) for name, p in model.named_parameters()}
        dist.all_reduce(total)
        trace.losses.append(total.item() / tensors)
        trace.norms.append(clip_gradients(model))
        optim.step()
        optim.zero_grad()
    for name, value in zerostart.full_tensors(model, rank=None):
        assert value is not None
        trace.weights[name] = value
    return trace
