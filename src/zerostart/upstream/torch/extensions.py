"""Private parts of torch and DeepSpeed: operations that are compiled at first use, and the lock of that.

torch keeps other processes off a build by a file ``lock`` in its folder. Up to torch 2.13 it is the lock by
being there (torch.utils.file_baton), and outlives a builder that is killed: every later process then waits
for it without end. From 2.14 on the system locks the file, which stays there and means nothing. So while a
loaded model lives, every operation of DeepSpeed's is compiled with the following care, also those of
``deepspeed.initialize``.

A build takes a lock of its own first, which the system gives back when its holder ends. Who has that one and
finds torch's lock knows whose it is: a build's that was killed, if such a build left its mark; else another
program's, which is waited for as long as it can be seen at work.

torch has one folder for all environments of a Python version, and ninja compiles anew where the paths of
headers differ. So each environment has a folder of its own there. Where ``TORCH_EXTENSIONS_DIR`` is set, what
lies in it is used, but an operation that another environment has built there gets such a folder inside.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, TypeVar

from zerostart.errors import EngineError
from zerostart.upstream.guard import Use, is_first_rank, misfit
from zerostart.upstream.patches import RefCountedPatches, replaced
from zerostart.upstream.versions import DEEPSPEED, TORCH

if TYPE_CHECKING:
    from deepspeed.ops.op_builder.builder import OpBuilder

logger = logging.getLogger("zerostart")

_BUILDER = "deepspeed.ops.op_builder.builder:OpBuilder"
_COMPILED = Use(
    _BUILDER,
    "jit_load(verbose), load, .name",
    "operations are compiled by one process at a time, whatever a killed one left, and with a word of it",
)
TOUCHED = (
    Use(
        "torch.utils.cpp_extension",
        "_get_build_directory, get_default_build_root",
        "the folder in which an operation is compiled, with the lock of whoever does",
    ),
    _COMPILED,
)

#: Seconds after which a person is told what is waited for.
SILENCE = 2.0
#: Seconds without a change in a folder after which nobody is at work there whom this process cannot see.
QUIET = 120.0
_POLL = 0.2
#: Beside torch's ``lock``: locked by whom zerostart lets build, and not empty while it does.
_MARK = "zerostart.building"


def load_operations(names: tuple[str, ...]) -> None:
    """Load DeepSpeed's operations of the builders ``names``, compiling what is not compiled yet.

    Those that this accelerator has not or cannot have are left out. Raises EngineError, naming the operation,
    if it cannot be compiled.
    """
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    # Open for the length of this call; loaded models hold it open besides.
    compiling.open()
    try:
        for name in names:
            builder: OpBuilder = get_accelerator().create_op_builder(name)
            # None: the accelerator has no such operation; not compatible: this machine cannot build it.
            if builder is None or not deepspeed.ops.__compatible_ops__.get(builder.NAME, False):
                continue
            try:
                builder.load()
            except (RuntimeError, OSError, ImportError) as error:
                raise EngineError(
                    f"DeepSpeed's operation {builder.name} cannot be compiled on this machine ({error}); it "
                    "needs a C++ compiler and ninja"
                ) from error
    finally:
        compiling.close()


def left_locks() -> list[Path]:
    """Locks that killed builds have left; without zerostart, whoever compiles there waits without end."""
    from torch.utils import cpp_extension

    if not _is_lock_by_being():
        return []
    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or cpp_extension.get_default_build_root())
    locks = [*root.glob("*/lock"), *root.glob("*/*/lock")]
    return sorted(lock for lock in locks if _is_quiet(lock.parent) and not _at_work(lock.parent))


def _enter(stack: contextlib.ExitStack) -> None:
    if wrong := misfit(TOUCHED):
        logger.warning("%s. The files that a killed compiler leaves may block the next start", wrong)
        return
    from deepspeed.ops.op_builder.builder import OpBuilder

    original = OpBuilder.jit_load

    @functools.wraps(original)
    def jit_load(builder: OpBuilder, verbose: bool = True) -> object:
        with _folder_of_environment(builder.name):
            folder = _folder(builder.name)
            return built(folder, lambda: original(builder, verbose), builder.name, is_first_rank())

    stack.enter_context(replaced(OpBuilder, "jit_load", jit_load))


#: Operations are compiled with care while it is open: for as long as a loaded model lives.
compiling = RefCountedPatches(_enter)


@contextlib.contextmanager
def _folder_of_environment(name: str) -> Iterator[None]:
    """Inside, the operation ``name`` is compiled where no other environment's build is compiled over."""
    from torch.utils import cpp_extension

    chosen = os.environ.get("TORCH_EXTENSIONS_DIR")
    if chosen is not None and not _is_of_others(Path(chosen, name)):
        yield
        return
    versions = [library.running() for library in (TORCH, DEEPSPEED)]
    # An environment is its interpreter and the two libraries that an operation is compiled against.
    key = hashlib.sha256(repr((sys.prefix, sys.version, *versions)).encode()).hexdigest()[:12]
    root = cpp_extension.get_default_build_root() if chosen is None else chosen
    os.environ["TORCH_EXTENSIONS_DIR"] = str(Path(root, f"zerostart_{key}"))
    try:
        yield
    finally:
        if chosen is None:
            del os.environ["TORCH_EXTENSIONS_DIR"]
        else:
            os.environ["TORCH_EXTENSIONS_DIR"] = chosen


