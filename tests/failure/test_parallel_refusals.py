"""Meshes that an engine or a model cannot serve are refused on every rank, and never loaded otherwise."""

from __future__ import annotations

from pathlib import Path

import pytest

import zerostart
from ranks import run_ranks
from tiny import TinyCheckpoints

CASES = [
    ("deepspeed", {"expert_parallel": 3}, "expert_parallel=3 does not divide the 2 ranks"),
    ("deepspeed", {"tensor_parallel": 2}, "tensor_parallel=2 is not available on deepspeed"),
    ("fsdp2", {"tensor_parallel": 2}, "does not divide the 3 of num_attention_heads"),
    ("fsdp2", {"expert_parallel": 2, "tensor_parallel": 2}, "expert_parallel=2 with tensor_parallel=2"),
]


@pytest.mark.parametrize(("engine", "sizes", "text"), CASES)
def test_refused_with_the_remedy(
    engine: str, sizes: dict[str, int], text: str, checkpoints: TinyCheckpoints, deepspeed_op: None
) -> None:
    for message in run_ranks(refused, 2, engine, checkpoints("qwen3_moe"), sizes):
        assert message is not None
        assert text in message
        assert "use " in message


def refused(engine: str, path: Path, sizes: dict[str, int]) -> str | None:
    try:
        zerostart.load(path, engine=engine, progress=False, **sizes)
    except zerostart.ZerostartError as error:
        return str(error)
    return None
