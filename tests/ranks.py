"""Run a module-level function on real gloo ranks, and collect their outcomes.

Importing torch, transformers and DeepSpeed takes seconds. So ranks are forked in milliseconds from one server
(multiprocessing's ``forkserver``), which imports `tests.preloaded` once. The parent hosts the rendezvous
store: the death of rank 0 is then like that of any other rank, and no two tests compete for a port.
"""

import faulthandler
import multiprocessing
import os
import pickle
import re
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import pytest

GROUP_TIMEOUT = timedelta(seconds=60)
#: Seconds that `run_ranks` gives the other ranks after the first failure.
GRACE_SECONDS = 5.0


@dataclass
class Outcome:
    """Result of one rank: ``value``, an error, or a death (``exit_code`` other than 0)."""

    rank: int
    value: Any = None
    error: str = ""  # qualified type name of the exception, "" for none
    message: str = ""
    traceback: str = ""
    mro: tuple[str, ...] = ()  # qualified names of the exception's classes, most derived first
    exit_code: int | None = None  # None: killed by this module
    seconds: float = 0.0
    log: str = ""
    stacks: str = ""  # stacks of its threads when it was killed

    @property
    def ok(self) -> bool:
        return not self.error and self.exit_code == 0

    def describe(self) -> str:
        """Describe this rank for a failure report."""
        if self.ok:
            return f"--- rank {self.rank}: returned after {self.seconds:.1f} s"
        if self.error:
            text = f"--- rank {self.rank}: {self.error}: {self.message}\n{self.traceback}"
        elif self.exit_code is None:
            text = f"--- rank {self.rank}: killed after its time limit, at:\n{self.stacks}"
        else:
            text = f"--- rank {self.rank}: died with exit code {self.exit_code}\n{self.stacks}"
        return f"{text}\nits output:\n{self.log[-4000:]}" if self.log.strip() else text


class RankError(AssertionError):
    """A rank raised, died or hung; ``outcomes`` has one entry per rank."""

    def __init__(self, outcomes: list[Outcome]) -> None:
        super().__init__("\n".join(outcome.describe() for outcome in outcomes))
        self.outcomes = outcomes


@dataclass
class _Job:
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    rank: int
    world_size: int
    port: int
    process_group: bool


def run_ranks(
    function: Callable[..., Any], world_size: int, *arguments: Any, timeout: float = 120.0, **options: Any
) -> list[Any]:
    """Call ``function(*arguments)`` on every rank and return the values, ordered by rank.

    Raises RankError if any rank raises, dies, or has not returned ``timeout`` seconds after the start.
    """
    outcomes = rank_outcomes(
        function, world_size, *arguments, timeout=timeout, grace=GRACE_SECONDS, **options
    )
    if not all(outcome.ok for outcome in outcomes):
        raise RankError(outcomes)
    return [outcome.value for outcome in outcomes]


def rank_outcomes(
    function: Callable[..., Any],
    world_size: int,
    *arguments: Any,
    timeout: float = 120.0,
    grace: float | None = None,
    process_group: bool = True,
) -> list[Outcome]:
    """Call ``function(*arguments)`` on every rank and return all outcomes, failures included.

    ``grace`` limits the seconds that the others get after the first failure (None: until ``timeout``).
    With ``process_group=False`` the function itself initialises ``torch.distributed``.
    """
    folder = tempfile.mkdtemp(prefix="ranks-")
    try:
        store = _rendezvous(world_size)
        processes = []
        for rank in range(world_size):
            job = _Job(function, arguments, rank, world_size, store.port, process_group)
            # Pickled here: the rank then reports a function that it cannot import like any other error.
            rank_arguments = (pickle.dumps(job), folder, rank)
            process = _context().Process(target=_rank_main, args=rank_arguments, daemon=True)
            process.start()
            processes.append(process)
        ended = _wait(processes, timeout, grace, folder)
        outcomes = [
            _outcome(rank, process, ended.get(rank), folder) for rank, process in enumerate(processes)
        ]
        for outcome in outcomes:
            skip_unsupported_dtype(outcome.message)
        return outcomes
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def skip_unsupported_dtype(message: str) -> None:
    """Skip the test if DeepSpeed reports that this machine cannot compute in a dtype."""
    match = re.search(r"Type (\w+) is not supported on your device", message)
    if match:
        pytest.skip(f"DeepSpeed: {match[0]}")


def _rendezvous(world_size: int) -> Any:
    from torch.distributed import TCPStore

    return TCPStore("127.0.0.1", 0, world_size, is_master=True, wait_for_workers=False, timeout=GROUP_TIMEOUT)


def start_server() -> None:
    """Start the server that `run_ranks` forks ranks from."""
    _context()


_server_context: multiprocessing.context.ForkServerContext | None = None


def _context() -> multiprocessing.context.ForkServerContext:
    """Return the context of the server, started with the environment that every rank inherits."""
    global _server_context
    if _server_context is None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tests.preloaded"])
        accelerator = os.environ.get("DS_ACCELERATOR", "cpu")
        fixed = {"DS_ACCELERATOR": accelerator, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        fixed |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "TQDM_DISABLE": "1"}
        # Python 3.11's server ignores its parent's sys.path, and is silent about modules that it misses.
        repository = str(Path(__file__).parents[1])
        fixed["PYTHONPATH"] = os.pathsep.join(filter(None, (repository, os.environ.get("PYTHONPATH"))))
        before = {name: os.environ.get(name) for name in fixed}
        os.environ.update(fixed)
        try:
            multiprocessing.forkserver.ensure_running()
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value
        _server_context = context
    return _server_context


