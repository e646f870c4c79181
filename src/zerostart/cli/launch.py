"""Start the ranks of one machine, and return their results or one error.

Environment of a worker, besides the variables of ``torchrun``: ``ZEROSTART_STORE`` (the file in which the
ranks meet; their reports are next to it) and ``ZEROSTART_LAUNCHER_PID``.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import logging
import os
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from zerostart import errors
from zerostart.checkpoint.strict_json import dump_json
from zerostart.errors import ConfigError, PeerError, ZerostartError, printable

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing import PContext

POLL_SECONDS, TERMINATE_SECONDS = 0.02, 5
#: Time in which all ranks report after the first one has, in seconds.
GRACE_SECONDS = 20.0
#: Lines of a rank's output that are shown if it ends without a report.
TAIL_LINES = 30
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def run_local_ranks(
    module: str, argv: Sequence[str], nproc: int, *, env: Mapping[str, str] | None = None
) -> list[Any]:
    """Run ``python -m module *argv`` as ``nproc`` local ranks; return results by rank.

    The module's main calls ``worker_main``; the result of a rank is the return value of its function, through
    JSON. Rank 0 writes to this terminal; the output of the others is shown if they end without a report. The
    first Ctrl-C (or SIGTERM) is forwarded to the ranks; the second one stops them.

    Raises the ZerostartError that the ranks report, PeerError when a rank was killed, ended without a report
    or failed with a foreign exception, KeyboardInterrupt when the ranks were interrupted before they had a
    result, and ConfigError when ``nproc`` is not positive.
    """
    if nproc < 1:
        raise ConfigError(f"the number of local ranks must be at least 1, not {nproc}")
    from torch.distributed.elastic.multiprocessing import (
        DefaultLogsSpecs,
        SignalException,
        Std,
        start_processes,
    )

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    try:
        scratch = tempfile.TemporaryDirectory(prefix="zerostart-ranks.", ignore_cleanup_errors=True)
    except OSError as error:
        raise ConfigError(
            f"cannot create a temporary folder: {error}. Name another directory in the variable TMPDIR"
        ) from error
    with scratch as folder, _restore_signals():
        try:
            context = start_processes(
                "zerostart",
                sys.executable,
                # -P: modules in the working directory, which may be a stranger's, are not imported.
                dict.fromkeys(range(nproc), ("-P", "-m", module, *argv)),
                {rank: _make_environment(rank, nproc, folder) | dict(env or {}) for rank in range(nproc)},
                DefaultLogsSpecs(folder, {rank: Std.ALL if rank else Std.NONE for rank in range(nproc)}),
            )
            codes, interrupted = _supervise(context)
        except SignalException:
            raise KeyboardInterrupt from None
        return _collect_results(
            context, [_read_report(Path(folder), rank) for rank in range(nproc)], codes, interrupted
        )


def _make_environment(rank: int, nproc: int, folder: str) -> dict[str, str]:
    return {
        "OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // nproc)),
        # Ranks on one machine need no host name that resolves.
        **({"GLOO_SOCKET_IFNAME": "lo"} if any(name == "lo" for _, name in socket.if_nameindex()) else {}),
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(nproc),
        "LOCAL_WORLD_SIZE": str(nproc),
        "ZEROSTART_LAUNCHER_PID": str(os.getpid()),
        # In a private folder: any user of the machine could join at a port.
        "ZEROSTART_STORE": f"{folder}/store",
    }


@contextlib.contextmanager
def _restore_signals() -> Iterator[None]:
    """Let torch handle only Ctrl-C and SIGTERM, and put this process's handlers back."""
    os.environ.setdefault("TORCHELASTIC_SIGNALS_TO_HANDLE", "SIGINT,SIGTERM")  # not the SIGHUP of nohup
    previous = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _supervise(context: PContext) -> tuple[dict[int, int], bool]:
    """Wait for the ranks; return exit codes of failed ranks in order of failure.

    The second value is True if Ctrl-C was forwarded.
    """
    from torch.distributed.elastic.multiprocessing import SignalException

    try:
        try:
            result, interrupted = context.wait(period=POLL_SECONDS), False
        except SignalException as signalled:
            for pid in context.pids().values():
                # Not to the process group: a rank stops its data workers itself.
                with contextlib.suppress(ProcessLookupError):  # it has ended
                    os.kill(pid, signalled.sigval)
            result, interrupted = context.wait(period=POLL_SECONDS), True
    finally:
        context.close(timeout=TERMINATE_SECONDS)
    assert result is not None, "wait has no timeout"
    return {rank: failure.exitcode for rank, failure in result.failures.items()}, interrupted


