"""Start the ranks of one machine, watch them, and bring back one result or one error.

The launcher is a plain subprocess supervisor and imports no torch, so that it starts at once and owes
nothing to the state of the workers. torch's own ``start_processes`` was considered: it stops the
survivors as soon as one rank fails, so they could never report the error that they agreed on.

Environment of a worker, besides the usual ``RANK``, ``LOCAL_RANK``, ``WORLD_SIZE``,
``LOCAL_WORLD_SIZE``, ``MASTER_ADDR`` and ``MASTER_PORT``: ``ZEROSTART_STATUS_FILE`` (where its report
goes), ``ZEROSTART_LAUNCHER_PID``, and on rank 0 ``ZEROSTART_STORE_FD`` (a listening socket for the
rendezvous store, which leaves no moment in which another process could take the port).
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import re
import shutil
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

# Seconds: between two looks at the ranks, and from SIGTERM to SIGKILL. Then lines of a rank's output that are
# shown.
_POLL_SECONDS = 0.02
_TERM_SECONDS = 5.0
_TAIL_LINES = 30
_INTERRUPTED = (128 + signal.SIGINT, -signal.SIGINT, -signal.SIGTERM)


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
        """Whether the rank has ended; what it left behind in its process group is ended with it."""
        if self.returncode is None:
            # WNOWAIT keeps the zombie, and with it the group id, until the group has been signalled:
            # a group id that nobody holds could belong to a stranger by then.
            flags = os.WEXITED | os.WNOWAIT | os.WNOHANG
            if os.waitid(os.P_PID, self.process.pid, flags) is None:
                return False
            _signal_group(self.process.pid, signal.SIGKILL)
            self.returncode = self._ended(self.process.wait())
        return True

    def _ended(self, code: int) -> int:
        """How the rank ended: well, too, where its interpreter was aborted after it had told its result.

        Threads of torch's stores and process groups run while it is taken down, and all is written by then.
        """
        return 0 if -code in (signal.SIGABRT, signal.SIGSEGV) and "result" in self.report() else code

    def report(self) -> dict[str, Any]:
        """What the rank wrote before it ended; empty when it could not."""
        if not self.status.exists():
            return {}
        loaded = json.loads(self.status.read_text())
        return loaded if isinstance(loaded, dict) else {}


def run_local_ranks(
    module: str,
    argv: Sequence[str],
    nproc: int,
    *,
    grace: float = 20.0,
    env: Mapping[str, str] | None = None,
) -> list[Any]:
    """Run ``python -m module *argv`` as ``nproc`` ranks on this machine; returns their results by rank.

    The module's main calls :func:`zerostart.cli.launch.worker_main`; the result of a rank is what its
    function returned, through JSON. Rank 0 writes to this terminal; the output of the others is kept
    aside and shown when they end without a report. ``env`` is added to the environment of every rank.

    When a rank fails, the others have ``grace`` seconds to raise the error that names the cause; then
    they are terminated. The first Ctrl-C (or SIGTERM) is passed on once, and the ranks end in their own
    way; the second ends them.

    Raises the :class:`ZerostartError` that the ranks report; :class:`PeerError` when a rank was killed,
    ended without a report, or failed with a foreign exception; :class:`KeyboardInterrupt` when the ranks
    were interrupted before they had a result; :class:`ConfigError` when ``nproc`` is not positive.
    """
    if nproc < 1:
        raise ConfigError(f"the number of local ranks must be at least 1, not {nproc}")
    with _scratch() as scratch:
        # Before the first rank is started, so that a Ctrl-C finds all of them supervised.
        with _caught_signals() as caught:
            workers = _start(module, argv, nproc, scratch, env or {})
            # In the order in which they end, which tells a cause from what follows of it.
            ended: list[_Worker] = []
            try:
                _supervise(workers, ended, caught, grace)
            finally:
                _stop(workers)
        # Within the scratch folder's life: reports and logs of ranks lie there.
        return _outcome(ended, interrupted=bool(caught))


#: How names of launchers' folders begin and end, and the seconds after which one that nobody has locked was
#: left.
_SCRATCH, _DRAWN, _LEFT_SECONDS = "zerostart-ranks.", "[a-z0-9_]{8}", 60.0

_OTHER_TEMPORARY = "Free room there, or name another directory in the variable TMPDIR"


@contextmanager
def _scratch() -> Iterator[Path]:
    """A folder for what ranks tell, gone at the end; those of launchers that were killed go as well.

    Its lock ends with this process, however it ends.
    """
    prefix = f"{_SCRATCH}{_boot()}."
    with contextlib.suppress(OSError):  # there is none: said below
        _remove_left(Path(tempfile.gettempdir()), prefix)
    try:
        made = tempfile.TemporaryDirectory(prefix=prefix, ignore_cleanup_errors=True)
    except OSError as error:
        raise ConfigError(f"no temporary folder can be made: {error}. {_OTHER_TEMPORARY}") from error
    with made as folder:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            with contextlib.suppress(OSError):  # NFS locks no directory: nobody removes it there either
                fcntl.flock(handle, fcntl.LOCK_EX)
            yield Path(folder)
        finally:
            os.close(handle)


def _boot() -> str:
    """What no other running kernel has: locks of a shared file system may hold on one machine alone."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip().replace("-", "")
    return re.sub(r"\W", "_", socket.gethostname())


