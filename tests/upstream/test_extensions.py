"""Operations that DeepSpeed compiles at first use: one builder at a time, and what a killed one has left."""

import contextlib
import importlib
import inspect
import logging
import os
import pkgutil
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils import cpp_extension
from torch.utils._filelock import FileLock
from torch.utils.file_baton import FileBaton

from tests.ranks import rank_outcomes, run_ranks
from tests.tiny import TinyCheckpoints
from zerostart.upstream.torch import extensions
from zerostart.upstream.torch.extensions import built

SOON = 5.0


#: Up to torch 2.13 the file is the lock; since then the system locks it, and it stays.
BATON = hasattr(cpp_extension, "FileBaton")


def taken(folder: Path) -> bool:
    """Take torch's lock, if it is free."""
    if BATON:
        return bool(FileBaton(str(folder / "lock")).try_acquire())
    global kept  # The lock is given back with its object.
    kept = FileLock(str(folder / "lock"))
    kept.acquire()
    return True


@contextlib.contextmanager
def baton(folder: Path) -> Iterator[None]:
    """torch's lock, as its builds take it and wait for it."""
    if not BATON:
        with FileLock(str(folder / "lock")):
            yield
        return
    lock = FileBaton(str(folder / "lock"))
    while not lock.try_acquire():
        lock.wait()
    try:
        yield
    finally:
        lock.release()


def build(folder: Path) -> None:
    with baton(folder):
        (folder / "built").touch()


def build_soon(folder: Path) -> float:
    """Build in this process; the seconds that it took."""
    began = time.monotonic()
    built(folder, lambda: build(folder), "operation", False)
    assert (folder / "built").exists()
    assert (folder / "lock").exists() == (not BATON)
    return time.monotonic() - began


def killed_while_building(folder: Path, compiling: float) -> None:
    def build_and_die() -> None:
        taken(folder)
        if compiling:
            subprocess.Popen(["sleep", str(compiling)], cwd=folder)
        os.kill(os.getpid(), signal.SIGKILL)

    built(folder, build_and_die, "operation", False)