def _is_of_others(folder: Path) -> bool:
    """Whether the build in ``folder`` is one for another torch than this process has."""
    import torch

    try:
        commands = (folder / "build.ninja").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    # Empty: torch is writing it.
    return bool(commands) and str(Path(torch.__file__).parent / "include") not in commands


def _folder(name: str) -> Path:
    from torch.utils import cpp_extension

    return Path(cpp_extension._get_build_directory(name, False))


#: What a compilation gives: a module.
Built = TypeVar("Built")


def built(folder: Path, build: Callable[[], Built], name: str, told: bool) -> Built:
    """What ``build`` gives, which compiles in ``folder`` under torch's lock, alone of zerostart's.

    What an earlier build left that was killed does not stand in the way. An interrupt ends the compilers, and
    leaves nothing either.
    """
    with _telling(name, folder, told), contextlib.ExitStack() as stack:
        try:
            mark = stack.enter_context((folder / _MARK).open("a+b"))
            # Held until the file is closed, also by a kill: so no lock of ours is ever left behind.
            fcntl.flock(mark, fcntl.LOCK_EX)
        except OSError:  # A folder that cannot be written, or a file system without locks.
            _await_others(folder, False)
            return build()
        # Not empty: whoever held the lock before was killed while it built.
        mark.seek(0)
        _await_others(folder, bool(mark.read()))
        mark.write(b"building")
        mark.flush()
        with _ending_children():
            made = build()
        mark.truncate(0)
        return made


def _await_others(folder: Path, killed: bool) -> None:
    """Wait until nobody builds in ``folder``, and remove the lock of one that has ended without.

    ``killed``: a build of zerostart's did, and its compilers may still be at it.
    """
    lock = folder / "lock"
    if not _is_lock_by_being():
        # torch's lock goes with its holder here; the compilers of a killed build may still write.
        while killed and _at_work(folder):
            time.sleep(_POLL)
        return
    while lock.exists():
        # A holder that this process cannot see (another container, another machine) shows only by changes in
        # the folder.
        if not _at_work(folder) and (killed or _is_quiet(folder)):
            logger.warning("removed %s, which a killed build had left", lock)
            lock.unlink(missing_ok=True)
            return
        time.sleep(_POLL)


def _is_lock_by_being() -> bool:
    """Whether torch takes the file ``lock`` for a lock because it is there."""
    from torch.utils import cpp_extension

    return hasattr(cpp_extension, "FileBaton")


def _is_quiet(folder: Path) -> bool:
    """Whether nothing has changed in ``folder`` for ``QUIET`` seconds."""
    changed = folder.stat().st_mtime
    with contextlib.suppress(FileNotFoundError):
        for path in folder.iterdir():
            if path.exists():
                changed = max(changed, path.stat().st_mtime)
    return time.time() - changed > QUIET


def _at_work(folder: Path) -> bool:
    """Whether a process that can be seen from here builds in ``folder``, or holds torch's lock there."""
    lock = folder / "lock"
    for process, (_, session) in _processes().items():
        if process == os.getpid():
            continue
        place = Path("/proc", str(process))
        with contextlib.suppress(OSError):
            # A compiler runs in the folder; so does the shell of a person there, but that leads a session.
            if process != session and (place / "cwd").samefile(folder):
                return True
            for descriptor in (place / "fd").iterdir():
                with contextlib.suppress(OSError):
                    if descriptor.samefile(lock):
                        return True
    return False


@contextlib.contextmanager
def _telling(name: str, folder: Path, told: bool) -> Iterator[None]:
    """Tell a person what takes so long, if it does."""
    timer = threading.Timer(
        SILENCE,
        lambda: logger.warning(
            "DeepSpeed's operation %s is being compiled in %s, by this or another process; this "
            "takes about a minute, once for each environment",
            name,
            folder,
        ),
    )
    timer.daemon = True
    if told:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


@contextlib.contextmanager
def _ending_children() -> Iterator[None]:
    """Inside, SIGINT and SIGTERM end what was started inside first, and then do what they did.

    A SIGTERM that nobody handles raises SystemExit, so that torch gives its lock back.
    """
    # Handlers of signals can be set in the main thread alone.
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    # What was started before is none of ours to end: workers of a data loader, say.
    others = _children(os.getpid())
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def stop(number: int, frame: FrameType | None) -> None:
        for child in _children(os.getpid()) - others:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        handler = before[signal.Signals(number)]
        if callable(handler):
            handler(number, frame)
        elif handler != signal.SIG_IGN:
            raise SystemExit(128 + number)

    for number in before:
        signal.signal(number, stop)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _children(ancestor: int) -> set[int]:
    """Processes that ``ancestor`` has started, and those that they have."""
    processes = _processes()
    found: set[int] = set()
    # Grandchildren too: ninja starts compilers, which start others.
    while more := {child for child, (parent, _) in processes.items() if parent in {ancestor, *found}} - found:
        found |= more
    return found


def _processes() -> dict[int, tuple[int, int]]:
    """Parent and session of each process that can be seen."""
    found = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            # Behind the name of the command, which stands in brackets and may hold anything.
            fields = stat.read_text().rpartition(")")[2].split()
            found[int(stat.parent.name)] = (int(fields[1]), int(fields[3]))
    return found