def _wait(
    processes: list[ForkServerProcess], timeout: float, grace: float | None, folder: str
) -> dict[int, float]:
    """Wait for all ranks, kill late ones, and return the others' seconds."""
    start = time.monotonic()
    deadline = start + timeout
    running = {process.sentinel: rank for rank, process in enumerate(processes)}
    ended: dict[int, float] = {}
    while running and time.monotonic() < deadline:
        for sentinel in wait(list(running), timeout=deadline - time.monotonic()):
            rank = running.pop(sentinel)  # type: ignore[call-overload]  # sentinels are ints here
            ended[rank] = time.monotonic() - start
            processes[rank].join()
            if grace is not None and not _succeeded(rank, folder):
                deadline = min(deadline, time.monotonic() + grace)
    for rank in running.values():  # faulthandler's signal handler writes the stacks to a file
        os.kill(processes[rank].pid or 0, signal.SIGUSR1)
    if running:
        time.sleep(0.5)
    for rank in running.values():
        processes[rank].kill()
        processes[rank].join()
    return ended


def _succeeded(rank: int, folder: str) -> bool:
    return Path(folder, f"{rank}.value").exists()


def _outcome(rank: int, process: ForkServerProcess, ended: float | None, folder: str) -> Outcome:
    outcome = Outcome(rank)
    root = Path(folder)
    for name in ("value", "error"):
        if (path := root / f"{rank}.{name}").exists():
            outcome = pickle.loads(path.read_bytes())
    outcome.exit_code = process.exitcode if ended is not None else None
    outcome.seconds = ended or 0.0
    for name in ("log", "stacks"):
        if (path := root / f"{rank}.{name}").exists():
            setattr(outcome, name, path.read_text(errors="replace"))
    return outcome


def _rank_main(pickled: bytes, folder: str, rank: int) -> None:
    """Run the pickled job in a rank's process, and write its outcome to ``folder``."""
    root = Path(folder)
    log = os.open(root / f"{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115  # for the life of the process
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    stacks = (root / f"{rank}.stacks").open("w")
    faulthandler.enable(stacks)
    faulthandler.register(signal.SIGUSR1, stacks, all_threads=True)
    # Background jobs of a shell inherit that SIGINT is ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    kind = "value"
    try:
        outcome = pickle.dumps(Outcome(rank, value=_call(pickle.loads(pickled))))
    except BaseException as error:
        kind = "error"
        outcome = pickle.dumps(_failure(rank, error))
    # Renamed when complete: the parent must never read half an outcome.
    (root / f"{rank}.part").write_bytes(outcome)
    (root / f"{rank}.part").rename(root / f"{rank}.{kind}")
    sys.stdout.flush()
    sys.stderr.flush()
    if kind == "error":
        os._exit(0)  # threads of a broken process group must not keep a failed rank alive


def _failure(rank: int, error: BaseException) -> Outcome:
    names = tuple(f"{kind.__module__}.{kind.__qualname__}" for kind in type(error).__mro__)
    text = "".join(traceback.format_exception(error))
    return Outcome(rank, error=names[0], message=str(error), traceback=text, mro=names)


def _call(job: _Job) -> Any:
    assert "tests.preloaded" in sys.modules, "the server has not imported tests/preloaded.py"
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(job.rank),
        LOCAL_RANK=str(job.rank),
        WORLD_SIZE=str(job.world_size),
        LOCAL_WORLD_SIZE=str(job.world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(job.port),
        TORCHELASTIC_USE_AGENT_STORE="True",  # the parent, not a rank, serves the store
    )
    if not job.process_group:
        return job.function(*job.arguments)
    store = dist.TCPStore("127.0.0.1", job.port, job.world_size, is_master=False, timeout=GROUP_TIMEOUT)
    dist.init_process_group(
        "gloo", store=store, rank=job.rank, world_size=job.world_size, timeout=GROUP_TIMEOUT
    )
    # The other ranks may still be connecting: if this one died now, they would get torch's own RuntimeError
    # from `init_process_group`.
    if store.add("joined", 1) == job.world_size:
        store.set("all joined", "")
    store.wait(["all joined"])
    value = job.function(*job.arguments)
    if dist.is_initialized():
        dist.barrier()  # another rank may still communicate with this one
        dist.destroy_process_group()
    return value


def _compiled_op() -> Path:
    return Path(os.environ["TORCH_EXTENSIONS_DIR"], "deepspeed_shm_comm", "deepspeed_shm_comm.so")


def has_deepspeed_op() -> bool:
    """Return True if DeepSpeed's only CPU operation is compiled, and not locked."""
    return _compiled_op().exists() and not _compiled_op().with_name("lock").exists()


def remove_stale_lock(seconds: float = 60.0) -> None:
    """Remove the compiler's lock of a killed test, which later loads would wait for."""
    lock = _compiled_op().with_name("lock")
    if _compiled_op().exists() and lock.exists() and time.time() - lock.stat().st_mtime > seconds:
        lock.unlink(missing_ok=True)


def build_deepspeed_op() -> None:
    """Compile DeepSpeed's CPU operation, in the ranks' server as it starts."""
    run_ranks(os.getpid, 1, process_group=False, timeout=280)