def test_what_a_killed_build_left(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (outcome,) = rank_outcomes(killed_while_building, 1, tmp_path, 0.0, process_group=False)
    assert outcome.exit_code == -signal.SIGKILL
    assert (tmp_path / "lock").exists()
    assert build_soon(tmp_path) < SOON
    assert (f"removed {tmp_path / 'lock'}" in caplog.text) == BATON
    caplog.clear()
    assert build_soon(tmp_path) < SOON
    assert caplog.text == ""


def test_compilers_of_a_killed_build_are_waited_for(tmp_path: Path) -> None:
    """They write where the next ones would."""
    began = time.monotonic()
    rank_outcomes(killed_while_building, 1, tmp_path, 2.0, process_group=False)
    build_soon(tmp_path)
    assert 2.0 <= time.monotonic() - began < 2.0 + SOON


@pytest.mark.skipif(not BATON, reason="this torch's lock is the system's")
def test_lock_of_another_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody here has it open: it counts as left once nothing has changed for long."""
    monkeypatch.setattr(extensions, "QUIET", 1.0)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    folder = tmp_path / "operation"
    folder.mkdir()
    (folder / "lock").touch()
    assert 0.9 < build_soon(folder) < SOON
    (folder / "lock").touch()
    assert extensions.left_locks() == []  # somebody may be at work
    for path in (*folder.iterdir(), folder):
        os.utime(path, (1e9, 1e9))
    assert extensions.left_locks() == [folder / "lock"]
    assert build_soon(folder) < 0.9


def test_file_of_a_lock_that_is_the_systems(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As torch leaves it from 2.14 on after every build: nobody waits for it, and it stays."""
    monkeypatch.delattr(cpp_extension, "FileBaton", raising=False)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    folder = tmp_path / "fused_adam"
    folder.mkdir()

    def build_under_the_systems() -> None:
        with FileLock(str(folder / "lock")):
            (folder / "built").touch()

    for _ in range(2):
        began = time.monotonic()
        built(folder, build_under_the_systems, "operation", False)
        assert time.monotonic() - began < 1.0
        assert (folder / "lock").exists()
    for path in (*folder.iterdir(), folder):
        os.utime(path, (1e9, 1e9))
    assert extensions.left_locks() == []
    assert caplog.text == ""


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
    assert (tmp_path / "lock").exists() == (not BATON)
    process = Path("/proc", (tmp_path / "compiler").read_text().strip(), "stat")
    end = time.monotonic() + 10  # it has been killed, which takes a moment on a busy machine
    while runs(process) and time.monotonic() < end:
        time.sleep(0.05)
    assert not runs(process)
    assert build_soon(tmp_path) < SOON


def runs(stat: Path) -> bool:
    try:
        return stat.read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


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
    at_once = "from zerostart.upstream.torch import extensions; extensions.QUIET = 0.0"
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
    assert ("removed" in done.stdout + done.stderr) == BATON


#: Builders of the operations that a configuration of DeepSpeed's can lead to, and by what.
OPERATORS = {
    "cpu.comm:ShareMemCommBuilder": "any, where ranks compute on the host",
    "fused_adam:FusedAdamBuilder": "optimizer.type: Adam, AdamW",
    "cpu.fused_adam:FusedAdamBuilder": "the same on the host",
    "cpu.cpu_adam:CPUAdamBuilder": "offload_optimizer; zenflow",
    "cpu.cpu_adagrad:CPUAdagradBuilder": "optimizer.type: Adagrad",
    "cpu.cpu_lion:CPULionBuilder": "optimizer.type: Lion, with offload_optimizer",
    "fused_lion:FusedLionBuilder": "optimizer.type: Lion",
    "fused_lamb:FusedLambBuilder": "optimizer.type: Lamb",
    "pin_memory:PinMemoryBuilder": "offload with pin_memory; before async_io",
    "async_io:AsyncIOBuilder": "offload_param, offload_optimizer: nvme",
    "cpu.async_io:AsyncIOBuilder": "the same on the host",
    "gds:GDSBuilder": "aio.use_gds",
    "utils:UtilsBuilder": "checkpoint.writer",
    "quantizer:QuantizerBuilder": "zero_quantized_weights, zero_quantized_gradients",
    "random_ltd:RandomLTDBuilder": "data_efficiency.data_routing.random_ltd",
    "dc:DeepCompileBuilder": "compile.deepcompile",
    "transformer_inference:InferenceBuilder": "hybrid_engine",
}


class Compiler:
    """In the place of ``torch.utils.cpp_extension.load``: takes torch's lock, and is killed or done."""

    def __init__(self) -> None:
        self.killed, self.place = False, Path()
        cpp_extension.load = self

    def __call__(self, name: str, **_: object) -> SimpleNamespace:
        self.place = Path(cpp_extension._get_build_directory(name, False))
        if self.killed:
            taken(self.place)
            os.kill(os.getpid(), signal.SIGKILL)
        with baton(self.place):
            return SimpleNamespace(pin_handle=None)


def builder_of(name: str) -> Any:
    """A builder that asks for no compiler of an accelerator."""
    from deepspeed.ops.op_builder import builder

    module, _, kind = name.partition(":")
    made = getattr(importlib.import_module(f"deepspeed.ops.op_builder.{module}"), kind)()
    made.is_compatible = lambda *_: True
    made.cxx_args = made.nvcc_args = made.extra_ldflags = made.include_paths = made.sources = list
    builder.OpBuilder._loaded_ops.clear()
    return made


def compile_operators(folder: Path) -> None:
    from zerostart.upstream.deepspeed.zero3.partitions import import_deepspeed

    import_deepspeed()
    from deepspeed.accelerator import get_accelerator

    assert get_accelerator().device_name() == "cpu"
    os.environ.pop("TORCH_EXTENSIONS_DIR", None)
    os.environ["XDG_CACHE_HOME"] = str(folder)
    compiler = Compiler()
    extensions.compiling.open()
    for name in OPERATORS:
        if (child := os.fork()) == 0:
            compiler.killed = True
            builder_of(name).load()
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL, name
        (left,) = folder.rglob("lock")
        begun = time.monotonic()
        builder_of(name).load()
        assert time.monotonic() - begun < SOON, name
        assert compiler.place == left.parent, name
        assert left.exists() == (not BATON)
        left.unlink(missing_ok=True)
        assert folder in left.parents
        assert left.parts[-3].startswith("zerostart_")  # this environment's own folder
        assert "TORCH_EXTENSIONS_DIR" not in os.environ, os.environ["TORCH_EXTENSIONS_DIR"]


def test_a_killed_compile_of_any_operator(tmp_path: Path) -> None:
    (outcome,) = rank_outcomes(compile_operators, 1, tmp_path, process_group=False, timeout=100)
    assert outcome.ok, outcome.describe()
    assert outcome.log.count("which a killed build had left") == BATON * len(OPERATORS)


def test_every_builder_compiles_where_the_guard_is() -> None:
    """By ``OpBuilder.jit_load``, which none has of its own: what a release adds is guarded as well."""
    from zerostart.upstream.deepspeed.zero3.partitions import import_deepspeed

    import_deepspeed()
    from deepspeed.ops import op_builder

    found = set()
    for module in pkgutil.walk_packages(op_builder.__path__, f"{op_builder.__name__}."):
        if module.name.count(".") == 3 or ".cpu." in module.name:
            found.update(k for k in vars(importlib.import_module(module.name)).values() if inspect.isclass(k))
    builders = {kind for kind in found if issubclass(kind, op_builder.builder.OpBuilder)}
    assert len(builders) > 15
    assert [kind for kind in builders if "jit_load" in vars(kind)] == [op_builder.builder.OpBuilder]


@pytest.mark.parametrize("compiled_for", ["nobody", "this environment", "another"])
def test_environments_that_share_a_folder(compiled_for: str, tmp_path: Path) -> None:
    """Each would compile over the other's, at each start: it is about a minute, and the other's file goes."""
    run_ranks(compile_beside, 1, compiled_for, tmp_path, process_group=False)


def compile_beside(compiled_for: str, folder: Path) -> None:
    from zerostart.upstream.deepspeed.zero3.partitions import import_deepspeed

    import_deepspeed()
    os.environ["TORCH_EXTENSIONS_DIR"] = str(folder)
    place = folder / "fused_adam"
    if compiled_for != "nobody":
        place.mkdir()
        torchs = "/another/torch" if compiled_for == "another" else Path(torch.__file__).parent
        (place / "build.ninja").write_text(f"cflags = -I/x -isystem {torchs}/include -fPIC")
    compiler = Compiler()
    extensions.compiling.open()
    builder_of("cpu.fused_adam:FusedAdamBuilder").load()
    if compiled_for == "another":
        assert compiler.place.parent.name.startswith("zerostart_")
        assert compiler.place.parent.parent == folder
    else:
        assert compiler.place == place
    assert os.environ["TORCH_EXTENSIONS_DIR"] == str(folder)
