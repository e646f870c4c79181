"""Changes during a load are one error on all ranks."""

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


class TwoLayers(nn.Module):
    """Layers whose weights may be in two files."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(*SHAPE, bias=False)
        self.b = nn.Linear(*SHAPE, bias=False)


def weights(value: float) -> dict[str, torch.Tensor]:
    return {f"{name}.weight": torch.full(SHAPE[::-1], value) for name in "ab"}


def write(path: Path, value: float) -> None:
    """Write a file whose header does not depend on ``value``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".bin":
        torch.save(weights(value), path)
    else:
        save_file(weights(value), path)


def write_in_place(path: Path) -> None:
    """Overwrite the weights and keep the header."""
    new_file = path.parent / "other" / path.name
    write(new_file, 2.0)
    time.sleep(0.02)  # the clock of modification times ticks every few milliseconds
    with path.open("r+b") as stream:
        stream.write(new_file.read_bytes())


def replace_file(path: Path) -> None:
    """Replace the file; open readers keep the old one."""
    new_file = path.parent / "other" / path.name
    write(new_file, 2.0)
    new_file.replace(path)


CHANGES: dict[str, Callable[[Path], None]] = {"in place": write_in_place, "replaced": replace_file}


def check_same_error(outcomes: list[Outcome], path: Path) -> None:
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
    """Other ranks may have read the old header already."""
    write(tmp_path / name, 1.0)
    outcomes = rank_outcomes(load_changed, 3, tmp_path / name, victim, change, "open")
    check_same_error(outcomes, tmp_path / name)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "name"), [("deepspeed", "model.safetensors"), ("fsdp2", "pytorch_model.bin")]
)
def test_written_to_while_it_is_read(engine: str, name: str, tmp_path: Path) -> None:
    write(tmp_path / name, 1.0)
    outcomes = rank_outcomes(load_changed, 2, tmp_path / name, 1, "in place", "read", engine)
    check_same_error(outcomes, tmp_path / name)


@pytest.mark.slow
def test_replaced_while_it_is_read(tmp_path: Path) -> None:
    """Ranks that opened the old file read its weights."""
    path = tmp_path / "model.safetensors"
    write(path, 1.0)
    for values in run_ranks(load_changed, 2, path, 1, "replaced", "read"):
        assert values == {1.0}


def load_changed(path: Path, victim: int, change: str, moment: str, engine: str = "fsdp2") -> set[float]:
    """Load, and change the file before or during reading."""
    world = current_world()
    changed = False
    open_file, read = FileReader._descriptor, FileReader.read
    lock = threading.Lock()  # reads run in several threads

    def open_and_change(self: FileReader, file: int) -> int:
        nonlocal changed
        with lock:
            if not changed and moment == "open" and world.rank == victim:
                CHANGES[change](path)
                changed = True
        return open_file(self, file)

    def read_and_change(self: FileReader, file: int, offset: int, buffers: Any) -> None:
        nonlocal changed
        with lock:
            if not changed and moment == "read":
                open_file(self, file)
                dist.barrier()  # all ranks have opened it
                if world.rank == victim:
                    CHANGES[change](path)
                dist.barrier()
                changed = True
        read(self, file, offset, buffers)

    FileReader._descriptor = open_and_change  # type: ignore[method-assign]
    FileReader.read = read_and_change  # type: ignore[method-assign]
    model = zerostart.load(path, lambda: TwoLayers(), engine=engine, progress=False)
    assert changed or (moment == "open" and world.rank != victim)
    tensors = [tensor for _, tensor in zerostart.full_tensors(model, rank=None)]
    return {float(value) for tensor in tensors if tensor is not None for value in tensor.unique()}
