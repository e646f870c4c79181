"""Compare a weight source with the tensors that ``save`` writes."""

import asyncio
import hashlib
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch

import zerostart
from tests.ranks import run_ranks
from tests.state.saving.test_saving import tensors_in
from tests.state.saving.test_saving_adapters import adapt
from tests.tiny import TinyCheckpoints
from zerostart.refit import pushes, within


def _bits(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().reshape(-1).view(torch.uint8).numpy()).hexdigest()


def _stream(path: Path, out: Path, options: dict[str, Any], lora: bool) -> Any:
    """On one rank: iterate twice, and save."""
    try:
        within.BAND, within.CHUNK, pushes.CHUNK = 1 << 10, 1 << 9, 1 << 9  # tensors in many messages
        model = zerostart.load(path, progress=False, **options)
        adapted = adapt(model, "plain") if lora else model
        zerostart.save(adapted, out, merge_adapters=lora)
        source = zerostart.weight_source(adapted)
        metas = [(meta.name, meta.dtype, meta.shape) for meta in source.metadata()]
        first = [(name, None if t.is_meta else _bits(t), t.dtype, tuple(t.shape)) for name, t in source]
        assert [(name, dtype, shape) for name, _, dtype, shape in first] == metas
        everywhere = zerostart.weight_source(adapted, rank=None)
        return [row[:2] for row in first], [(name, _bits(t)) for name, t in everywhere]
    except Exception:
        return traceback.format_exc()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "lora"),
    [({"engine": "fsdp2"}, True), ({"engine": "deepspeed", "zero_stage": 3}, False)],
    ids=["fsdp2-lora", "zero3"],
)
def test_a_source_yields_what_a_save_writes(
    checkpoints: TinyCheckpoints, tmp_path: Path, options: dict[str, Any], lora: bool
) -> None:
    path = checkpoints("mixtral", torch.bfloat16)
    zero, one = run_ranks(_stream, 2, path, tmp_path / "saved", options, lora, timeout=240)
    assert not isinstance(zero, str), zero
    saved = {name: _bits(tensor) for name, tensor in tensors_in(tmp_path / "saved").items()}
    assert dict(zero[0]) == saved
    assert dict(zero[1]) == dict(one[1]) == saved
    assert [name for name, _ in one[0]] == [name for name, _ in zero[0]]
    assert {bits for _, bits in one[0]} == {None}


def _send_by_verl(path: Path, out: Path) -> tuple[dict[str, str], dict[str, str]]:
    """Save; send with verl's base engine, and in chunks as its other engines do."""
    from verl.checkpoint_engine import CheckpointEngineRegistry
    from verl.checkpoint_engine.base import merge_weight_chunks, split_weight_chunks

    model = adapt(zerostart.load(path, engine="fsdp2", progress=False), "plain")
    zerostart.save(model, out, merge_adapters=True)
    source = zerostart.weight_source(model, rank=None)
    engine = CheckpointEngineRegistry.new("naive", bucket_size=1 << 10)
    engine.send_weights(source)
    received = {name: _bits(tensor) for name, tensor in engine.receive_weights()}

    async def merge() -> dict[str, str]:
        chunks = split_weight_chunks(source, 1 << 10)
        return {name: _bits(tensor) async for name, tensor in merge_weight_chunks(chunks, 1 << 10)}

    return received, asyncio.run(merge())


@pytest.mark.slow
def test_verls_engines_send_what_a_save_writes(checkpoints: TinyCheckpoints, tmp_path: Path) -> None:
    pytest.importorskip("verl.checkpoint_engine")
    path = checkpoints("mixtral", torch.bfloat16)
    for received, merged in run_ranks(_send_by_verl, 2, path, tmp_path / "saved", timeout=240):
        saved = {name: _bits(tensor) for name, tensor in tensors_in(tmp_path / "saved").items()}
        assert received == merged == saved
