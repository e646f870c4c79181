"""A checkpoint that changes while it is loaded: never a mixture, but the same named error on every rank."""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn

import zerostart
from tests.ranks import Outcome, rank_outcomes, run_ranks
from zerostart.distributed.world import current_world
from zerostart.transfer import FileReader

SHAPE = (64, 48)


class Two(nn.Module):
    """Layers that lie in two files."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(*SHAPE, bias=False)
        self.b = nn.Linear(*SHAPE, bias=False)


def weights(value: float) -> dict[str, torch.Tensor]:
    return {f"{name}.weight": torch.full(SHAPE[::-1], value) for name in "ab"}


def write(path: Path, value: float) -> None:
    """The same headers whatever the value; a safetensors file, or one of torch.save."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".bin":
        torch.save(weights(value), path)
    else:
        save_file(weights(value), path)


def in_place(path: Path) -> None:
    """Other weights under the same header, byte by byte into the same file."""
    other = path.parent / "other" / path.name
    write(other, 2.0)
    time.sleep(0.02)  # the clock of modification times ticks every few milliseconds
    with path.open("r+b") as stream:
        stream.write(other.read_bytes())


def over(path: Path) -> None:
    """Another file under the same name; whoever has the old one open goes on reading that."""
    other = path.parent / "other" / path.name
    write(other, 2.0)
    other.replace(path)


CHANGES: dict[str, Callable[[Path], None]] = {"in place": in_place, "over": over}


def same_error(outcomes: list[Outcome], path: Path) -> None:
    report = "\n".join(outcome.describe() for outcome in outcomes)
    assert {outcome.error for outcome in outcomes} == {"zerostart.errors.ReadError"}, report
    assert len({outcome.message for outcome in outcomes}) == 1, report
    assert str(path) in outcomes[0].message
    assert "was changed" in outcomes[0].message
    assert max(outcome.seconds for outcome in outcomes) < 30


@pytest.mark.slow
@pytest.mark.parametrize(("victim", "name"), [(0, "model.safetensors"), (1, "pytorch_model.bin")])
@pytest.mark.parametrize("change", CHANGES)
def test_changed_before_a_rank_opens_it(victim: int, change: str, name: str, tmp_path: Path) -> None:
    """The header is that of the old file, which the other ranks may have read already."""
    write(tmp_path / name, 1.0)
    outcomes = rank_outcomes(load_changed, 3, tmp_path / name, victim, change, "open")
    same_error(outcomes, tmp_path / name)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "name"), [("deepspeed", "model.safetensors"), ("fsdp2", "pytorch_model.bin")]
)
def test_written_to_while_it_is_read(engine: str, name: str, tmp_path: Path) -> None:
    write(tmp_path / name, 1.0)
    outcomes = rank_outcomes(load_changed, 2, tmp_path / name, 1, "in place", "read", engine)
    same_error(outcomes, tmp_path / name)


@pytest.mark.slow
def test_replaced_while_it_is_read(tmp_path: Path) -> None:
    """All ranks have the old file open: its weights, on every rank."""
    path = tmp_path / "model.safetensors"
    write(path, 1.0)
    for seen in run_ranks(load_changed, 2, path, 1, "over", "read"):
        assert seen == {1.0}


def load_changed(path: Path, victim: int, change: str, when: str, engine: str = "fsdp2") -> set[float]:
    """Before the victim opens the file, or once all have read something of it, the file is changed."""
    world = current_world()
    changed = False
    opened, read = FileReader._descriptor, FileReader.read
    lock = threading.Lock()  # several threads read

    def opens(self: FileReader, file: int) -> int:
        nonlocal changed
        with lock:
            if not changed and when == "open" and world.rank == victim:
                CHANGES[change](path)
                changed = True
        return opened(self, file)

    def reads(self: FileReader, file: int, offset: int, buffers: Any) -> None:
        nonlocal changed
        with lock:
            if not changed and when == "read":
                opened(self, file)
                dist.barrier()  # all have opened it
                if world.rank == victim:
                    CHANGES[change](path)
                dist.barrier()
                changed = True
        read(self, file, offset, buffers)

    FileReader._descriptor = opens  # type: ignore[method-assign]
    FileReader.read = reads  # type: ignore[method-assign]
    model = zerostart.load(path, lambda: Two(), engine=engine, progress=False)
    assert changed or (when == "open" and world.rank != victim)
    whole = [tensor for _, tensor in zerostart.full_tensors(model, rank=None)]
    return {float(value) for tensor in whole if tensor is not None for value in tensor.unique()}
