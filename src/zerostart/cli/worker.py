"""The worker's side of the local launcher: join the group, run, report, and never outlive the launcher."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

from zerostart.checkpoint.strict_json import dump_json

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
    temporary.write_text(dump_json(status))
    temporary.replace(target)


def _die_with_launcher() -> None:
    """Ask the kernel to end this process when the launcher is gone, however it went."""
    launcher = os.environ.get("ZEROSTART_LAUNCHER_PID")
    if launcher is None or not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
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

    from zerostart.distributed.network import explained
    from zerostart.distributed.world import backend_of, default_device, make_device_current
    from zerostart.errors import ConfigError
    from zerostart.upstream.torch.store import connected_lazily

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
            if remedy := explained(error):
                raise ConfigError(f"torch makes no process group: {error}.{remedy}") from error
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
        master_listen_fd=int(descriptor) if descriptor is not None else None,
    )
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)


def leave_group() -> None:
    """Take the process group down after a successful run; does nothing where there is none."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
