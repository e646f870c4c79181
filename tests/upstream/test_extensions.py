"""Operations that DeepSpeed compiles at first use: one builder at a time, and what a killed one has left."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch.utils.file_baton import FileBaton

from ranks import rank_outcomes, run_ranks
from tiny import TinyCheckpoints
from zerostart.upstream import extensions
from zerostart.upstream.extensions import built

SOON = 5.0


@contextlib.contextmanager
def baton(folder: Path) -> Iterator[None]:
    """torch's lock, as its builds take it and wait for it."""
    taken = FileBaton(str(folder / "lock"))
    while not taken.try_acquire():
        taken.wait()
    try:
        yield
    finally:
        taken.release()


def build(folder: Path) -> None:
    with baton(folder):
        (folder / "built").touch()


def build_soon(folder: Path) -> float:
    """Build in this process; the seconds that it took."""
    began = time.monotonic()
    built(folder, lambda: build(folder), "operation", False)
    assert (folder / "built").exists()
    assert not (folder / "lock").exists()
    return time.monotonic() - began


def killed_while_building(folder: Path, compiling: float) -> None:
    def build_and_die() -> None:
        FileBaton(str(folder / "lock")).try_acquire()
        if compiling:
            subprocess.Popen(["sleep", str(compiling)], cwd=folder)
        os.kill(os.getpid(), signal.SIGKILL)

    built(folder, build_and_die, "operation", False)


