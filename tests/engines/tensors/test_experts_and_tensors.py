"""Experts and tensors that DeepSpeed's ranks share: each reads its part, and all train as one process."""

from pathlib import Path
from typing import Any

import pytest
import torch

import zerostart
from tests.engines.tensors.layouts import Course, Layout, trained
from tests.parity import alone, checkpoint, differences
from tests.ranks import run_ranks

SLOW = pytest.mark.slow


def check(courses: list[Course], world: int, folder: Path) -> None:
    """Compare each course on every rank with one process, and what is saved with what was trained."""
    from transformers import AutoModelForCausalLM

    for number, traces in enumerate(zip(*run_ranks(trained, world, courses, folder), strict=True)):
        path = courses[number][0]
        wanted = run_ranks(alone, 1, path)[0]
        for trace in traces:
            assert (courses[number], differences(trace, wanted)) == (courses[number], [])
        saved = AutoModelForCausalLM.from_pretrained(folder / f"{number}-saved").state_dict()
        assert saved.keys() == traces[0].weights.keys()
        assert all(torch.equal(saved[name], tensor) for name, tensor in traces[0].weights.items())


@pytest.mark.slow
def test_experts_and_tensors_train_as_one_process(tmp_path: Path) -> None:
    check([(checkpoint("qwen3_moe", tmp_path), Layout(3, 2), Layout(1, 4))], 4, tmp_path)


@pytest.mark.slow
@SLOW
@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_every_stage(kind: str, stage: int, tmp_path: Path) -> None:
    path = checkpoint(kind, tmp_path)
    check([(path, Layout(stage, 2), Layout(stage, 2)), (path, Layout(stage, 4), None)], 4, tmp_path)
    check([(path, Layout(stage, 2), Layout(3, 2))], 2, tmp_path / "two")


@pytest.mark.slow
@SLOW
def test_more_ranks_share_tensors_than_experts(tmp_path: Path) -> None:
    path = checkpoint("deepseek_v3", tmp_path)
    check([(path, Layout(stage, 2, 4), None) for stage in (2, 3)], 4, tmp_path)


def test_a_rank_reads_its_part(tmp_path: Path) -> None:
    """Tensors whose rows are longer than what is read through between two of them."""
    sizes: dict[str, Any] = {"hidden_size": 1024, "head_dim": 512, "num_hidden_layers": 1}
    path = checkpoint("mixtral", tmp_path, **sizes)
    experts = 8 * 3 * 8 * 1024 * 4
    tensors = (2 * 4 * 512 + 2 * 2 * 512 + 96) * 1024 * 4
    rest = (96 + 8 + 3) * 1024 * 4  # The embedding, the router and the norms.
    assert zerostart.plan(path, world_size=1).ranks[0].read_bytes == experts + tensors + rest
    options = {"expert_parallel": 4, "tensor_parallel": 2, "world_size": 4}
    for rank in zerostart.plan(path, zero_stage=2, **options).ranks:
        assert rank.read_bytes <= 1.01 * (experts / 4 + tensors / 2 + rest)
    for rank in zerostart.plan(path, zero_stage=3, **options).ranks:
        assert rank.read_bytes <= 1.01 * (experts + tensors + 2 * rest) / 4
