"""A background save stores the state of the call."""

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


def train_during_save(path: Path, folder: Path) -> list[str]:
    differences = []
    for name, case in CASES.items():
        state = folder / name
        expected = train(path, case, range(FIRST + MORE), save=state, at=FIRST, wait=False)[FIRST:]
        actual = train(path, case, range(FIRST, FIRST + MORE), load=state)
        if actual != expected:
            differences.append(f"{name}: {actual} for {expected}")
    return differences


@pytest.mark.slow
def test_state_is_saved_as_at_the_call(tmp_path: Path) -> None:
    path = checkpoint("qwen3", tmp_path)
    assert run_ranks(train_during_save, 2, path, tmp_path / "states") == [[], []]


def fail_in_the_background(path: Path, folder: Path) -> None:
    """Fill one rank's disk; all ranks keep the earlier state."""
    run = Run(path, Case("fsdp2"))
    zerostart.save_state(folder / "state", *run.state, extra=1)
    run.step(0)
    pwrite = os.pwrite

    def raise_no_space(*arguments: Any) -> int:
        raise OSError(28, "No space left on device")

    def save_with_full_disk() -> Any:
        os.pwrite = raise_no_space if dist.get_rank() == 1 else pwrite
        return zerostart.save_state(folder / "state", *run.state, extra=2, wait=False)

    try:
        handle = save_with_full_disk()
        run.step(1)
        with pytest.raises(zerostart.errors.WriteError, match="No space left"):
            handle.wait()
        handle.wait()
        handle = save_with_full_disk()
        if dist.get_rank() == 0:  # wait() on one rank only
            with pytest.raises(zerostart.errors.WriteError, match="No space left"):
                handle.wait()
        with pytest.raises(zerostart.errors.WriteError, match="No space left"):
            zerostart.save_state(folder / "state", *run.state)
    finally:
        os.pwrite = pwrite
    dist.barrier()  # rank 0 deletes the unfinished files
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
def test_wait_or_the_next_save_raises_the_error(tmp_path: Path) -> None:
    states = tmp_path / "states"
    states.mkdir()
    run_ranks(fail_in_the_background, 2, checkpoint("qwen3", tmp_path), states)
