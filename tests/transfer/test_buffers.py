"""Page-locked memory where an accelerator's runtime registers pages; the runtime here only counts."""

import contextlib
import multiprocessing
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from zerostart.transfer import buffers
from zerostart.transfer.meter import anonymous_bytes

MiB = 1 << 20


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[int, int]]:
    """Registered bytes by address."""
    ranges: dict[int, int] = {}
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    monkeypatch.setattr(torch.accelerator, "device_index", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda _: None)

    def register(address: int, nbytes: int) -> int:
        ranges[address] = nbytes
        return 0

    monkeypatch.setattr(buffers, "_find_runtime", lambda: (register, ranges.pop))
    yield ranges
    assert not ranges, "memory is still registered"


@pytest.mark.parametrize("nbytes", [5000, 8 * MiB, 8 * MiB + 8192])
def test_registered_memory_counts_once_and_is_freed_with_its_last_view(
    nbytes: int, registered: dict[int, int]
) -> None:
    before = anonymous_bytes()
    memory = buffers.page_locked(nbytes)
    memory.fill_(1)
    assert memory.numel() == nbytes
    assert registered == {memory.data_ptr(): -(-nbytes // 4096) * 4096}
    assert nbytes <= anonymous_bytes() - before < nbytes + MiB // 4
    view = memory[:1]
    del memory
    assert registered
    del view
    assert anonymous_bytes() - before < MiB // 4


def huge_page_bytes(address: int) -> int:
    """Return the bytes of huge pages in the mapping at ``address``."""
    within = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split()[0]
        if not first.endswith(":"):
            low, high = (int(part, 16) for part in first.split("-"))
            within = low <= address < high
        elif within and first == "AnonHugePages:":
            return int(line.split()[1]) * 1024
    return 0


def test_staging_buffers_are_huge_pages(registered: dict[int, int]) -> None:
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not setting.exists() or "[never]" in setting.read_text():
        pytest.skip("this machine gives no huge pages")
    memory = buffers.page_locked(8 * MiB)
    memory.fill_(1)
    assert huge_page_bytes(memory.data_ptr()) >= 4 * MiB  # memory may be too fragmented for all
    del memory


def test_a_fork_takes_no_copy_and_can_free_it(registered: dict[int, int]) -> None:
    held = [buffers.page_locked(4 * MiB).fill_(7)]
    results = multiprocessing.get_context("fork").SimpleQueue()

    def in_fork() -> None:
        value = int(held[0][0])
        held.clear()
        results.put((value, len(registered)))

    process = multiprocessing.get_context("fork").Process(target=in_fork)
    process.start()
    process.join(60)
    # The fork neither reads the pages nor unregisters them.
    assert results.get() == (0, 1)
    assert int(held[0][0]) == 7
    held.clear()
