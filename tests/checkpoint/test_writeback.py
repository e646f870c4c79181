"""The disk follows what is written; rows go to their places, and nothing beside them."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from zerostart.checkpoint.write import writer as writing
from zerostart.checkpoint.write.folders import begin_writeback
from zerostart.checkpoint.write.shards import plan_shards
from zerostart.checkpoint.write.writer import CheckpointWriter
from zerostart.errors import CheckpointError

SHAPE = (64, 48)


def bytes_of(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.view(-1).view(torch.uint8).numpy())


@pytest.mark.parametrize("durable", [True, False])
def test_what_was_written_is_begun(durable: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All but what is less than the step; of what does not have to be on the disk, nothing."""
    begun: set[int] = set()

    def begin(handle: int, low: int, high: int) -> None:
        begun.update(range(low, high))
        begin_writeback(handle, low, high)

    monkeypatch.setattr(writing, "AHEAD", 1000)
    monkeypatch.setattr(writing, "begin_writeback", begin)
    whole = torch.arange(64 * 48, dtype=torch.int32).view(SHAPE)
    layout = plan_shards([("t", "I32", SHAPE)])
    with CheckpointWriter(tmp_path, layout, durable=durable) as writer:
        for row in range(64):
            writer.write("t", bytes_of(whole[row]), row * 48 * 4)
    assert torch.equal(load_file(tmp_path / "model.safetensors")["t"], whole)
    place = layout.tensors["t"].offset
    missing = set(range(place, place + whole.nbytes)) - begun
    assert (len(missing) < 1000) if durable else not begun


def test_rows_that_belong_apart(tmp_path: Path) -> None:
    whole = torch.arange(64 * 48, dtype=torch.int32).view(SHAPE)
    with CheckpointWriter(tmp_path, plan_shards([("t", "I32", SHAPE)])) as writer:
        for first, count in ((0, 5), (5, 11), (16, 32)):
            span = bytes_of(whole)[first * 4 : (63 * 48 + first + count) * 4]
            writer.write_rows("t", span, first * 4, count * 4, 48 * 4, 64)
        with pytest.raises(CheckpointError, match="12292 bytes at offset 0 of tensor 't'"):
            writer.write_rows("t", bytes_of(whole), 0, 48 * 4 + 4, 48 * 4, 64)
        assert writer.written == whole.nbytes
    assert torch.equal(load_file(tmp_path / "model.safetensors")["t"], whole)
