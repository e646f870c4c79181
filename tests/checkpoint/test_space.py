"""Free space: it is looked at before anything is written, on the file system that the files will be on."""

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


def module() -> torch.nn.Module:
    weights = {"weight": torch.ones(256, 64)}
    return zerostart.load(
        weights, lambda: torch.nn.Linear(64, 256, bias=False), engine="fsdp2", progress=False
    )


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch):
    """What the kernel says is free from now on."""

    def use(nbytes: int) -> None:
        told = types.SimpleNamespace(f_bavail=nbytes // KIB, f_frsize=KIB, f_blocks=10**9)
        monkeypatch.setattr(os, "statvfs", lambda _: told)

    return use


def test_a_place_that_is_not_there_yet_is_on_the_file_system_above(tmp_path: Path) -> None:
    found = free_space(tmp_path / "not" / "there")
    assert found is not None
    assert abs(found - shutil.disk_usage(tmp_path).free) < 1 << 30, "others write meanwhile"
    assert free_space("/proc") is None, "which has no blocks"
    assert free_space(tmp_path / ("x" * 300) / "y") is None, "which no file system takes"


def test_nothing_is_begun_where_there_is_no_room(free, tmp_path: Path) -> None:
    model = module()  # 64 KiB, as much again for each of two moments, and random states
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 64)).sum().backward()
    optimizer.step()
    free(100 * KIB)
    with pytest.raises(WriteError, match=r"state takes 2\d\d\.\d kB, and 102\.4 kB are free"):
        zerostart.save_state(tmp_path / "state", model, optimizer)
    assert list(tmp_path.iterdir()) == []
    zerostart.save(model, tmp_path / "model")
    free(10 * KIB)
    with pytest.raises(WriteError, match=r"save takes 65\.\d kB, and 10\.2 kB are free"):
        zerostart.save(model, tmp_path / "again")
    assert [entry.name for entry in tmp_path.iterdir()] == ["model"]
