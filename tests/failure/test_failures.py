"""Failures of one rank are one error on all."""

import errno
import json
import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn

import zerostart
from tests.failure.breakages import BREAKAGES, break_copy
from tests.ranks import Outcome, rank_outcomes
from tests.tiny import TinyCheckpoints
from zerostart import errors

MAX_SECONDS = 30.0
ENGINES = ("deepspeed", "fsdp2")
EXPECTED: dict[str, type[errors.ZerostartError]] = {
    "truncated": errors.CheckpointError,
    "missing-shard": errors.CheckpointNotFoundError,
    "enormous-header": errors.CheckpointError,
    "header-not-json": errors.CheckpointError,
    "wrong-shape": errors.CoverageError,
    "wrong-expert-shape": errors.ConversionError,
    "lost-tensor": errors.CoverageError,
    "lost-expert": errors.ZerostartError,
    "index-outside": errors.CheckpointError,
}


@pytest.fixture(scope="module")
def source(checkpoints: TinyCheckpoints) -> Path:
    return checkpoints("qwen3_moe", sharded=True)


def check_same_error(
    outcomes: Sequence[Outcome], kind: type[errors.ZerostartError], *words: str, exact: bool = True
) -> str:
    """Check that all ranks raised one text; return it."""
    report = "\n".join(outcome.describe() for outcome in outcomes)
    name = f"{kind.__module__}.{kind.__qualname__}"
    for outcome in outcomes:
        assert outcome.error, f"rank {outcome.rank} raised nothing:\n{report}"
        assert name in outcome.mro, report
        assert outcome.seconds < MAX_SECONDS, report
    assert len({outcome.error for outcome in outcomes}) == 1, report
    assert len({outcome.message for outcome in outcomes}) == 1, report
    for word in words:
        assert word in outcomes[0].message, report
    return outcomes[0].message


@pytest.mark.slow
@pytest.mark.parametrize("breakage", BREAKAGES)
def test_broken_checkpoint_is_one_error(breakage: str, source: Path, tmp_path: Path) -> None:
    folder, word = break_copy(source, tmp_path, breakage)
    engine = ENGINES[list(BREAKAGES).index(breakage) % 2]
    outcomes = rank_outcomes(load_only, 3, folder, engine, True)
    message = check_same_error(outcomes, EXPECTED[breakage], word)
    assert len(message) < 2000


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_checkpoint_of_another_architecture_is_one_error(
    engine: str, checkpoints: TinyCheckpoints, tmp_path: Path
) -> None:
    folder = tmp_path / "other"
    checkpoints.edited(checkpoints("mixtral"), "as-qwen3", lambda tensors: None)
    (checkpoints.root / "as-qwen3").rename(folder)
    config = json.loads((checkpoints("qwen3") / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config))
    outcomes = rank_outcomes(load_only, 2, folder, engine, True)
    check_same_error(outcomes, errors.CoverageError, "Qwen3ForCausalLM", "configuration", "converter")


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("engine", "victim", "fault"),
    [
        ("deepspeed", 1, "io error"),
        ("fsdp2", 0, "kill"),
        pytest.param("fsdp2", 1, "io error", marks=SLOW),
        pytest.param("deepspeed", 2, "kill", marks=SLOW),
        *(
            pytest.param(engine, 1, fault, marks=SLOW)
            for engine in ENGINES
            for fault in ("end of file", "memory")
        ),
    ],
)
def test_read_fault_of_one_rank_is_one_error(engine: str, victim: int, fault: str, source: Path) -> None:
    """Reading the weights fails after the header was read."""
    outcomes = rank_outcomes(load_with_fault, 3, source, engine, victim, fault)
    if fault == "kill":
        assert outcomes[victim].exit_code == -signal.SIGKILL
        check_same_error([outcome for outcome in outcomes if outcome.rank != victim], errors.PeerError)
    elif fault == "memory":  # an unexpected error
        check_same_error(outcomes, errors.ZerostartError, "rank 1", "MemoryError")
    else:
        words = [os.strerror(errno.EIO)] if fault == "io error" else []
        check_same_error(outcomes, errors.ReadError, "rank 1", ".safetensors", *words)


@pytest.mark.slow
def test_build_error_of_one_rank_is_one_error(source: Path) -> None:
    outcomes = rank_outcomes(load_unbuildable, 2, source, "fsdp2")
    check_same_error(outcomes, errors.ZerostartError, "rank 1", "no such layer")


def test_group_is_usable_after_a_failure(source: Path, tmp_path: Path) -> None:
    folder, _ = break_copy(source, tmp_path, "lost-tensor")
    for outcome in rank_outcomes(load_broken_then_whole, 2, folder, source):
        assert outcome.ok, outcome.describe()


def load_only(path: Path, engine: str, strict: bool) -> None:
    zerostart.load(path, engine=engine, strict=strict, progress=False)


def load_broken_then_whole(broken: Path, whole: Path) -> None:
    for engine in ENGINES:
        with pytest.raises(errors.CoverageError):
            zerostart.load(broken, engine=engine, progress=False)
        assert zerostart.load(whole, engine=engine, progress=False) is not None


def load_with_fault(path: Path, engine: str, victim: int, fault: str) -> None:
    """Load while the victim's reads are faulty."""
    if dist.get_rank() == victim:
        os.preadv = FAULTS[fault]
    zerostart.load(path, engine=engine, progress=False)


def load_unbuildable(path: Path, engine: str) -> None:
    def build() -> nn.Module:
        if dist.get_rank() == 1:
            raise KeyError("no such layer")
        return nn.Linear(2, 2)

    zerostart.load(path, build, engine=engine, progress=False)


def kill_rank(*_: Any) -> int:
    os.kill(os.getpid(), signal.SIGKILL)
    return 0


def raise_io_error(*_: Any) -> int:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def end_of_file(*_: Any) -> int:
    return 0


def raise_memory_error(*_: Any) -> int:
    raise MemoryError("no room")


FAULTS: dict[str, Callable[..., int]] = {
    "kill": kill_rank,
    "io error": raise_io_error,
    "end of file": end_of_file,
    "memory": raise_memory_error,
}