def _remove_left(place: Path, prefix: str) -> None:
    """Remove the folders in ``place`` that this user's launchers on this machine have left."""
    own = re.compile(re.escape(prefix) + _DRAWN)
    for folder in place.glob(f"{prefix}*"):
        if not own.fullmatch(folder.name):
            continue
        with contextlib.suppress(OSError):  # another launcher removes it, or it is another user's
            handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                known = os.fstat(handle)
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # One that was made a moment ago may not be locked yet.
                if known.st_uid == os.getuid() and time.time() - known.st_mtime > _LEFT_SECONDS:
                    shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(handle)


def _start(
    module: str, argv: Sequence[str], nproc: int, scratch: Path, env: Mapping[str, str]
) -> list[_Worker]:
    # Those that this process may use, of which a container or taskset may leave fewer than the machine has.
    cores = len(os.sched_getaffinity(0))
    workers: list[_Worker] = []
    with socket.socket() as store:
        # The socket is bound here and handed to rank 0: a port that was only chosen could be another's by the
        # time rank 0 listens.
        store.bind(("127.0.0.1", 0))
        store.listen(max(64, nproc))
        common = {
            # Before the environment, so that a user's own setting holds; what follows it is the launcher's
            # alone.
            "OMP_NUM_THREADS": str(max(1, cores // nproc)),
            **_loopback(),
            **os.environ,
            "WORLD_SIZE": str(nproc),
            "LOCAL_WORLD_SIZE": str(nproc),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(store.getsockname()[1]),
            "ZEROSTART_LAUNCHER_PID": str(os.getpid()),
            **env,
        }
        try:
            for rank in range(nproc):
                log, status = scratch / f"rank{rank}.log", scratch / f"rank{rank}.json"
                own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "ZEROSTART_STATUS_FILE": str(status)}
                if rank == 0:
                    own["ZEROSTART_STORE_FD"] = str(store.fileno())
                with log.open("wb") as output:
                    process = subprocess.Popen(
                        [sys.executable, "-m", module, *argv],
                        env={**common, **own},
                        stdin=subprocess.DEVNULL,
                        stdout=None if rank == 0 else output,
                        stderr=None if rank == 0 else subprocess.STDOUT,
                        # Rank 0 listens on it after ``with`` has closed it here: the port is never free in
                        # between.
                        pass_fds=(store.fileno(),) if rank == 0 else (),
                        # A session of its own: the terminal's Ctrl-C reaches the launcher alone.
                        start_new_session=True,
                    )
                workers.append(_Worker(rank, process, log, status))
        except BaseException:
            _stop(workers)
            raise
    return workers


def _loopback() -> dict[str, str]:
    """Keep gloo on the loopback interface: ranks on one machine need no host name that resolves."""
    names = {name for _, name in socket.if_nameindex()}
    return {"GLOO_SOCKET_IFNAME": "lo"} if "lo" in names else {}


def _supervise(workers: Sequence[_Worker], ended: list[_Worker], caught: Sequence[int], grace: float) -> None:
    """Wait until every rank has ended; ``ended`` receives them in the order in which they did."""
    pending = list(workers)
    # None until a rank has failed.
    deadline: float | None = None
    forwarded = False
    while pending:
        for worker in [worker for worker in pending if worker.poll()]:
            pending.remove(worker)
            ended.append(worker)
            # The first failure starts the clock: the others are to raise the error that all agree on, and
            # have so long for it.
            if worker.returncode != 0 and deadline is None:
                deadline = time.monotonic() + grace
        if caught and not forwarded:
            forwarded = True
            for worker in pending:
                # The rank alone and not its group: its workers that load data are its own to end.
                os.kill(worker.process.pid, caught[0])
        # Stopped ranks are still polled: the next turns take them to ``ended``, and the loop ends with them.
        if len(caught) > 1 or (deadline is not None and time.monotonic() > deadline):
            _stop(pending)
        else:
            time.sleep(_POLL_SECONDS)


def _stop(workers: Sequence[_Worker]) -> None:
    """End the ranks that still run: SIGTERM to each process group, SIGKILL to those that stay."""
    running = [worker for worker in workers if not worker.poll()]
    for worker in running:
        worker.stopped = True
        _signal_group(worker.process.pid, signal.SIGTERM)
    deadline = time.monotonic() + _TERM_SECONDS
    # One time for all of them together, not for each.
    while running and time.monotonic() < deadline:
        running = [worker for worker in running if not worker.poll()]
        time.sleep(_POLL_SECONDS)
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
    """Collect SIGINT and SIGTERM instead of being ended by them; outside the main thread, collect none."""
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
    """The results by rank, or the one error that tells why there are none."""
    failed = [worker for worker in ended if worker.returncode != 0]
    if not failed:
        return [worker.report().get("result") for worker in sorted(ended, key=lambda worker: worker.rank)]
    # Ranks that this launcher has ended say nothing of the cause.
    own = [worker for worker in failed if not worker.stopped]
    if interrupted and all(worker.returncode in _INTERRUPTED for worker in own):
        raise KeyboardInterrupt
    if os.environ.get("ZEROSTART_TRACEBACK"):
        _show_tracebacks(failed)
    killed = [worker for worker in own if worker.returncode is not None and worker.returncode < 0]
    if killed:
        raise PeerError(_killed_message(killed, [worker for worker in failed if worker not in killed]))
    raise _primary(own or failed)


def _killed_message(killed: Sequence[_Worker], survivors: Sequence[_Worker]) -> str:
    deaths = []
    for worker in killed:
        number = -(worker.returncode or 0)
        hint = "; the kernel does so when memory runs out" if number == signal.SIGKILL else ""
        name = signal.Signals(number).name
        deaths.append(f"rank {worker.rank} was killed by signal {number} ({name}{hint})")
    said = dict.fromkeys(_line(worker) for worker in survivors if worker.report())
    # Ranks that agreed on an error say the same: it is told once.
    message = ", ".join(deaths)
    if said:
        message += "; surviving ranks report: " + "; ".join(said)
    elif survivors:
        message += "; surviving ranks were stopped without a report"
    return message


def _line(worker: _Worker) -> str:
    report = worker.report()
    return f"{report.get('type')}: {report.get('message')}"


def _primary(failed: Sequence[_Worker]) -> ZerostartError:
    """The error of the rank that names the cause: a named error first, else what ended first.

    A :class:`PeerError` comes last, for it is an echo of what happened on another rank.
    """
    named = [(worker, _named_error(worker)) for worker in failed]
    causes = [error for _, error in named if error is not None and not isinstance(error, PeerError)]
    if causes:
        return causes[0]
    # No cause among named errors: then an exception of somebody else's, of the rank that ended first, before
    # the echoes of it.
    for worker, error in named:
        if error is None:
            return _foreign_error(worker)
    return named[0][1] or _foreign_error(named[0][0])


def _named_error(worker: _Worker) -> ZerostartError | None:
    report = worker.report()
    # By its name, in our module of errors alone: a report is data, and a class of another name is a foreign
    # one.
    kind = getattr(errors, str(report.get("type")), None)
    if isinstance(kind, type) and issubclass(kind, ZerostartError):
        return kind(str(report.get("message")))
    return None


def _foreign_error(worker: _Worker) -> PeerError:
    if worker.report():
        hint = "" if os.environ.get("ZEROSTART_TRACEBACK") else " (--traceback shows where)"
        return PeerError(f"rank {worker.rank} failed with {_line(worker)}{hint}")
    if worker.stopped:
        return PeerError(f"rank {worker.rank} did not exit and was stopped")
    # Of rank 0 there is nothing in it: it has written to the terminal itself.
    tail = worker.log.read_text(errors="replace").splitlines()[-_TAIL_LINES:]
    for line in tail:
        print(f"[rank {worker.rank}] {printable(line)}", file=sys.stderr)
    return PeerError(f"rank {worker.rank} exited with status {worker.returncode} and without a report")


def _show_tracebacks(failed: Sequence[_Worker]) -> None:
    for worker in failed:
        for line in str(worker.report().get("traceback", "")).splitlines():
            print(f"[rank {worker.rank}] {printable(line)}", file=sys.stderr)


_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def worker_main(function: Callable[[list[str]], object]) -> NoReturn:
    """Run ``function(argv)`` as one rank and end the process with 0, 1 (error) or 130 (interrupted).

    What the function returns must be plain JSON data; it becomes the rank's result in
    :func:`zerostart.cli.launch.run_local_ranks`. Any exception is written to the rank's status file and
    not printed: the launcher prints one line for all ranks.
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
    # Not sys.exit: finalising an interpreter whose process group waits for a dead peer can hang for the
    # length of the group's time-out.
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
        # What it was about to tell comes first: it may be all that anybody learns of it.
        print(status.get("traceback", ""), file=sys.stderr, end="")
        rank = os.environ.get("RANK", "0")
        print(
            f"error: rank {rank} cannot write {temporary}: {error.strerror}. {_OTHER_TEMPORARY}",
            file=sys.stderr,
        )
        _leave(1)


def _die_with_launcher() -> None:
    """Ask the kernel to end this process when the launcher is gone, however it went."""
    launcher = os.environ.get("ZEROSTART_LAUNCHER_PID")
    if launcher is None or not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    # The kernel tells only of an end that comes after it was asked.
    if os.getppid() != int(launcher):  # it went before the call above
        os._exit(1)


def join_group(timeout: timedelta | None = None) -> None:
    """Initialise ``torch.distributed`` for this rank from its environment; does nothing when it is already.

    Uses the socket that the local launcher holds open, where there is one, and the ordinary ``env://``
    rendezvous (``torchrun``, ``accelerate launch``) elsewhere. The backend is gloo for tensors on the host,
    beside that of the accelerator (NCCL, XCCL, HCCL, ...), of which the rank's device is made current.
    Without a ``timeout`` torch's own holds. Raises ConfigError for an accelerator that no backend serves, and
    where the hosts cannot connect to each other, with what to do.
    """
    import torch.distributed as dist

    from zerostart.distributed.missing_ranks import explain
    from zerostart.distributed.world import backend_of, default_device, make_device_current
    from zerostart.errors import ConfigError
    from zerostart.upstream.torch.process_group import connected_lazily

    if dist.is_initialized():
        return
    make_device_current()
    backend = backend_of(default_device())
    # Started by another launcher, or by hand: the address in the environment is its own affair.
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
    descriptor = os.environ.get("ZEROSTART_STORE_FD")
    store = dist.TCPStore(  # type: ignore[attr-defined]  # public in the documentation, absent from __all__
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        world_size,
        is_master=rank == 0,
        timeout=dist.default_pg_timeout if timeout is None else timeout,
        # Rank 0 alone has one; the others connect to it.
        master_listen_fd=int(descriptor) if descriptor is not None else None,
    )
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)


def leave_group() -> None:
    """Take the process group down after a successful run; does nothing where there is none."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
