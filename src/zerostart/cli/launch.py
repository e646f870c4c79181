"""Start the ranks of one machine, watch them, and return one result or one error.

A plain supervisor of processes, without torch: ``torch.distributed.run`` ends the survivors of a failed rank
before they can report the error that they agreed on, and gives ranks no time to save after Ctrl-C.

Environment of a worker, besides the variables of ``torchrun``: ``ZEROSTART_STATUS_FILE`` (path of its
report), ``ZEROSTART_LAUNCHER_PID`` and ``ZEROSTART_STORE`` (the file in which the ranks meet).
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from zerostart import errors
from zerostart.checkpoint.strict_json import dump_json
from zerostart.errors import ConfigError, PeerError, ZerostartError, printable

POLL_SECONDS, TERMINATE_SECONDS = 0.02, 5.0
#: Lines of a rank's output that are shown if it ends without a report.
TAIL_LINES = 30
_INTERRUPTED = (128 + signal.SIGINT, -signal.SIGINT, -signal.SIGTERM)
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


@dataclass
class _Worker:
    """One rank: its process, where its output and its report are, and how it ended."""

    rank: int
    process: subprocess.Popen[bytes]
    log: Path
    status: Path
    #: None while it runs; negative: the number of the signal that ended it.
    returncode: int | None = None
    stopped: bool = False  # by this launcher, so its exit code says nothing about the cause

    def poll(self) -> bool:
        """Return whether the rank has ended; its process group ends with it."""
        if self.returncode is None:
            # WNOWAIT keeps the zombie, and with it the group id, until the group has been signalled.
            flags = os.WEXITED | os.WNOWAIT | os.WNOHANG
            if os.waitid(os.P_PID, self.process.pid, flags) is None:
                return False
            _signal_group(self.process.pid, signal.SIGKILL)
            code = self.process.wait()
            # Threads of torch may abort the interpreter at its end, after the result has been written.
            aborted = -code in (signal.SIGABRT, signal.SIGSEGV) and "result" in self.report()
            self.returncode = 0 if aborted else code
        return True

    def report(self) -> dict[str, Any]:
        loaded: dict[str, Any] = json.loads(self.status.read_text()) if self.status.exists() else {}
        return loaded

    def error(self) -> ZerostartError:
        """Return the error that the rank reports, or one that says how it ended."""
        report = self.report()
        kind, message = getattr(errors, str(report.get("type")), None), str(report.get("message"))
        if isinstance(kind, type) and issubclass(kind, ZerostartError):
            return kind(message)
        if report:
            hint = "" if os.environ.get("ZEROSTART_TRACEBACK") else " (--traceback shows where)"
            return PeerError(f"rank {self.rank} failed with {report.get('type')}: {message}{hint}")
        if self.stopped:
            return PeerError(f"rank {self.rank} did not exit and was stopped")
        # Rank 0 has written to the terminal itself.
        for line in self.log.read_text(errors="replace").splitlines()[-TAIL_LINES:]:
            print(f"[rank {self.rank}] {printable(line)}", file=sys.stderr)
        return PeerError(f"rank {self.rank} exited with status {self.returncode} and without a report")


def run_local_ranks(
    module: str,
    argv: Sequence[str],
    nproc: int,
    *,
    grace: float = 20.0,
    env: Mapping[str, str] | None = None,
) -> list[Any]:
    """Run ``python -m module *argv`` as ``nproc`` ranks on this machine; return their results by rank.

    The module's main calls ``worker_main``; the result of a rank is what its function returned, through JSON.
    Rank 0 writes to this terminal; the output of the others is shown if they end without a report. When a
    rank fails, the others have ``grace`` seconds to raise the error that names the cause. The first Ctrl-C
    (or SIGTERM) is passed on, and the ranks end in their own way; the second ends them.

    Raises the ZerostartError that the ranks report, PeerError when a rank was killed, ended without a report
    or failed with a foreign exception, KeyboardInterrupt when the ranks were interrupted before they had a
    result, and ConfigError when ``nproc`` is not positive.
    """
    if nproc < 1:
        raise ConfigError(f"the number of local ranks must be at least 1, not {nproc}")
    try:
        scratch = tempfile.TemporaryDirectory(prefix="zerostart-ranks.", ignore_cleanup_errors=True)
    except OSError as error:
        raise ConfigError(
            f"no temporary folder can be made: {error}. Name another directory in the variable TMPDIR"
        ) from error
    # Signals are caught before the first rank is started, so that Ctrl-C finds all of them supervised.
    with scratch as folder, _caught_signals() as caught:
        workers = _start(module, argv, nproc, Path(folder), env or {})
        try:
            ended = _supervise(workers, caught, grace)
        finally:
            _stop(workers)
        return _outcome(ended, interrupted=bool(caught))


def _start(
    module: str, argv: Sequence[str], nproc: int, scratch: Path, env: Mapping[str, str]
) -> list[_Worker]:
    workers: list[_Worker] = []
    names = {name for _, name in socket.if_nameindex()}
    loopback = {"GLOO_SOCKET_IFNAME": "lo"} if "lo" in names else {}
    common = {
        "OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // nproc)),
        **loopback,  # ranks on one machine need no host name that resolves
        **os.environ,
        "WORLD_SIZE": str(nproc),
        "LOCAL_WORLD_SIZE": str(nproc),
        "ZEROSTART_LAUNCHER_PID": str(os.getpid()),
        # A file of this user alone: at a port another user could take the place of a rank.
        "ZEROSTART_STORE": str(scratch / "store"),
        **env,
    }
    try:
        for rank in range(nproc):
            log, status = scratch / f"rank{rank}.log", scratch / f"rank{rank}.json"
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "ZEROSTART_STATUS_FILE": str(status)}
            with log.open("wb") as output:
                process = subprocess.Popen(
                    # -P: modules in the working directory, which may be a stranger's, are not imported.
                    [sys.executable, "-P", "-m", module, *argv],
                    env={**common, **own},
                    stdin=subprocess.DEVNULL,
                    stdout=None if rank == 0 else output,
                    stderr=None if rank == 0 else subprocess.STDOUT,
                    # A session of its own: the terminal's Ctrl-C reaches the launcher alone.
                    start_new_session=True,
                )
            workers.append(_Worker(rank, process, log, status))
    except BaseException:
        _stop(workers)
        raise
    return workers


def _supervise(workers: Sequence[_Worker], caught: Sequence[int], grace: float) -> list[_Worker]:
    pending, ended = list(workers), list[_Worker]()
    deadline: float | None = None
    forwarded = False
    while pending:
        for worker in [worker for worker in pending if worker.poll()]:
            pending.remove(worker)
            ended.append(worker)
            if worker.returncode != 0 and deadline is None:
                deadline = time.monotonic() + grace
        if caught and not forwarded:
            forwarded = True
            for worker in pending:
                # The rank alone and not its group: its workers that load data are its own to end.
                os.kill(worker.process.pid, caught[0])
        if len(caught) > 1 or (deadline is not None and time.monotonic() > deadline):
            _stop(pending)
        else:
            time.sleep(POLL_SECONDS)
    return ended


def _stop(workers: Sequence[_Worker]) -> None:
    """End the ranks that still run: SIGTERM to each process group, then SIGKILL."""
    running = [worker for worker in workers if not worker.poll()]
    for worker in running:
        worker.stopped = True
        _signal_group(worker.process.pid, signal.SIGTERM)
    deadline = time.monotonic() + TERMINATE_SECONDS
    while running and time.monotonic() < deadline:
        running = [worker for worker in running if not worker.poll()]
        time.sleep(POLL_SECONDS)
    for worker in running:
        _signal_group(worker.process.pid, signal.SIGKILL)
        worker.returncode = worker.process.wait()


def _signal_group(pid: int, number: int) -> None:
    try:
        os.killpg(pid, number)
    except (ProcessLookupError, PermissionError):
        return  # nothing in the group is left, or only a zombie, which some kernels refuse to signal


@contextmanager
def _caught_signals() -> Iterator[list[int]]:
    caught: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield caught
        return

    def note(number: int, frame: FrameType | None) -> None:
        caught.append(number)

    previous = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield caught
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _outcome(ended: Sequence[_Worker], *, interrupted: bool) -> list[object]:
    failed = [worker for worker in ended if worker.returncode != 0]
    if not failed:
        return [worker.report().get("result") for worker in sorted(ended, key=lambda worker: worker.rank)]
    # Ranks that this launcher has ended say nothing of the cause.
    own = [worker for worker in failed if not worker.stopped]
    if interrupted and all(worker.returncode in _INTERRUPTED for worker in own):
        raise KeyboardInterrupt
    if os.environ.get("ZEROSTART_TRACEBACK"):
        for worker in failed:
            for line in str(worker.report().get("traceback", "")).splitlines():
                print(f"[rank {worker.rank}] {printable(line)}", file=sys.stderr)
    killed = [worker for worker in own if worker.returncode is not None and worker.returncode < 0]
    if killed:
        raise PeerError(_killed_message(killed, [worker for worker in failed if worker not in killed]))
    # A named cause first, then another library's error; a reported PeerError is an echo of either.
    found = [(worker.report(), worker.error()) for worker in own or failed]
    causes = [error for _, error in found if not isinstance(error, PeerError)]
    foreign = [error for report, error in found if report.get("type") != "PeerError"]
    raise (causes or foreign or [error for _, error in found])[0]


def _killed_message(killed: Sequence[_Worker], survivors: Sequence[_Worker]) -> str:
    deaths = []
    for worker in killed:
        number = -(worker.returncode or 0)
        hint = "; the kernel does so when memory runs out" if number == signal.SIGKILL else ""
        name = signal.Signals(number).name
        deaths.append(f"rank {worker.rank} was killed by signal {number} ({name}{hint})")
    reports = [report for worker in survivors if (report := worker.report())]
    said = dict.fromkeys(f"{report.get('type')}: {report.get('message')}" for report in reports)
    if said:
        deaths[-1] += "; surviving ranks report: " + "; ".join(said)
    return ", ".join(deaths)


def worker_main(function: Callable[[list[str]], object]) -> NoReturn:
    """Run ``function(argv)`` as one rank and end the process with 0, 1 (error) or 130 (interrupted).

    The function returns plain JSON data, the rank's result in ``run_local_ranks``. Any exception is written
    to the rank's status file and not printed: the launcher prints one line for all ranks.
    """
    _die_with_launcher()
    try:
        _report({"result": function(sys.argv[1:])})
    except KeyboardInterrupt:
        _leave(128 + signal.SIGINT)
    except BaseException as error:
        _report({"type": type(error).__name__, "message": str(error), "traceback": traceback.format_exc()})
        _leave(1)
    sys.exit(0)


def _leave(code: int) -> NoReturn:
    # Not sys.exit: an interpreter whose process group waits for a dead peer ends only at the group's timeout.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _report(status: dict[str, object]) -> None:
    target = os.environ.get("ZEROSTART_STATUS_FILE")
    if target is None:  # started by hand, not by the launcher
        print(status.get("traceback", ""), file=sys.stderr, end="")
        return
    temporary = Path(f"{target}.tmp")
    try:
        temporary.write_text(dump_json(status))
        # Renamed when it is whole: the launcher reads it as soon as it is there.
        temporary.replace(target)
    except OSError as error:
        print(status.get("traceback", ""), file=sys.stderr, end="")
        text = f"error: rank {os.environ.get('RANK', '0')} cannot write {temporary}: {error.strerror}"
        print(f"{text}. Free room there, or name another directory in TMPDIR", file=sys.stderr)
        _leave(1)


def _die_with_launcher() -> None:
    """Ask the kernel to end this process with its launcher."""
    launcher = os.environ.get("ZEROSTART_LAUNCHER_PID")
    if launcher is None or not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != int(launcher):  # it ended before the call above
        os._exit(1)


def join_group(timeout: timedelta | None = None) -> None:
    """Initialise ``torch.distributed`` for this rank from its environment, unless it is already.

    Uses the file of the local launcher, where there is one, and the ordinary ``env://`` rendezvous
    (``torchrun``, ``accelerate launch``) elsewhere. The backend is gloo for tensors on the host and that of
    the accelerator, whose device is made current. Raises ConfigError for an accelerator that no backend
    serves, and where the hosts cannot connect to each other.
    """
    import torch.distributed as dist

    from zerostart.distributed.failures import explain
    from zerostart.distributed.world import backend_of, default_device, make_device_current
    from zerostart.upstream.torch.process_group import connected_lazily

    if dist.is_initialized():
        return
    make_device_current()
    backend = backend_of(default_device())
    if "ZEROSTART_LAUNCHER_PID" not in os.environ:
        # Where an accelerator has a backend of its own, gloo carries messages alone.
        few = nullcontext() if backend == "gloo" else connected_lazily()
        try:
            with few:
                dist.init_process_group(backend, timeout=timeout)
        except RuntimeError as error:
            if remedy := explain(error):
                raise ConfigError(f"torch cannot make a process group: {error}.{remedy}") from error
            raise
        return
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.FileStore(os.environ["ZEROSTART_STORE"], world_size)  # type: ignore[attr-defined]  # absent from __all__
    store.set_timeout(dist.default_pg_timeout if timeout is None else timeout)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)


def leave_group() -> None:
    """Destroy the process group after a successful run, if there is one."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
