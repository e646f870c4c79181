"""Kill a worker or a trainer at each message; the next push succeeds."""

import json
import os
import signal
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zerostart
from tests.ranks import _context, rank_outcomes, run_ranks
from zerostart.errors import PeerError
from zerostart.refit.connection import Connection, serve
from zerostart.refit.receiver import FillPlan, Receiver
from zerostart.refit.wire import Channel

SIZE = (6, 4)


def _worker(address: str, name: str, out: Path, die: str, push: int = 1, timeout: float = 40) -> None:
    """Serve, and write down the version after each push; ``die`` selects where to be killed."""
    followed = 0
    engine = nn.Linear(SIZE[1], SIZE[0])

    def load(weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for key, tensor in weights:
            engine.get_parameter(key).data.copy_(tensor)

    receiver = Receiver(engine, load, name=name)
    follow, send = Connection.follow, Channel.send

    def follow_and_record(self: Connection, timeout: float | None = None) -> int:
        nonlocal followed
        try:
            return follow(self, timeout)
        finally:
            followed += 1
            state = {"version": receiver.version, "weight": engine.weight[0, 0].item()}
            (out / f".{name}").write_text(json.dumps(state))
            (out / f".{name}").rename(out / f"{name}.json")

    def dying(self: Channel, kind: str, body: Any, *parts: bytes, **options: Any) -> None:
        if die == f"before {kind}" and followed == push - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        send(self, kind, body, *parts, **options)

    check = FillPlan.check

    def torn(*arguments: Any) -> None:
        if followed == push - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        check(*arguments)

    Connection.follow = follow_and_record  # type: ignore[method-assign]
    Channel.send = dying  # type: ignore[method-assign]
    if die == "in the fill":
        FillPlan.check = torn  # type: ignore[method-assign]
    serve(receiver, address, timeout=timeout, patience=40)


def _start(*arguments: Any) -> Any:
    process = _context().Process(target=_worker, args=arguments, daemon=True)
    process.start()
    return process


def _model() -> nn.Module:
    weights = {"weight": torch.ones(SIZE), "bias": torch.zeros(SIZE[0])}
    return zerostart.load(weights, lambda: nn.Linear(SIZE[1], SIZE[0]), engine="fsdp2", progress=False)


def _set(model: nn.Module, value: float) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)


def _lose_workers(address: str, points: list[str], folder: Path) -> list[tuple[str, int]]:
    """Push on one rank; before each push a worker joins that is killed in it."""
    model, results = _model(), []
    with zerostart.refit(model, address, timeout=30) as refitter:
        refitter.push()
        for number, point in enumerate(points):
            if torch.distributed.get_rank() == 0:
                (folder / f"start-{number}").touch()
                if point == "before wants":
                    _await(folder / f"died-{number}")
                else:
                    refitter._transport._server.wait_for(2)  # type: ignore[union-attr]
            torch.distributed.barrier()
            _set(model, 10.0 * (number + 1))
            error_text = ""
            try:
                refitter.push()
            except PeerError as error:
                error_text = str(error)
            results.append((error_text, refitter.version))
            _set(model, 10.0 * (number + 1) + 1)
            report = refitter.push()
            assert [worker.name for worker in report.workers] == ["healthy"], report
    return results


def _await(path: Path) -> None:
    until = time.monotonic() + 40
    while not path.exists():
        assert time.monotonic() < until, path
        time.sleep(0.02)


@pytest.mark.slow
def test_a_worker_killed_at_each_message(tmp_path: Path) -> None:
    points = ["before wants", "in the fill", "before serving"]
    address = f"unix://{tmp_path}/workers"
    healthy = _start(address, "healthy", tmp_path, "")

    def doomed() -> None:
        for number, point in enumerate(points):
            _await(tmp_path / f"start-{number}")
            process = _start(address, "doomed", tmp_path, point)
            process.join(60)
            (tmp_path / f"died-{number}").touch()

    thread = threading.Thread(target=doomed, daemon=True)
    thread.start()
    try:
        ranks = run_ranks(_lose_workers, 2, address, points, tmp_path, timeout=150)
        thread.join(30)
        healthy.join(30)
    finally:
        healthy.kill()
    for (text, _), (other, _), point in zip(*ranks, points, strict=True):
        # All ranks raise the same error. A worker that never joined delays no push.
        assert text == other
        assert ("doomed" in text) == (point != "before wants"), (point, text)
        assert not text or "is served by healthy" in text, (point, text)
    assert json.loads((tmp_path / "healthy.json").read_text()) == {"version": 7, "weight": 31.0}


def _die(address: str, point: str, rank: int) -> None:
    """On one rank: two pushes, in the second of which ``rank`` is killed."""
    from zerostart.refit import refitter as module
    from zerostart.refit.server import WorkerServer

    model = _model()
    with zerostart.refit(model, address, workers=2, timeout=30) as refitter:
        refitter.push()
        _set(model, 2.0)
        if torch.distributed.get_rank() == rank:

            def kill(*arguments: object, **options: object) -> Any:
                os.kill(os.getpid(), signal.SIGKILL)

            if point == "writing":
                module.write_out = kill
            elif point == "written":
                WorkerServer.serve = kill  # type: ignore[method-assign]
            elif point == "told":
                Channel.receive = kill  # type: ignore[method-assign]
        refitter.push()


def _push_again(address: str) -> list[str]:
    model = _model()
    with zerostart.refit(model, address, workers=2, timeout=30) as refitter:
        _set(model, 3.0)
        return sorted(worker.name for worker in refitter.push().workers)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("point", "rank", "new"), [("writing", 1, False), ("written", 0, False), ("told", 0, True)]
)
def test_a_trainer_killed_at_each_message(tmp_path: Path, point: str, rank: int, new: bool) -> None:
    address = f"unix://{tmp_path}/workers"
    workers = [_start(address, name, tmp_path, "") for name in ("a", "b")]
    try:
        outcomes = rank_outcomes(_die, 2, address, point, rank, timeout=90, grace=60)
        assert outcomes[rank].exit_code == -signal.SIGKILL, outcomes[rank].describe()
        assert outcomes[1 - rank].error.endswith("PeerError"), outcomes[1 - rank].describe()
        old, held = {"version": 1, "weight": 1.0}, {"version": 2, "weight": 2.0}
        time.sleep(1)
        for name in ("a", "b"):
            # After the message each worker may have either version.
            assert json.loads((tmp_path / f"{name}.json").read_text()) in ([old, held] if new else [old])
        # Another trainer at the same address: the workers have waited for it.
        assert run_ranks(_push_again, 2, address, timeout=90) == [["a", "b"]] * 2
        for worker in workers:
            worker.join(30)
        for name in ("a", "b"):
            assert json.loads((tmp_path / f"{name}.json").read_text()) == {"version": 1, "weight": 3.0}
    finally:
        for worker in workers:
            with suppress(ValueError):
                worker.kill()
