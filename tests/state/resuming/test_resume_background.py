"""Saving while training goes on: a checkpoint is of the moment of the call, and no error is lost."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import zerostart
from tests.parity import checkpoint
from tests.ranks import run_ranks
from tests.state.resuming.trainings import Case, Run, train
from zerostart.state.resuming import save_state as checkpointing

FIRST, MORE = 2, 3
CASES = {"FSDP2": Case("fsdp2"), "ZeRO-2": Case("deepspeed", 2, bf16=True), "ZeRO-3": Case("deepspeed")}


def meanwhile(path: Path, folder: Path) -> list[str]:
    wrong = []
    for name, case in CASES.items():
        place = folder / name
        wanted = train(path, case, range(FIRST + MORE), save=place, at=FIRST, wait=False)[FIRST:]
        found = train(path, case, range(FIRST, FIRST + MORE), load=place)
        if found != wanted:
            wrong.append(f"{name}: {found} for {wanted}")
    return wrong


@pytest.mark.slow
def test_the_checkpoint_is_of_the_moment_of_the_call(tmp_path: Path) -> None:
    path = checkpoint("qwen3", tmp_path)
    assert run_ranks(meanwhile, 2, path, tmp_path / "states") == [[], []]


def failing(path: Path, folder: Path) -> None:
    """One rank's disk is full: all ranks hear of it, once, and what was there before stays."""
    run = Run(path, Case("fsdp2"))
    zerostart.save_state(folder / "state", *run.state, extra=1)
    run.step(0)
    pwrite = os.pwrite

    def full(*arguments: Any) -> int:
        raise OSError(28, "No space left on device")

    def broken() -> Any:
        os.pwrite = full if dist.get_rank() == 1 else pwrite
        return zerostart.save_state(folder / "state", *run.state, extra=2, wait=False)

    try:
        handle = broken()
        run.step(1)
        with pytest.raises(zerostart.errors.WriteError, match="No space left"):
            handle.wait()
        handle.wait()
        handle = broken()
        if dist.get_rank() == 0:  # one rank alone asks
            with pytest.raises(zerostart.errors.WriteError, match="No space left"):
                handle.wait()
        with pytest.raises(zerostart.errors.WriteError, match="No space left"):
            zerostart.save_state(folder / "state", *run.state)
    finally:
        os.pwrite = pwrite
    dist.barrier()  # The first rank removes what was begun.
    assert [path.name for path in folder.iterdir()] == ["state"]
    assert zerostart.load_state(folder / "state", *run.state) == 1
    with pytest.raises(zerostart.errors.InsufficientMemoryError, match="use wait=True"):
        checkpointing.write_state(folder / "state", *run.state, None, wait=False, budget=1000)
    first = zerostart.save_state(folder / "first", *run.state, wait=False)
    second = zerostart.save_state(folder / "second", *run.state, wait=False)
    assert first.done()
    second.wait()
    assert second.done()
    assert 0 < second.seconds["blocked"] < second.seconds["written"]


@pytest.mark.slow
def test_an_error_is_told_by_wait_or_by_the_next_save(tmp_path: Path) -> None:
    states = tmp_path / "states"
    states.mkdir()
    run_ranks(failing, 2, checkpoint("qwen3", tmp_path), states)
