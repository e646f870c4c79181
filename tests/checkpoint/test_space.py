"""Check free space before writing."""

import os
import shutil
import types
from pathlib import Path

import pytest
import torch

import zerostart
from zerostart.checkpoint.write.folders import free_space
from zerostart.errors import WriteError

KIB = 1024


def load_linear() -> torch.nn.Module:
    weights = {"weight": torch.ones(256, 64)}
    return zerostart.load(
        weights, lambda: torch.nn.Linear(64, 256, bias=False), engine="fsdp2", progress=False
    )


@pytest.fixture
def set_free_space(monkeypatch: pytest.MonkeyPatch):
    """Function that sets the reported free space."""

    def use(nbytes: int) -> None:
        status = types.SimpleNamespace(f_bavail=nbytes // KIB, f_frsize=KIB, f_blocks=10**9)
        monkeypatch.setattr(os, "statvfs", lambda _: status)

    return use


def test_free_space_of_a_missing_folder_is_that_of_its_parent(tmp_path: Path) -> None:
    free = free_space(tmp_path / "not" / "there")
    assert free is not None
    assert abs(free - shutil.disk_usage(tmp_path).free) < 1 << 30, "other processes write meanwhile"
    assert free_space("/proc") is None, "it has no blocks"
    assert free_space(tmp_path / ("x" * 300) / "y") is None, "the name is too long"


def test_save_without_enough_space_writes_nothing(set_free_space, tmp_path: Path) -> None:
    model = load_linear()  # 64 KiB, as much again for each of two moments, and random states
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 64)).sum().backward()
    optimizer.step()
    set_free_space(100 * KIB)
    with pytest.raises(WriteError, match=r"state takes 2\d\d\.\d kB, and 102\.4 kB are free"):
        zerostart.save_state(tmp_path / "state", model, optimizer)
    assert list(tmp_path.iterdir()) == []
    zerostart.save(model, tmp_path / "model")
    set_free_space(10 * KIB)
    with pytest.raises(WriteError, match=r"save takes 65\.\d kB, and 10\.2 kB are free"):
        zerostart.save(model, tmp_path / "again")
    assert [entry.name for entry in tmp_path.iterdir()] == ["model"]
