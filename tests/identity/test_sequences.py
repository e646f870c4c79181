"""Ranks that share sequences train as one process that sees the whole batch."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import zerostart
from tests.identity.test_parallel_deepspeed import gradients
from tests.parity import CLIP, Trace, checkpoint, differences, optimizer
from tests.ranks import run_ranks
from tests.sequences import IGNORED, ROWS, alone, loss_of, part_of, shifted, steps


def wider(*cases: tuple[Any, ...]) -> list[Any]:
    return [pytest.param(*case, marks=pytest.mark.slow) for case in cases]


@pytest.mark.parametrize(
    ("kind", "stage", "world"),
    [
        ("packed", 3, 2),
        *wider(("packed", 1, 2), ("padded", 3, 2), ("packed", 2, 2), ("padded", 2, 2)),
        *wider(*((kind, stage, 4) for kind in ("packed", "padded") for stage in (2, 3))),
    ],
)
def test_heads_travel(kind: str, stage: int, world: int, folder: Path) -> None:
    path = checkpoint("qwen3", folder)
    wanted = run_ranks(alone, 1, path, kind)[0]
    for found in run_ranks(train, world, path, kind, stage):
        assert differences(found, wanted) == []


@pytest.mark.slow
def test_registered_by_the_name_of_the_model(folder: Path) -> None:
    """Before it is loaded, as DeepSpeed's documentation has it."""
    path = checkpoint("qwen3", folder)
    wanted = run_ranks(alone, 1, path, "packed")[0]
    for found in run_ranks(train, 2, path, "packed", 2, 2, 1, None, True):
        assert differences(found, wanted) == []


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["packed", "padded"])
def test_windows_slide(kind: str, folder: Path) -> None:
    """A window of 4 tokens in one of two layers, within a packed document and in padded sequences."""
    window = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}
    path = checkpoint("qwen3", folder, **window)
    wanted = run_ranks(alone, 1, path, kind)[0]
    for found in run_ranks(train, 2, path, kind, 3):
        assert differences(found, wanted) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("experts", "stage", "world"), [(2, 2, 2), (2, 3, 2), (2, 2, 4), (2, 3, 4), (4, 2, 4), (4, 3, 4)]
)
def test_experts_and_heads(experts: int, stage: int, world: int, folder: Path) -> None:
    path = checkpoint("qwen3_moe", folder)
    wanted = run_ranks(alone, 1, path, "packed")[0]
    for found in run_ranks(train, world, path, "packed", stage, 2, experts):
        assert differences(found, wanted) == []


@pytest.mark.slow
def test_others_attend_by_themselves(folder: Path) -> None:
    """A teacher, generation, and a second model whose sequences are shared, beside one of theirs."""
    paths = checkpoint("qwen3", folder, num_key_value_heads=1), checkpoint("llama", folder)
    for teacher, generated, refused, again in run_ranks(beside, 2, *paths):
        assert teacher == generated == ""
        assert "LlamaForCausalLM has 4 query heads and 2 key heads" in refused
        assert "LlamaForCausalLM cannot share sequences beside another model" in again


def beside(path: Path, other: Path) -> tuple[str, str, str, str]:
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF
    from transformers import AutoModelForCausalLM

    def differing(found: torch.Tensor, wanted: torch.Tensor) -> str:
        return "" if torch.equal(found, wanted) else f"{found} for {wanted}"

    rank = dist.get_rank()
    # Each rank has sequences of its own, and some padding before them.
    tokens = torch.randint(3, 96, (2, 6), generator=torch.Generator().manual_seed(rank))
    mask = torch.ones_like(tokens)
    mask[0, :2] = 0
    own = {"input_ids": tokens, "attention_mask": mask}
    more = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
    alone, teacher = (AutoModelForCausalLM.from_pretrained(p).eval() for p in (path, other))
    with torch.no_grad():
        wanted = teacher(**own).logits
    options: dict[str, Any] = {"engine": "deepspeed", "zero_stage": 2, "sequence_parallel": 2}
    model = zerostart.load(path, progress=False, **options)
    UlyssesSPAttentionHF.register_with_transformers(model, "sdpa", 2, 4)
    batch = next(steps("packed"))
    part = part_of(batch, rank, 2)
    logits = model(part["input_ids"], position_ids=part["position_ids"], use_cache=False).logits
    whole = alone(batch["input_ids"], position_ids=batch["position_ids"], use_cache=False).logits
    assert torch.allclose(logits, whole.chunk(2, dim=1)[rank], atol=1e-5)
    with torch.no_grad():
        as_before = differing(teacher(**own).logits, wanted)
    generated = differing(model.eval().generate(**own, **more), alone.generate(**own, **more))
    same = copy.deepcopy(model)
    assert torch.equal(
        same(part["input_ids"], position_ids=part["position_ids"], use_cache=False).logits, logits
    )
    second = zerostart.load(other, progress=False, **options)
    with pytest.raises(zerostart.errors.ConfigError) as caught:
        second(part["input_ids"], position_ids=part["position_ids"], use_cache=False)
    with pytest.raises(zerostart.errors.ConfigError) as again:
        UlyssesSPAttentionHF.register_with_transformers(second, "sdpa", 2, 4)
    return as_before, generated, str(caught.value), str(again.value)


PLACED: dict[str, tuple[int, dict[str, Any]]] = {
    "states on the host": (3, {"offload_optimizer": {"device": "cpu"}}),
    "states on the host at 2": (2, {"offload_optimizer": {"device": "cpu"}}),
    "parameters on the host": (3, {"offload_param": {"device": "cpu"}}),
    "secondary partitions": (3, {"zero_hpz_partition_size": 2}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PLACED)
def test_other_placements(name: str, folder: Path) -> None:
    path, (stage, zero) = checkpoint("qwen3", folder), PLACED[name]
    wanted = run_ranks(alone, 1, path, "packed")[0]
    for found in run_ranks(train, 4, path, "packed", stage, 2, 1, zero):
        assert differences(found, wanted) == []


def train(
    path: Path,
    kind: str,
    stage: int,
    accumulation: int = 2,
    experts: int = 1,
    zero: dict[str, Any] | None = None,
    first: bool = False,
) -> Trace:
    """``first``: Ulysses is registered by the model's name, before it is loaded."""
    import deepspeed
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

    size, rank = 2, dist.get_rank()
    groups = dist.get_world_size() // size
    rows = ROWS // (groups * accumulation)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": rows,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": CLIP,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, **(zero or {})},
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
    }
    register = UlyssesSPAttentionHF.register_with_transformers
    mpu = None
    if first:
        deepspeed.init_distributed()
        mpu = register(str(path), "sdpa", size, rows)
    model = zerostart.load(
        path,
        engine="deepspeed",
        zero_stage=stage,
        engine_config=config,
        sequence_parallel=size,
        expert_parallel=experts,
        progress=False,
    )
    model.train()
    if mpu is None:
        with pytest.raises(zerostart.errors.ConfigError, match="does not share sequences yet"):
            model(input_ids=torch.ones(1, 2, dtype=torch.int64))
        mpu = register(model, "sdpa", size, rows)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer(model), config=config, mpu=mpu)
    trace = Trace()
    for batch in steps(kind):
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
                trace.gradients = gradients(model, experts)
            engine.step()
        dist.all_reduce(total)
        trace.losses.append(total.item())
        trace.norms.append(float(engine.get_global_grad_norm()))
    for name, value in zerostart.full_tensors(engine, rank=None):
        assert value is not None
        trace.weights[name] = value
    return trace
