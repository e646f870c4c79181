"""Readers and the end wait for a background save."""

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import destroy_process_group

import zerostart
from tests.ranks import run_ranks
from zerostart.errors import WriteError
from zerostart.upstream.patches import active


def make_model(value: float) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    def build() -> torch.nn.Module:
        return torch.nn.Linear(64, 64)

    weights = {"weight": torch.full((64, 64), value), "bias": torch.zeros(64)}
    model = zerostart.load(weights, build, engine="fsdp2", progress=False)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def slow_down_writes(succeeds: bool, seconds: float = 0.2) -> None:
    """Make each write take ``seconds``, and fail unless ``succeeds``."""
    pwrite = os.pwrite

    def slow_pwrite(*arguments: Any) -> int:
        time.sleep(seconds)
        if not succeeds:
            raise OSError(28, "No space left on device")
        return pwrite(*arguments)

    os.pwrite = slow_pwrite


def read_during_save(folder: Path) -> None:
    pwrite = os.pwrite
    old, new = make_model(1.0), make_model(2.0)
    for reader in ("state", "verify", "diff", "load"):
        state = folder / reader
        zerostart.save_state(state, *old, extra="old")
        slow_down_writes(True)
        handle = zerostart.save_state(state, *new, extra="new", wait=False)
        assert not handle.done()
        if reader == "state":
            assert zerostart.load_state(state, *make_model(0.0)) == "new"
        elif reader == "verify":
            zerostart.verify(state)
            assert handle.done()
        elif reader == "diff":
            assert zerostart.diff(state, state / "model").same
        else:
            loaded = zerostart.load(state, lambda: torch.nn.Linear(64, 64), engine="fsdp2", progress=False)
            assert zerostart.digest(loaded) == zerostart.digest(new[0])
        os.pwrite = pwrite
        handle.wait()
        dist.barrier()
    # The reader raises the save's error, and the old state is still there.
    slow_down_writes(dist.get_rank() != 1)
    handle = zerostart.save_state(folder / "state", *old, extra="third", wait=False)
    with pytest.raises(WriteError, match="No space left"):
        zerostart.load_state(folder / "state", *old)
    os.pwrite = pwrite
    assert zerostart.load_state(folder / "state", *old) == "new"
    assert not any(name.endswith("destroy_process_group") for name in active())


def end_group_during_save(folder: Path, imported_early: bool, succeeds: bool) -> None:
    """Destroy the group while a save still writes."""
    slow_down_writes(succeeds)
    zerostart.save_state(folder, *make_model(2.0), extra="new", wait=False)
    destroy = destroy_process_group if imported_early else dist.destroy_process_group
    if succeeds:
        destroy()
    else:
        with pytest.raises(WriteError, match="No space left"):
            destroy()
    assert not dist.is_initialized()


@pytest.mark.slow
def test_readers_wait_for_a_background_save(tmp_path: Path) -> None:
    run_ranks(read_during_save, 2, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("imported_early", "succeeds"), [(True, True), (False, False)])
def test_destroying_the_group_waits_for_a_save(tmp_path: Path, imported_early: bool, succeeds: bool) -> None:
    run_ranks(end_group_during_save, 2, tmp_path / "state", imported_early, succeeds)
    assert (tmp_path / "state" / "state.json").exists() == succeeds
    if succeeds:
        zerostart.verify(tmp_path / "state")


SCRIPT = """
import os, sys, time, torch, zerostart
pwrite = os.pwrite
def slow(*arguments):
    time.sleep(0.2)
    if sys.argv[2] != "free":
        raise OSError(28, "No space left on device")
    return pwrite(*arguments)
def save():
    os.pwrite = slow
    zerostart.save_state(sys.argv[1], torch.nn.Linear(4, 4), wait=False)
save()
"""


@pytest.mark.slow
@pytest.mark.parametrize("disk", ["free", "full"])
def test_process_exit_waits_for_a_save(tmp_path: Path, disk: str) -> None:
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "state"), disk]
    process = subprocess.run(command, capture_output=True, text=True, timeout=120)
    if disk == "free":
        assert process.returncode == 0, process.stderr
        zerostart.verify(tmp_path / "state")
    else:
        assert process.returncode == 1
        assert "No space left" in process.stderr