def test_what_a_killed_build_left(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (outcome,) = rank_outcomes(killed_while_building, 1, tmp_path, 0.0, process_group=False)
    assert outcome.exit_code == -signal.SIGKILL
    assert (tmp_path / "lock").exists()
    assert build_soon(tmp_path) < SOON
    assert f"removed {tmp_path / 'lock'}" in caplog.text
    caplog.clear()
    assert build_soon(tmp_path) < SOON
    assert caplog.text == ""


def test_compilers_of_a_killed_build_are_waited_for(tmp_path: Path) -> None:
    """They write where the next ones would."""
    began = time.monotonic()
    rank_outcomes(killed_while_building, 1, tmp_path, 2.0, process_group=False)
    build_soon(tmp_path)
    assert 2.0 <= time.monotonic() - began < 2.0 + SOON


def test_lock_of_another_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody here has it open: it counts as left once nothing has changed for long."""
    monkeypatch.setattr(extensions, "QUIET", 1.0)
    (tmp_path / "lock").touch()
    assert 0.9 < build_soon(tmp_path) < SOON
    (tmp_path / "lock").touch()
    for path in (*tmp_path.iterdir(), tmp_path):
        os.utime(path, (1e9, 1e9))
    assert build_soon(tmp_path) < 0.9


def test_lock_of_a_living_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extensions, "QUIET", 0.0)
    held = threading.Event()
    holder = threading.Thread(target=lambda: run_ranks(hold, 1, tmp_path, process_group=False), daemon=True)
    holder.start()
    while not (tmp_path / "held").exists():
        held.wait(0.05)
    build_soon(tmp_path)
    assert (tmp_path / "released").exists()
    holder.join()


def hold(folder: Path) -> None:
    with baton(folder):
        (folder / "held").touch()
        time.sleep(1.5)
        (folder / "released").touch()


def test_one_builds_at_a_time(tmp_path: Path) -> None:
    run_ranks(build_noting, 3, tmp_path, process_group=False)
    noted = (tmp_path / "notes").read_text().split()
    assert noted == ["begin", "end"] * 3


def build_noting(folder: Path) -> None:
    def note() -> None:
        for word in ("begin", "end"):
            with (folder / "notes").open("a") as notes:
                notes.write(f"{word}\n")
            time.sleep(0.1)

    built(folder, note, "operation", False)


@pytest.mark.parametrize(
    ("number", "error"), [(signal.SIGINT, "KeyboardInterrupt"), (signal.SIGTERM, "SystemExit")]
)
def test_interrupt_leaves_nothing(number: int, error: str, tmp_path: Path) -> None:
    (outcome,) = rank_outcomes(interrupted, 1, tmp_path, number, process_group=False)
    assert outcome.error == f"builtins.{error}", outcome.describe()
    assert outcome.seconds < 30
    assert not (tmp_path / "lock").exists()
    process = Path("/proc", (tmp_path / "compiler").read_text().strip(), "stat")
    assert not process.exists() or process.read_text().rpartition(")")[2].split()[0] == "Z"
    assert build_soon(tmp_path) < SOON


def interrupted(folder: Path, number: int) -> None:
    """A signal to this process alone, while a process that it has started has started a compiler."""
    script = f"sleep 300 & echo $! > {folder}/compiler; wait"

    def compile_for_long() -> None:
        with baton(folder):
            subprocess.run(["sh", "-c", script], cwd=folder, check=True)

    def stop() -> None:
        while not (folder / "compiler").exists() or not (folder / "compiler").read_text():
            time.sleep(0.02)
        os.kill(os.getpid(), number)

    threading.Thread(target=stop, daemon=True).start()
    built(folder, compile_for_long, "operation", False)


@pytest.mark.parametrize("told", [True, False])
def test_what_takes_long_is_told_once(
    told: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(extensions, "SILENCE", 0.1)
    with caplog.at_level(logging.WARNING, "zerostart"):
        built(tmp_path, lambda: time.sleep(0.5), "some_operation", told)
        built(tmp_path, lambda: None, "quick", told)
    assert [record.message.count("some_operation is being compiled") for record in caplog.records] == [
        1
    ] * told


@pytest.mark.slow
def test_load_after_a_build_that_was_killed(checkpoints: TinyCheckpoints, tmp_path: Path) -> None:
    """The operation itself is compiled; its lock is an old one, which torch would wait for without end."""
    name = "deepspeed_shm_comm"
    shutil.copytree(Path(os.environ["TORCH_EXTENSIONS_DIR"], name), tmp_path / name)
    (tmp_path / name / "lock").touch()
    for path in (*(tmp_path / name).iterdir(), tmp_path / name):
        if path.name == "lock" or path.is_dir():
            os.utime(path, (1e9, 1e9))
    # The objects have their times, which a linker compares; so no build seems to be at work only at once.
    at_once = "from zerostart.upstream import extensions; extensions.QUIET = 0.0"
    (tmp_path / "sitecustomize.py").write_text(at_once)
    paths = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    words = ["load", str(checkpoints("qwen3")), "--nproc", "2", "--engine", "deepspeed"]
    done = subprocess.run(
        [sys.executable, "-c", "from zerostart.cli import main; main()", *words],
        env={**os.environ, "TORCH_EXTENSIONS_DIR": str(tmp_path), "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert not (tmp_path / name / "lock").exists()


def compile_operator(name: str, folder: Path, killed: bool) -> None:
    """An optimizer's operation, as ``deepspeed.initialize`` loads it, with a compiler that does nothing."""
    from torch.utils import cpp_extension

    from zerostart.upstream.deepspeed import import_deepspeed

    import_deepspeed()
    from deepspeed.accelerator import get_accelerator

    def compiler(name: str, **_: object) -> str:
        place = Path(cpp_extension._get_build_directory(name, False))
        (folder / "place").write_text(str(place))
        if killed:
            FileBaton(str(place / "lock")).try_acquire()
            os.kill(os.getpid(), signal.SIGKILL)
        with baton(place):
            return "compiled"

    cpp_extension.load = compiler
    os.environ.pop("TORCH_EXTENSIONS_DIR", None)
    os.environ["XDG_CACHE_HOME"] = str(folder)
    extensions.compiling.open()
    assert get_accelerator().create_op_builder(name).load() == "compiled"
    assert "TORCH_EXTENSIONS_DIR" not in os.environ, os.environ["TORCH_EXTENSIONS_DIR"]


def test_a_killed_compile_of_any_operator(tmp_path: Path) -> None:
    for name in ("FusedAdamBuilder", "CPUAdamBuilder", "CPUAdagradBuilder", "CPULionBuilder"):
        (first,) = rank_outcomes(compile_operator, 1, name, tmp_path, True, process_group=False)
        assert first.exit_code == -signal.SIGKILL, first.describe()
        assert (Path((tmp_path / "place").read_text()) / "lock").exists()
        (second,) = rank_outcomes(compile_operator, 1, name, tmp_path, False, process_group=False, timeout=30)
        assert second.ok, second.describe()
        assert "which a build that was killed has left" in second.log
        assert (
            (tmp_path / "place").read_text().startswith(str(tmp_path))
        )  # and in this environment's own folder
        assert "zerostart_" in (tmp_path / "place").read_text()
