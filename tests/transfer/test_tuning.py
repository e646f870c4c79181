"""Read settings for machines and storages."""

import os
from pathlib import Path

import pytest
from rich.filesize import decimal

from zerostart.checkpoint.memory import MemoryStorage, memory_catalog
from zerostart.checkpoint.storage import RequestCost
from zerostart.checkpoint.storage.local import LocalFiles
from zerostart.transfer import Tuning, tune
from zerostart.transfer.planning import Plan, Read
from zerostart.transfer.tuning import MIN_CHUNK, RING, STORE_RING

MiB = 1 << 20
COLD = 16 * MiB


def stored(file: str) -> LocalFiles:
    return LocalFiles((file,), (Path(file).stat().st_size,))


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "model.safetensors"
    with path.open("wb") as out:
        out.write(os.urandom(COLD))
        out.flush()
        os.fsync(out.fileno())
    return str(path)


def evict(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


def make_store(root: Path, path: str, text: str) -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text + "\n")


def test_cold_storage_gets_more_reads_in_flight(file: str) -> None:
    Path(file).read_bytes()
    warm = tune(stored(file), staged_on_device=False, ranks=1)
    evict(file)
    cold = tune(stored(file), staged_on_device=False, ranks=1)
    assert (warm.cold, cold.cold) == (False, True)
    assert cold.threads >= 4
    assert not warm.direct
    assert max(warm.ring_bytes, cold.ring_bytes) <= RING


def test_explicit_arguments_win(file: str) -> None:
    assert tune(stored(file), False, chunk_size=3 * MiB + 5).chunk_size == 3 * MiB + 5


@pytest.mark.parametrize("limit", [MIN_CHUNK, 200_000, MiB, 5 * MiB, 64 * MiB])
@pytest.mark.parametrize("device", [False, True])
@pytest.mark.parametrize("computes", [False, True])
@pytest.mark.parametrize("chunk", [None, MIN_CHUNK, 32 * MiB])
def test_memory_limit_caps_all_buffers(
    file: str, limit: int, device: bool, computes: bool, chunk: int | None
) -> None:
    evict(file)
    tuning = tune(
        stored(file),
        device,
        computes,
        memory_limit=limit,
        chunk_size=chunk,
    )
    scratch = tuning.threads * tuning.chunk_size * computes
    assert tuning.ring_bytes + scratch <= max(limit, MIN_CHUNK * (1 + computes))
    assert tuning.chunk_size >= MIN_CHUNK
    assert tuning.threads >= 1


def test_tensors_in_memory_need_no_probe() -> None:
    tuning = tune(MemoryStorage((), ()), staged_on_device=False)
    assert (tuning.cold, tuning.file_system) == (False, "")
    assert isinstance(tuning, Tuning)


@pytest.mark.parametrize("limit", [MIN_CHUNK, 600_000, MiB, 5 * MiB, 64 * MiB, None])
@pytest.mark.parametrize("device", [False, True])
def test_memory_limit_caps_an_exchange(file: str, limit: int | None, device: bool) -> None:
    evict(file)
    tuning = tune(stored(file), device, memory_limit=limit)
    chunk = tuning.exchange_chunk
    assert chunk % MIN_CHUNK == 0
    assert (chunk == 0) is (limit == MIN_CHUNK)


@pytest.mark.parametrize(
    ("nbytes", "direct", "latency", "ranks", "threads"),
    [
        # At 100 MB/s a stream, minus the latency's share, up to 64.
        (MiB, True, 0.2, 1, 64),
        (MiB, True, 0.005, 2, 64),
        (MiB, True, 0.005, 8, 24),
        (4 * MiB, False, 0.2, 1, 25),
        (8 * MiB, False, 0.2, 1, 16),
    ],
)
def test_short_requests_to_a_store_are_more_at_a_time(
    nbytes: int, direct: bool, latency: float, ranks: int, threads: int
) -> None:
    """As many requests as fill the link, and fit the room for staged reads."""
    storage = memory_catalog({}).storage
    reads = tuple(Read(0, number * nbytes, nbytes, (), direct) for number in range(99))
    plan = Plan(storage, (), reads, 8 * MiB)
    cost = RequestCost(latency, 100e6)
    tuning = Tuning(16, 7 * MiB, limit=STORE_RING, ranks=ranks, buffer=MiB, cost=cost)
    suited = tuning.fit_to_plan(plan)
    assert suited.threads == max(16, threads)
    assert threads * (MiB + nbytes * (not direct)) <= max(STORE_RING, 16 * 9 * MiB)
    description = f"up to {threads} requests of {decimal(nbytes)} on average in flight"
    assert suited.describe() == description
    assert Tuning(2, 8 * MiB).fit_to_plan(plan) == Tuning(2, 8 * MiB)
