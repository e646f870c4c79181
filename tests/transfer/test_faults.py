"""Transient and permanent faults of the storage, at the system calls."""

import errno
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from zerostart.checkpoint.storage import files
from zerostart.errors import CheckpointNotFoundError, ReadError
from zerostart.transfer import FileReader
from zerostart.transfer.execute import Crew

CONTENT = bytes(range(256)) * 400


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(files, "DELAYS", (0.001, 0.002, 0.004, 0.008))
    path = tmp_path / "model.bin"
    path.write_bytes(CONTENT)
    return path


def faulty(monkeypatch: pytest.MonkeyPatch, answers: Sequence[Any]) -> list[int]:
    """Let `os.preadv` return ``answers`` first: an error, a maximum of bytes, or None for the real call."""
    real: Callable[..., int] = os.preadv
    remaining = list(answers)
    offsets: list[int] = []

    def preadv(descriptor: int, buffers: Sequence[memoryview], offset: int, *flags: int) -> int:
        offsets.append(offset)
        answer = remaining.pop(0) if remaining else None
        if isinstance(answer, OSError):
            raise answer
        if answer == 0:
            return 0
        if answer is not None:
            return real(descriptor, [buffers[0][:answer]], offset)
        return real(descriptor, buffers, offset, *flags)

    monkeypatch.setattr(os, "preadv", preadv)
    return offsets


def error(number: int) -> OSError:
    return OSError(number, os.strerror(number))


def read(path: Path, offset: int, length: int) -> bytes:
    buffer = bytearray(length)
    with FileReader([str(path)], [len(CONTENT)]) as reader:
        reader.read(0, offset, [memoryview(buffer)[: length // 3], memoryview(buffer)[length // 3 :]])
        return bytes(buffer)


@pytest.mark.parametrize("number", [errno.EIO, errno.EAGAIN, errno.ETIMEDOUT])
def test_passing_error(path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    offsets = faulty(monkeypatch, [error(number), error(number), 10, error(number)])
    assert read(path, 100, 5000) == CONTENT[100:5100]
    assert offsets[:5] == [100, 100, 100, 110, 110]


def test_short_reads_go_on(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    faulty(monkeypatch, [1, 2, 3, 500])
    assert read(path, 7, 4000) == CONTENT[7:4007]


def test_lasting_error_names_file_and_offset(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    offsets = faulty(monkeypatch, [64, *[error(errno.EIO)] * 50])
    with pytest.raises(ReadError, match=rf"{path} at offset 164 failed: {os.strerror(errno.EIO)}"):
        read(path, 100, 5000)
    assert len(offsets) == 2 + len(files.DELAYS)


def test_error_that_cannot_pass_is_not_tried_again(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    offsets = faulty(monkeypatch, [error(errno.EISDIR)] * 9)
    with pytest.raises(ReadError, match=os.strerror(errno.EISDIR)):
        read(path, 0, 10)
    assert len(offsets) == 1


def test_truncated_during_the_load(path: Path) -> None:
    with pytest.raises(ReadError, match=rf"{path} ended at offset 50000, where 500 more bytes"):
        read_twice(path, lambda: os.truncate(path, 50_000))


def test_written_to_during_the_load(path: Path) -> None:
    """Reads before and after a write may be mixed, so the load reports it at the end."""
    with pytest.raises(ReadError, match=rf"{path} was changed while it was read.*written to"):
        read_twice(path, lambda: path.write_bytes(CONTENT))


def read_twice(path: Path, between: Callable[[], object]) -> None:
    buffer = memoryview(bytearray(1000))
    with FileReader([str(path)], [len(CONTENT)]) as reader:
        reader.read(0, 0, [buffer])
        time.sleep(0.02)  # the clock of modification times ticks every few milliseconds
        between()
        reader.read(0, 49_500, [buffer])


def test_truncated_before_the_load(path: Path) -> None:
    os.truncate(path, 10)
    with pytest.raises(ReadError, match="has 10 bytes now"):
        read(path, 0, 10)
    path.unlink()
    with pytest.raises(CheckpointNotFoundError, match="was removed"):
        read(path, 0, 10)


def test_what_all_ranks_agreed_on_comes_before_an_error_of_a_thread() -> None:
    """Otherwise one rank would raise its own error and meet the others again in vain."""
    met, failed = threading.Event(), threading.Event()

    def work(items: object) -> None:
        met.wait(10)
        failed.set()
        raise ReadError("of this rank's thread")

    def meet(has_ended: bool) -> bool:
        met.set()
        failed.wait(10)
        raise CheckpointNotFoundError("of all ranks")

    with pytest.raises(CheckpointNotFoundError, match="of all ranks"):
        Crew([1], work, None, "reader").run(1, meet)
