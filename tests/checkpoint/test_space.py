"""Free space: it is looked at before anything is written, on the file system that the files will be on."""

import logging
import os
import shutil
import types
from pathlib import Path

import pytest
import torch

import zerostart
from zerostart.checkpoint.write.folders import free_space
from zerostart.errors import WriteError
from zerostart.training.config.configuration import TrainConfig
from zerostart.training.loop.output_directory import check_room

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
    with pytest.raises(WriteError, match=r"saved takes 65\.\d kB, and 10\.2 kB are free"):
        zerostart.save(model, tmp_path / "again")
    assert [entry.name for entry in tmp_path.iterdir()] == ["model"]


def test_a_run_looks_before_it_begins(free, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = module()
    config = TrainConfig.model_validate(
        {
            "task": {"name": "flow-matching"},
            "model": {"source": "any"},
            "train": {"steps": 1, "batch_size": 1, "learning_rate": 0.1},
            "output": {"directory": str(tmp_path)},
            "checkpoint": {"every": 1, "keep": 2},
        }
    )
    free(60 * KIB)
    with pytest.raises(WriteError, match=r"the trained model takes 65\.5 kB"):
        check_room(config, model, tmp_path)
    # The model, and three times the model and two moments: 10 times 64 KiB.
    free(639 * KIB)
    with caplog.at_level(logging.WARNING, "zerostart"):
        check_room(config, model, tmp_path)
        assert "may need 655.4 kB" in caplog.text
        caplog.clear()
        free(640 * KIB)
        check_room(config, model, tmp_path)
    assert caplog.text == ""
