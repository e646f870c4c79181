"""A model brought to another one's weights in memory: as if it had been loaded from what ``save`` writes."""

from pathlib import Path
from typing import Any

import pytest
import torch

import zerostart
from tests.identity.test_edited_masters import Case, halves, kept, masters, step
from tests.parity import checkpoint
from tests.ranks import run_ranks
from tests.tiny import TinyCheckpoints

BF16 = torch.bfloat16
FSDP2 = {"engine": "fsdp2"}


def local_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """What this rank holds of each parameter, and buffers."""
    found = {}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        held = getattr(tensor, "ds_tensor", None)
        found[name] = held.data if held is not None else getattr(tensor.data, "_local_tensor", tensor.data)
    return found


def differing(model: torch.nn.Module, other: torch.nn.Module) -> list[str]:
    found, expected = local_tensors(model), local_tensors(other)
    assert found.keys() == expected.keys()
    return [name for name in found if not torch.equal(found[name], expected[name])]


def reshard(path: Path, out: Path, source: dict[str, Any], target: dict[str, Any]) -> None:
    model = zerostart.load(path, progress=False, **source)
    student = zerostart.load(path, progress=False, **target)
    with zerostart.refit(model, student) as refitter:
        for version in (1, 2):
            torch.manual_seed(version)
            for tensor in local_tensors(model).values():
                tensor.mul_(-1.375)
            zerostart.save(model, out / str(version))
            report = refitter.push()
            assert report.version == version
            expected = zerostart.load(out / str(version), progress=False, **target)
            assert differing(student, expected) == []


CASES: dict[str, tuple[str, torch.dtype, int, dict[str, Any], dict[str, Any]]] = {
    "zero3 to fsdp2": ("qwen3", BF16, 2, {"zero_stage": 3}, FSDP2),
    "fsdp2 in fp32 to zero2 in bf16": ("qwen3", torch.float32, 2, FSDP2, {"zero_stage": 2, "dtype": BF16}),
    "fsdp2 in bf16 to zero3 in fp32": ("flint", BF16, 2, FSDP2, {"zero_stage": 3, "dtype": torch.float32}),
    "experts to tensors": (
        "qwen3_moe_heads", BF16, 4, {**FSDP2, "expert_parallel": 2}, {**FSDP2, "tensor_parallel": 2},
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_target_is_as_loaded_from_a_save(case: str, checkpoints: TinyCheckpoints, tmp_path: Path) -> None:
    kind, dtype, ranks, source, target = CASES[case]
    run_ranks(reshard, ranks, checkpoints(kind, dtype), tmp_path, source, target, timeout=150)


def trained_target(path: Path, stage: int) -> list[str]:
    import deepspeed

    config = Case(stage).config
    model = zerostart.load(path, zero_stage=stage, engine_config=config, progress=False)
    optimizer = torch.optim.AdamW(model.parameters())
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    step(engine, 1)
    was, low = masters(engine), halves(model)
    source = zerostart.load(path, engine="fsdp2", dtype=BF16, progress=False)
    with zerostart.refit(engine, source) as back:
        back.push()
    for tensor in local_tensors(source).values():
        tensor.view(-1)[::7] += 0.5
    with zerostart.refit(source, engine) as refitter:
        refitter.push()
    now = halves(model)
    assert any(not torch.equal(now[name], low[name]) for name in now)
    whole = {name: parameter.full_tensor() for name, parameter in source.named_parameters()}
    wrong = [name for name in whole if name in now and not torch.equal(whole[name], now[name])]
    return [*wrong, *kept(was, low, masters(engine), now)]


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
def test_masters_follow_what_has_changed(stage: int, tmp_path: Path) -> None:
    found = run_ranks(trained_target, 2, checkpoint("qwen3", tmp_path), stage, timeout=150)
    assert found == [[], []]
