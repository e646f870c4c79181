"""What comes after a save in the background, while it still writes: reading it, and the end."""

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


def made(value: float) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    def build() -> torch.nn.Module:
        return torch.nn.Linear(64, 64)

    weights = {"weight": torch.full((64, 64), value), "bias": torch.zeros(64)}
    model = zerostart.load(weights, build, engine="fsdp2", progress=False)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def slowly(wanted: bool, seconds: float = 0.2) -> None:
    """Have each write take its time, and fail where nothing is to be ``wanted``."""
    pwrite = os.pwrite

    def slow(*arguments: Any) -> int:
        time.sleep(seconds)
        if not wanted:
            raise OSError(28, "No space left on device")
        return pwrite(*arguments)

    os.pwrite = slow


def read_at_once(folder: Path) -> None:
    pwrite = os.pwrite
    old, new = made(1.0), made(2.0)
    for reading in ("state", "verify", "diff", "load"):
        place = folder / reading
        zerostart.save_state(place, *old, extra="old")
        slowly(True)
        handle = zerostart.save_state(place, *new, extra="new", wait=False)
        assert not handle.done()
        if reading == "state":
            assert zerostart.load_state(place, *made(0.0)) == "new"
        elif reading == "verify":
            zerostart.verify(place)
            assert handle.done()
        elif reading == "diff":
            assert zerostart.diff(place, place / "model").same
        else:
            loaded = zerostart.load(place, lambda: torch.nn.Linear(64, 64), engine="fsdp2", progress=False)
            assert zerostart.digest(loaded) == zerostart.digest(new[0])
        os.pwrite = pwrite
        handle.wait()
        dist.barrier()
    # What failed is told, and the old one is there.
    slowly(dist.get_rank() != 1)
    handle = zerostart.save_state(folder / "state", *old, extra="third", wait=False)
    with pytest.raises(WriteError, match="No space left"):
        zerostart.load_state(folder / "state", *old)
    os.pwrite = pwrite
    assert zerostart.load_state(folder / "state", *old) == "new"
    assert not any(name.endswith("destroy_process_group") for name in active())


def end_at_once(folder: Path, early: bool, wanted: bool) -> None:
    """With the function that was imported before there was a save, and as torch has it now."""
    slowly(wanted)
    zerostart.save_state(folder, *made(2.0), extra="new", wait=False)
    end = destroy_process_group if early else dist.destroy_process_group
    if wanted:
        end()
    else:
        with pytest.raises(WriteError, match="No space left"):
            end()
    assert not dist.is_initialized()


@pytest.mark.slow
def test_who_reads_a_state_waits_for_it(tmp_path: Path) -> None:
    run_ranks(read_at_once, 2, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("early", "wanted"), [(True, True), (False, False)])
def test_the_end_of_the_group_waits_for_a_save(tmp_path: Path, early: bool, wanted: bool) -> None:
    run_ranks(end_at_once, 2, tmp_path / "state", early, wanted)
    assert (tmp_path / "state" / "state.json").exists() == wanted
    if wanted:
        zerostart.verify(tmp_path / "state")


SCRIPT = """
import os, sys, time, torch, zerostart
pwrite = os.pwrite
def slow(*arguments):
    time.sleep(0.2)
    if sys.argv[2] != "well":
        raise OSError(28, "No space left on device")
    return pwrite(*arguments)
def save():
    os.pwrite = slow
    zerostart.save_state(sys.argv[1], torch.nn.Linear(4, 4), wait=False)
save()
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["well", "full"])
def test_the_end_of_the_process_waits_for_a_save(tmp_path: Path, how: str) -> None:
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "state"), how]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    if how == "well":
        assert ended.returncode == 0, ended.stderr
        zerostart.verify(tmp_path / "state")
    else:
        assert ended.returncode == 1
        assert "No space left" in ended.stderr
