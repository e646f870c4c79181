"""Exchanged reads give the same bits as own reads."""

import errno
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn

import zerostart
from tests.ranks import Outcome, rank_outcomes, run_ranks
from tests.tiny import TinyCheckpoints
from zerostart import errors
from zerostart.distributed.world import current_world
from zerostart.transfer import FileReader

ENGINES = ("deepspeed", "fsdp2")
MiB = 1 << 20
SLOW = pytest.mark.slow


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("engine", ENGINES)
def test_exchanged_load_equals_transformers(engine: str, world: int, checkpoints: TinyCheckpoints) -> None:
    """Covers converted experts, fp32 and bf16."""
    path = checkpoints("qwen3_moe", sharded=True)
    from transformers import AutoModelForCausalLM

    for dtype in (None, torch.bfloat16):
        expected = AutoModelForCausalLM.from_pretrained(path, dtype=dtype or "auto").state_dict()
        for exchange in (True, False):
            options = {"engine": engine, "exchange": exchange, "dtype": dtype}
            actual, report = run_ranks(load, world, path, options)[0]
            assert differing_names(actual, expected) == []
            assert ("as requested" in report.reading) is (world > 1)
            assert ("once and exchanged as requested" in report.reading) is (world > 1 and exchange)


def differing_names(actual: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> list[str]:
    assert actual.keys() == expected.keys()
    return [n for n, t in expected.items() if actual[n].dtype != t.dtype or not torch.equal(actual[n], t)]


def load(path: Path, options: dict[str, Any], kind: Any = None) -> tuple[dict[str, torch.Tensor], Any]:
    model = zerostart.load(path, kind, progress=False, **options)
    tensors = {name: tensor for name, tensor in zerostart.full_tensors(model) if tensor is not None}
    return tensors, zerostart.report(model)


class Plain(nn.Module):
    """Uneven parameters, and a buffer larger than a message."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.body = nn.Sequential(nn.Linear(37, 113), nn.BatchNorm1d(113), nn.Linear(113, 5, bias=False))
        self.register_buffer("table", torch.randn(1600, 500))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plain") / "model.safetensors"
    save_file(Plain().state_dict(), path)
    return path


@pytest.mark.parametrize(
    ("engine", "world", "memory_limit"),
    [
        ("deepspeed", 3, None),
        *(pytest.param(engine, world, MiB, marks=SLOW) for engine in ENGINES for world in (1, 3)),
        pytest.param("fsdp2", 2, None, marks=SLOW),
    ],
)
def test_replicated_buffers(engine: str, world: int, memory_limit: int | None, plain: Path) -> None:
    expected = load_file(plain)
    buffers = sum(t.nbytes for name, t in expected.items() if name in dict(Plain().named_buffers()))
    stored = sum(t.nbytes for t in expected.values())
    options = {"engine": engine, "exchange": True, "memory_limit": memory_limit}
    outcomes = run_ranks(load, world, plain, options, Plain)
    assert differing_names(outcomes[0][0], expected) == []
    reports = [report for _, report in outcomes]
    assert stored <= sum(report.read_bytes for report in reports) <= 1.01 * stored
    exchanged = sum(report.exchanged_bytes for report in reports)
    assert (world - 1) * buffers <= exchanged <= (world - 1) * buffers * 1.01
    for report in reports:
        assert report.read_bytes == report.planned_bytes
        assert ("from other ranks" in str(report)) is (report.exchanged_bytes > 0)


@pytest.mark.slow
@pytest.mark.parametrize("exchange", [True, False])
def test_replicas_of_shards(exchange: bool, checkpoints: TinyCheckpoints) -> None:
    """Half of each copy comes from another rank."""
    path = checkpoints("qwen3_moe", sharded=True)
    from transformers import AutoModelForCausalLM

    expected = AutoModelForCausalLM.from_pretrained(path).state_dict()
    options = {"engine": "fsdp2", "engine_config": {"replicate": 2}, "exchange": exchange}
    outcomes = run_ranks(load, 4, path, options)
    assert differing_names(outcomes[0][0], expected) == []
    stored = sum(t.nbytes for f in path.glob("*.safetensors") for t in load_file(f).values())
    read, received = (
        sum(getattr(report, kind) for _, report in outcomes) for kind in ("read_bytes", "exchanged_bytes")
    )
    assert read == pytest.approx(stored * (1 if exchange else 2), rel=0.02)
    assert received == pytest.approx(stored if exchange else 0, rel=0.02)


# Errors reach all ranks quickly.


def check_same_error(outcomes: list[Outcome], kind: type[Exception], *words: str) -> None:
    name = f"{kind.__module__}.{kind.__name__}"
    assert {outcome.error for outcome in outcomes} == {name}, [o.describe() for o in outcomes]
    assert len({outcome.message for outcome in outcomes}) == 1
    assert all(word in outcomes[0].message for word in words), outcomes[0].message
    assert max(outcome.seconds for outcome in outcomes) < 30


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 2])
def test_read_error_is_raised_on_all_ranks(victim: int, plain: Path) -> None:
    outcomes = rank_outcomes(load_with_fault, 3, plain, victim)
    check_same_error(
        outcomes, errors.ReadError, f"rank {victim}", "model.safetensors at offset", os.strerror(errno.EIO)
    )


def load_with_fault(path: Path, victim: int) -> None:
    """Make the third read fail; the group must survive."""
    count = 0
    read = FileReader.read

    def fail_third(self: Any, file: int, offset: int, buffers: Any) -> None:
        nonlocal count
        count += 1
        if count > 2:
            raise errors.ReadError(
                f"reading {self._files[file]} at offset {offset} failed: {os.strerror(errno.EIO)}"
            )
        read(self, file, offset, buffers)

    world = current_world()
    if world.rank == victim:
        FileReader.read = fail_third  # type: ignore[method-assign]
    try:
        # With only buffers, every read belongs to an exchange.
        model = nn.Module()
        model.register_buffer("table", torch.empty(1600, 500, device="meta"))
        zerostart.load(
            path, model, engine="fsdp2", exchange=True, memory_limit=MiB // 4, strict=False, progress=False
        )
    finally:
        assert world.all_gather_object(world.rank, "after") == [0, 1, 2]


@pytest.mark.slow
def test_exchange_within_the_memory_limit(tmp_path: Path) -> None:
    """Load 48 MiB through 4 MiB of buffers."""
    path = tmp_path / "model.safetensors"
    save_file({"table": torch.ones(12, MiB)}, path)
    for peak in run_ranks(load_measured, 3, path):
        assert 48 * MiB <= peak <= (48 + 4 + 3) * MiB


def load_measured(path: Path) -> int:
    for _ in range(2):  # the first load sets up the process group's connections
        net = nn.Module()
        net.register_buffer("table", torch.empty(12, MiB, device="meta"))
        net = zerostart.load(path, net, engine="fsdp2", exchange=True, memory_limit=4 * MiB, progress=False)
        report = zerostart.report(net)
    return int(report.peak_host_bytes)


@pytest.mark.slow
def test_too_small_memory_limit_is_an_error(checkpoints: TinyCheckpoints) -> None:
    outcomes = rank_outcomes(load_in_little_memory, 2, checkpoints("qwen3"))
    check_same_error(outcomes, errors.ConfigError, "exchange=True", "memory_limit")


def load_in_little_memory(path: Path) -> None:
    dist.barrier()
    options: dict[str, Any] = {"engine": "fsdp2", "memory_limit": 1 << 16, "progress": False}
    model = zerostart.load(path, exchange=None, **options)
    assert zerostart.report(model).exchanged_bytes == 0
    zerostart.load(path, exchange=True, **options)
