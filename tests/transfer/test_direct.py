"""Direct reads on a real file system, and the choice between direct and cached reads."""

import errno
import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from zerostart.checkpoint.storage import direct, page_cache
from zerostart.checkpoint.storage.local import LocalFiles
from zerostart.errors import ReadError
from zerostart.transfer import FileReader
from zerostart.transfer.planning import Plan, Read
from zerostart.transfer.tuning import Tuning

SIZE = (9 << 20) + 1234


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "model.bin"
    path.write_bytes(random.Random(0).randbytes(SIZE))
    descriptor = direct.open_direct(str(path))
    if descriptor is None:
        pytest.skip(f"no direct reads on {page_cache.file_system(path)}")
    os.close(descriptor)
    return path


def test_any_offset_and_length(path: Path) -> None:
    content = path.read_bytes()
    with FileReader([str(path)], [SIZE], cold=True, direct=True) as reader:
        for offset, length in (
            (0, 4 << 20),
            (1, 3 << 20),
            (4095, 5_000_001),
            (SIZE - (2 << 20) - 3, 2 << 20),
        ):
            buffer = memoryview(bytearray(length))
            reader.read(0, offset, [buffer[:7], buffer[7 : length // 2], buffer[length // 2 :]])
            assert buffer == content[offset : offset + length]


def test_page_cache_is_left_alone(path: Path) -> None:
    descriptor = os.open(path, os.O_RDWR)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)
    with FileReader([str(path)], [SIZE], cold=True, direct=True) as reader:
        reader.read(0, 0, [memoryview(bytearray(8 << 20))])
    assert page_cache.resident_share([str(path)]) < 0.1


def test_end_of_the_file(path: Path) -> None:
    with pytest.raises(ReadError, match=f"ended at offset {3 << 20}"):
        read_twice(path, 2 << 20, lambda: os.truncate(path, 3 << 20))


def test_replaced_between_the_two_openings(path: Path) -> None:
    """Small and direct reads use two descriptors, which must belong to one file."""
    second = path.with_name("other")
    second.write_bytes(bytes(SIZE))
    with pytest.raises(ReadError, match=r"was changed since the checkpoint was opened .*replaced"):
        read_twice(path, 10, lambda: second.replace(path))


def read_twice(path: Path, first: int, between: Callable[[], object]) -> None:
    with FileReader([str(path)], [SIZE], direct=True) as reader:
        reader.read(0, 0, [memoryview(bytearray(first))])
        between()
        reader.read(0, 1 << 20, [memoryview(bytearray(4 << 20))])


def test_file_system_that_refuses_such_reads(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A refused direct read falls back to the page cache for good."""
    real = os.preadv

    def preadv(descriptor: int, *rest: object) -> int:
        if os.get_blocking(descriptor) and _is_direct(descriptor):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(descriptor, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "preadv", preadv)
    buffer = bytearray(2 << 20)
    with FileReader([str(path)], [SIZE], direct=True) as reader:
        reader.read(0, 5, [memoryview(buffer)])
    assert buffer == path.read_bytes()[5 : 5 + (2 << 20)]
    assert not reader.direct
    assert "the file system does not allow direct reads" in Tuning(1, 1 << 20).describe(reader)


def _is_direct(descriptor: int) -> bool:
    flags = int(Path(f"/proc/self/fdinfo/{descriptor}").read_text().split("flags:")[1].split()[0], 8)
    return bool(flags & os.O_DIRECT)


def test_only_large_loads_whose_bytes_are_read_once() -> None:
    def reader(nbytes: int, files: int, ranks: int) -> FileReader:
        plan = Plan(LocalFiles(("f",), (files,)), (), (Read(0, 0, nbytes, (), True),), 8 << 20)
        result = Tuning(4, 8 << 20, cold=True, direct=True, ranks=ranks).reader(plan)
        assert isinstance(result, FileReader)
        return result

    assert reader(1 << 30, 2 << 30, 2).direct
    assert not reader((1 << 30) - 1, 2 << 30, 2).direct
    assert not reader(1 << 30, 2 << 30, 1).direct
    assert reader(1 << 29, 2 << 30, 4).direct
    assert not reader(2 << 30, 2 << 30, 2).direct  # stage 2: every rank reads everything
