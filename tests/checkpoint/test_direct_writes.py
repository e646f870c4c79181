"""Direct writes (O_DIRECT) take only whole pages."""

import errno
import fcntl
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from zerostart.checkpoint.storage import page_cache
from zerostart.checkpoint.storage.direct import PAGE, open_direct
from zerostart.checkpoint.write.shards import plan_shards
from zerostart.checkpoint.write.writer import CheckpointWriter
from zerostart.distributed.world import World
from zerostart.engines import Shard
from zerostart.geometry.layout import Layout, dimension_shard, flat_partition
from zerostart.state.saving.writing import (
    LocalPlace,
    Publication,
    describe_share,
    plan_own_writes,
    write_tensors,
)
from zerostart.transfer.writing import write_out

Writes = list[tuple[bool, int, int]]


@pytest.fixture
def writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Writes:
    """Record (is direct, offset, bytes) of every write."""
    probe = tmp_path / "probe"
    probe.touch()
    handle = open_direct(probe, os.O_WRONLY)
    if handle is None or not page_cache.direct_suits(page_cache.file_system(probe)):
        pytest.skip(f"no direct writes on {page_cache.file_system(probe)}")
    os.close(handle)
    probe.unlink()
    calls: Writes = []
    pwrite = os.pwrite

    def record_write(handle: int, view: memoryview, offset: int) -> int:
        calls.append((bool(fcntl.fcntl(handle, fcntl.F_GETFL) & os.O_DIRECT), offset, view.nbytes))
        return pwrite(handle, view, offset)

    monkeypatch.setattr(os, "pwrite", record_write)
    return calls


def random_tensors() -> dict[str, torch.Tensor]:
    """Make tensors that start anywhere in a page."""
    torch.manual_seed(5)
    sizes = {"a": (7, 3), "b": (640, 1001), "c": (129,), "d": (900, 1024), "e": (700, 999)}
    return {name: torch.randn(shape).to(torch.bfloat16) for name, shape in sizes.items()}


def entries_of(tensors: dict[str, torch.Tensor]) -> list[tuple[str, str, tuple[int, ...]]]:
    return [(name, "BF16", tuple(tensor.shape)) for name, tensor in tensors.items()]


def shard(name: str, whole: torch.Tensor, layout: Layout) -> Shard:
    storage = torch.zeros(layout.numel, dtype=whole.dtype)
    for first, count, start in layout.runs():
        storage[start : start + count] = whole.reshape(-1)[first : first + count]
    return Shard(name, layout, storage, lambda _: layout)


LayoutFactory = Callable[[tuple[int, ...], int, int], Layout]
LAYOUTS: dict[str, LayoutFactory] = {
    "flat": flat_partition,
    "rows": lambda shape, rank, size: dimension_shard(shape, 0, rank, size),
    "columns": lambda shape, rank, size: dimension_shard(shape, len(shape) - 1, rank, size),
}


@pytest.mark.parametrize("cut", LAYOUTS)
@pytest.mark.parametrize("chunk", [5 * PAGE * 64, 8 << 20])
def test_writes_share_no_page(cut: str, chunk: int, tmp_path: Path, writes: Writes) -> None:
    tensors = random_tensors()
    files = plan_shards(entries_of(tensors))
    with CheckpointWriter(tmp_path, files) as writer:
        for rank in range(3):
            outgoing = [
                describe_share(name, shard(name, t, LAYOUTS[cut](tuple(t.shape), rank, 3)))
                for name, t in tensors.items()
            ]
            plan, storages = plan_own_writes(files, outgoing, chunk)
            write_out(plan, storages, writer, 2)
    saved = load_file(tmp_path / "model.safetensors")
    for name, tensor in tensors.items():
        assert torch.equal(saved[name].view(torch.int16), tensor.view(torch.int16)), name
    uncached = {page for direct, at, n in writes if direct for page in range(at // PAGE, (at + n) // PAGE)}
    cached = {
        page for direct, at, n in writes if not direct for page in range(at // PAGE, -(-(at + n) // PAGE))
    }
    assert all(at % PAGE == n % PAGE == 0 for direct, at, n in writes if direct)
    assert not uncached & cached
    assert bool(uncached) == (cut != "columns")


@pytest.mark.parametrize("refusing_call", ["open", "write"])
def test_refused_direct_writes_fall_back_to_the_cache(
    refusing_call: str, tmp_path: Path, writes: Writes, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "pwrite" if refusing_call == "write" else "open"
    call = getattr(os, name)

    def refuse_direct(target: object, second: object, *arguments: int) -> int:
        flags = second if refusing_call == "open" else fcntl.fcntl(target, fcntl.F_GETFL)  # type: ignore[arg-type]
        if int(flags) & os.O_DIRECT:  # type: ignore[call-overload]
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        result: int = call(target, second, *arguments)
        return result

    monkeypatch.setattr(os, name, refuse_direct)
    tensors = random_tensors()
    files = plan_shards(entries_of(tensors))
    outgoing = [
        describe_share(n, shard(n, t, flat_partition(tuple(t.shape), 0, 1))) for n, t in tensors.items()
    ]
    write_tensors(Publication(LocalPlace(tmp_path)), entries_of(tensors), outgoing, World(0, 1, None))
    saved = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(saved[n].view(torch.int16), t.view(torch.int16)) for n, t in tensors.items())
    assert sum(n for _, _, n in writes) == files.total_size + sum(len(f.header) for f in files.files)