def _collect_results(
    context: PContext, reports: list[dict[str, Any]], codes: Mapping[int, int], interrupted: bool
) -> list[object]:
    # Ignore exit codes: threads of torch may abort the interpreter at its end.
    if all("result" in report for report in reports):
        return [report["result"] for report in reports]
    failed = {rank: report for rank, report in enumerate(reports) if "type" in report}
    if interrupted and not failed:
        raise KeyboardInterrupt
    if os.environ.get("ZEROSTART_TRACEBACK"):
        for rank, report in failed.items():
            for line in report["traceback"].splitlines():
                print(f"[rank {rank}] {printable(line)}", file=sys.stderr)
    silent = [rank for rank in (*codes, *range(len(reports))) if not reports[rank]]
    for rank in silent:
        number = -codes.get(rank, 0)
        if number > 0 and number != signal.SIGTERM:  # by which torch ends the other ranks
            hint = "; the kernel does so when memory runs out" if number == signal.SIGKILL else ""
            raise PeerError(
                f"rank {rank} was killed by signal {number} ({signal.Signals(number).name}{hint})"
            )
    # A named cause first, then another library's error; a reported PeerError is an echo of either.
    causes = [_make_error(rank, report) for rank, report in failed.items() if report["type"] != "PeerError"]
    if causes:
        raise min(causes, key=lambda cause: isinstance(cause, PeerError))
    for rank in silent:
        # Rank 0 has written to the terminal itself.
        for log in filter(None, (context.stdouts[rank], context.stderrs[rank])):
            for line in Path(log).read_text(errors="replace").splitlines()[-TAIL_LINES:]:
                print(f"[rank {rank}] {printable(line)}", file=sys.stderr)
        raise PeerError(f"rank {rank} exited with status {codes.get(rank, 0)} and without a report")
    if failed:
        raise PeerError(next(iter(failed.values()))["message"])
    raise KeyboardInterrupt


def _make_error(rank: int, report: Mapping[str, str]) -> ZerostartError:
    kind = getattr(errors, report["type"], None)
    if isinstance(kind, type) and issubclass(kind, ZerostartError):
        return kind(report["message"])
    hint = "" if os.environ.get("ZEROSTART_TRACEBACK") else " (--traceback shows where)"
    return PeerError(f"rank {rank} failed with {report['type']}: {report['message']}{hint}")


def worker_main(function: Callable[[list[str]], object]) -> NoReturn:
    """Run ``function(argv)`` as one rank, and end the process.

    The function returns plain JSON data, the rank's result in ``run_local_ranks``. Exceptions are reported to
    the launcher, which prints one line for all ranks. Exit codes: 0, 1 (error) or 130 (interrupted).
    """
    _die_with_launcher()
    try:
        _write_report({"result": function(sys.argv[1:])})
    except KeyboardInterrupt:
        _write_report({"interrupted": True})
        _leave(128 + signal.SIGINT)
    except BaseException as error:
        _write_report(
            {"type": type(error).__name__, "message": str(error), "traceback": traceback.format_exc()}
        )
        _leave(1)
    sys.exit(0)


def _leave(code: int) -> NoReturn:
    # Not sys.exit, which would wait until the process group times out on a dead peer.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _write_report(report: dict[str, object]) -> None:
    """Write this rank's report, and wait for the other reports.

    The launcher stops all ranks when the first process fails.
    """
    folder = Path(os.environ["ZEROSTART_STORE"]).parent
    temporary = folder / f"{os.environ['RANK']}.tmp"
    temporary.write_text(dump_json(report))
    temporary.rename(temporary.with_suffix(".json"))
    deadline = time.monotonic() + GRACE_SECONDS
    while len(list(folder.glob("*.json"))) < int(os.environ["WORLD_SIZE"]) and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)


def _read_report(folder: Path, rank: int) -> dict[str, Any]:
    path = folder / f"{rank}.json"
    report: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return report


def _die_with_launcher() -> None:
    """Ask the kernel to end this process with its launcher."""
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != int(os.environ["ZEROSTART_LAUNCHER_PID"]):  # it ended before the call above
        os._exit(1)


def join_group() -> None:
    """Initialise ``torch.distributed`` for this rank from its environment, unless it is already.

    Uses the file of the local launcher if there is one, otherwise the ``env://`` rendezvous (``torchrun``,
    ``accelerate launch``). The backends are gloo for the host and the accelerator's own, whose device becomes
    current. Raises ConfigError for an accelerator without a backend, and if hosts cannot connect.
    """
    import torch.distributed as dist

    from zerostart.distributed.failures import explain
    from zerostart.distributed.world import backend_of, default_device, make_device_current
    from zerostart.upstream.torch.process_group import lazy_connections

    if dist.is_initialized():
        return
    make_device_current()
    backend = backend_of(default_device())
    if path := os.environ.get("ZEROSTART_STORE"):
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        store = dist.FileStore(path, world_size)  # type: ignore[attr-defined]  # absent from __all__
        store.set_timeout(dist.default_pg_timeout)
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size)
        return
    # With an accelerator, gloo sends only small messages, so it connects lazily.
    lazily = contextlib.nullcontext() if backend == "gloo" else lazy_connections()
    try:
        with lazily:
            dist.init_process_group(backend)
    except RuntimeError as error:
        if remedy := explain(error):
            raise ConfigError(f"torch cannot make a process group: {error}.{remedy}") from error
        raise


def leave_group() -> None:
    """Destroy the process group after a successful run, if there is one."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
