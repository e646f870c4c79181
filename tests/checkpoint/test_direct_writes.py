"""Writes round the page cache: whole pages alone go this way, and the bytes are the same."""

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
from zerostart.state.saving.writing import Files, Publication, describe_share, plan_own_writes, write_tensors
from zerostart.transfer.writing import write_out

Written = list[tuple[bool, int, int]]


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Written:
    """Every write: whether it goes round the page cache, where to, and how much."""
    probe = tmp_path / "probe"
    probe.touch()
    handle = open_direct(probe, os.O_WRONLY)
    if handle is None or not page_cache.direct_suits(page_cache.file_system(probe)):
        pytest.skip(f"no direct writes on {page_cache.file_system(probe)}")
    os.close(handle)
    probe.unlink()
    found: Written = []
    pwrite = os.pwrite

    def noted(handle: int, view: memoryview, offset: int) -> int:
        found.append((bool(fcntl.fcntl(handle, fcntl.F_GETFL) & os.O_DIRECT), offset, view.nbytes))
        return pwrite(handle, view, offset)

    monkeypatch.setattr(os, "pwrite", noted)
    return found


def stored() -> dict[str, torch.Tensor]:
    """Tensors that begin anywhere in a page, small ones between large ones."""
    torch.manual_seed(5)
    sizes = {"a": (7, 3), "b": (640, 1001), "c": (129,), "d": (900, 1024), "e": (700, 999)}
    return {name: torch.randn(shape).to(torch.bfloat16) for name, shape in sizes.items()}


def entries(tensors: dict[str, torch.Tensor]) -> list[tuple[str, str, tuple[int, ...]]]:
    return [(name, "BF16", tuple(tensor.shape)) for name, tensor in tensors.items()]


def shard(name: str, whole: torch.Tensor, layout: Layout) -> Shard:
    storage = torch.zeros(layout.numel, dtype=whole.dtype)
    for first, count, place in layout.runs():
        storage[place : place + count] = whole.reshape(-1)[first : first + count]
    return Shard(name, layout, storage, lambda _: layout)


Cut = Callable[[tuple[int, ...], int, int], Layout]
CUTS: dict[str, Cut] = {
    "flat": flat_partition,
    "rows": lambda shape, rank, size: dimension_shard(shape, 0, rank, size),
    "columns": lambda shape, rank, size: dimension_shard(shape, len(shape) - 1, rank, size),
}


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("chunk", [5 * PAGE * 64, 8 << 20])
def test_ranks_share_pages(cut: str, chunk: int, tmp_path: Path, written: Written) -> None:
    """What three ranks write past the cache shares no page with what anybody writes into it."""
    tensors = stored()
    layout = plan_shards(entries(tensors))
    with CheckpointWriter(tmp_path, layout) as writer:
        for rank in range(3):
            outgoing = [
                describe_share(name, shard(name, t, CUTS[cut](tuple(t.shape), rank, 3)))
                for name, t in tensors.items()
            ]
            plan, storages = plan_own_writes(layout, outgoing, chunk)
            write_out(plan, storages, writer, 2)
    found = load_file(tmp_path / "model.safetensors")
    for name, tensor in tensors.items():
        assert torch.equal(found[name].view(torch.int16), tensor.view(torch.int16)), name
    past = {page for direct, at, n in written if direct for page in range(at // PAGE, (at + n) // PAGE)}
    beside = {
        page for direct, at, n in written if not direct for page in range(at // PAGE, -(-(at + n) // PAGE))
    }
    assert all(at % PAGE == n % PAGE == 0 for direct, at, n in written if direct)
    assert not past & beside
    assert bool(past) == (cut != "columns")


@pytest.mark.parametrize("where", ["open", "write"])
def test_a_device_that_has_no_such_writes(
    where: str, tmp_path: Path, written: Written, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is told by the first one, and everything goes into the cache."""
    name = "pwrite" if where == "write" else "open"
    call = getattr(os, name)

    def refusing(target: object, second: object, *rest: int) -> int:
        flags = second if where == "open" else fcntl.fcntl(target, fcntl.F_GETFL)  # type: ignore[arg-type]
        if int(flags) & os.O_DIRECT:  # type: ignore[call-overload]
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        done: int = call(target, second, *rest)
        return done

    monkeypatch.setattr(os, name, refusing)
    tensors = stored()
    layout = plan_shards(entries(tensors))
    outgoing = [
        describe_share(n, shard(n, t, flat_partition(tuple(t.shape), 0, 1))) for n, t in tensors.items()
    ]
    write_tensors(Publication(Files(tmp_path)), entries(tensors), outgoing, World(0, 1, None))
    found = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(found[n].view(torch.int16), t.view(torch.int16)) for n, t in tensors.items())
    assert sum(n for _, _, n in written) == layout.total_size + sum(len(f.header) for f in layout.files)
