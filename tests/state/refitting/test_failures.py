"""A worker or a trainer killed at each message in turn: the old version or the new, and the next push "
"succeeds."""

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
from zerostart.checkpoint.channel import Channel
from zerostart.errors import PeerError
from zerostart.state.refitting.connection import Connection, serve
from zerostart.state.refitting.receiver import Receiver
from zerostart.state.refitting.transports import group

SIZE = (6, 4)


def _worker(address: str, name: str, out: Path, die: str, push: int = 1, timeout: float = 40) -> None:
    """Serve, noting what is served after each push; ``die`` is where to be killed in a push, if anywhere."""
    followed = 0
    engine = nn.Linear(SIZE[1], SIZE[0])

    def load(weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for key, tensor in weights:
            engine.get_parameter(key).data.copy_(tensor)

    receiver = Receiver(engine, load, name=name)
    follow, send = Connection.follow, Channel.send

    def noted(self: Connection, timeout: float | None = None) -> int:
        nonlocal followed
        try:
            return follow(self, timeout)
        finally:
            followed += 1
            held = {"version": receiver.version, "weight": engine.weight[0, 0].item()}
            (out / f".{name}").write_text(json.dumps(held))
            (out / f".{name}").rename(out / f"{name}.json")

    def dying(self: Channel, kind: str, body: Any = None, *parts: bytes) -> None:
        if die == f"before {kind}" and followed == push - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        send(self, kind, body, *parts)
        if die == f"after {kind}" and followed == push - 1:
            os.kill(os.getpid(), signal.SIGKILL)

    compare = receiver._compare

    def torn(*arguments: Any, **options: Any) -> None:
        if followed == push - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        compare(*arguments, **options)

    Connection.follow = noted  # type: ignore[method-assign]
    Channel.send = dying  # type: ignore[method-assign]
    if die == "in the fill":
        receiver._compare = torn  # type: ignore[method-assign]
    serve(receiver, address, timeout=timeout, patience=40)


def _start(*arguments: Any) -> Any:
    process = _context().Process(target=_worker, args=arguments, daemon=True)
    process.start()
    return process


def _model() -> nn.Module:
    weights = {"weight": torch.ones(SIZE), "bias": torch.zeros(SIZE[0])}
    source = weights if torch.distributed.get_rank() == 0 else None
    return zerostart.load(source, lambda: nn.Linear(SIZE[1], SIZE[0]), engine="fsdp2", progress=False)


def _set(model: nn.Module, value: float) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)


def _lose_workers(
    address: str, points: list[str], folder: Path, options: dict[str, Any]
) -> list[tuple[str, int]]:
    """On one rank: before each push a worker joins that is killed in it; what the push says, and the next.

    With deltas the push before brings it to a version, and it is killed while it gets what has changed.
    """
    model, found = _model(), []
    with zerostart.refit(model, address, timeout=30, **options) as refitter:
        refitter.push()
        for number, point in enumerate(points):
            if torch.distributed.get_rank() == 0:
                (folder / f"start-{number}").touch()
                if point == "before wants":
                    _await(folder / f"died-{number}")
                else:
                    assert refitter._session is not None
                    refitter._session.wait_for(2, 30)
            torch.distributed.barrier()
            if "full_every" in options:
                assert len(refitter.push().workers) == 2  # type: ignore[union-attr]
                assert refitter._base is not None
            _set(model, 10.0 * (number + 1))
            said = ""
            try:
                refitter.push()
            except PeerError as error:
                said = str(error)
            found.append((said, refitter.version))
            _set(model, 10.0 * (number + 1) + 1)
            report = refitter.push()
            assert [worker.name for worker in report.workers] == ["healthy"], report
    return found


def _await(path: Path) -> None:
    until = time.monotonic() + 40
    while not path.exists():
        assert time.monotonic() < until, path
        time.sleep(0.02)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"full_every": 9},
        pytest.param({"full_every": 9, "transport": "group"}, marks=pytest.mark.slow),
    ],
    ids=["full", "deltas", "deltas-by-group"],
)
def test_a_worker_killed_at_each_message(tmp_path: Path, options: dict[str, Any]) -> None:
    points = ["before prepared", "after prepared", "in the fill", "before serving"]
    if not options:
        points.insert(0, "before wants")
    address = f"unix://{tmp_path}/workers"
    healthy = _start(address, "healthy", tmp_path, "")

    def doomed() -> None:
        for number, point in enumerate(points):
            _await(tmp_path / f"start-{number}")
            process = _start(address, "doomed", tmp_path, point, 2 if options else 1)
            process.join(60)
            (tmp_path / f"died-{number}").touch()

    thread = threading.Thread(target=doomed, daemon=True)
    thread.start()
    try:
        ranks = run_ranks(_lose_workers, 2, address, points, tmp_path, options, timeout=150)
        thread.join(30)
        healthy.join(30)
    finally:
        healthy.kill()
    for (said, _), (other, _), point in zip(*ranks, points, strict=True):
        # The same on all ranks; a worker that never joined holds nobody up.
        assert said == other
        assert ("doomed" in said) == (point != "before wants"), (point, said)
        decided = point in ("in the fill", "before serving", "after prepared")
        assert not said or decided == ("is served by healthy" in said), (point, said)
    last = {"version": 13, "weight": 41.0} if options else {"version": 11, "weight": 51.0}
    assert json.loads((tmp_path / "healthy.json").read_text()) == last


def _die(address: str, point: str, rank: int, options: dict[str, Any]) -> None:
    """On one rank: two pushes, in the second of which ``rank`` is killed."""
    from zerostart.state.refitting import refitter as module
    from zerostart.state.refitting.session import Session

    model = _model()
    with zerostart.refit(model, address, workers=2, timeout=30, **options) as refitter:
        refitter.push()
        if refitter._place is not None:  # rank 0
            Path(address.removeprefix("unix://")).with_name("place").write_text(str(refitter._place.path))
        _set(model, 2.0)
        if torch.distributed.get_rank() == rank:

            def kill(*arguments: object, **options: object) -> Any:
                os.kill(os.getpid(), signal.SIGKILL)

            if point.startswith("message"):
                transmit, left = group._Parcel._transmit, int(point.removeprefix("message "))

                def counted(parcel: group._Parcel, tensor: torch.Tensor) -> None:
                    nonlocal left
                    left -= 1
                    if not left:
                        kill()
                    transmit(parcel, tensor)

                group._Parcel._transmit = counted  # type: ignore[method-assign]
            elif point == "writing":
                module.write_out = kill
            elif point == "written":
                Session.prepared = kill  # type: ignore[method-assign]
            elif point == "decided":
                real = Channel.send

                def send(self: Channel, kind: str, body: Any = None, *parts: bytes) -> None:
                    if kind == "commit":
                        kill()
                    real(self, kind, body, *parts)

                Channel.send = send  # type: ignore[method-assign]
            elif point == "told":
                Session.served = kill  # type: ignore[method-assign]
        refitter.push()


def _push_again(address: str) -> list[str]:
    model = _model()
    with zerostart.refit(model, address, workers=2, timeout=30) as refitter:
        _set(model, 3.0)
        return sorted(worker.name for worker in refitter.push().workers)


@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param({"full_every": 9, "transport": "group"}, marks=pytest.mark.slow),
    ],
    ids=["full", "deltas-by-group"],
)
@pytest.mark.parametrize(
    ("point", "rank", "new"),
    [("writing", 1, False), ("written", 0, False), ("decided", 0, True), ("told", 0, True)],
)
def test_a_trainer_killed_at_each_message(
    tmp_path: Path, point: str, rank: int, new: bool, options: dict[str, Any]
) -> None:
    _kill_a_trainer(tmp_path, point, rank, new, options)


@pytest.mark.slow
@pytest.mark.parametrize("full_every", [1, 9], ids=["full", "delta"])
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("message", [1, 2, 3, 4, 8])
def test_a_trainer_killed_at_each_message_of_the_group(
    tmp_path: Path, message: int, rank: int, full_every: int
) -> None:
    """To each worker go a header, a table, its content, and a header without more: eight by each rank."""
    options = {"full_every": full_every, "transport": "group"}
    _kill_a_trainer(tmp_path, f"message {message}", rank, False, options)


def _kill_a_trainer(tmp_path: Path, point: str, rank: int, new: bool, options: dict[str, Any]) -> None:
    address = f"unix://{tmp_path}/workers"
    workers = [_start(address, name, tmp_path, "") for name in ("a", "b")]
    try:
        outcomes = rank_outcomes(_die, 2, address, point, rank, options, timeout=90, grace=60)
        assert outcomes[rank].exit_code == -signal.SIGKILL, outcomes[rank].describe()
        assert outcomes[1 - rank].error.endswith("PeerError"), outcomes[1 - rank].describe()
        held = {"version": 2, "weight": 2.0} if new else {"version": 1, "weight": 1.0}
        until = time.monotonic() + 30
        for name in ("a", "b"):
            while json.loads((tmp_path / f"{name}.json").read_text()) != held:
                assert time.monotonic() < until, (tmp_path / f"{name}.json").read_text()
                time.sleep(0.05)
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
    # What the killed trainer left in shared memory was removed by the next.
    assert not Path((tmp_path / "place").read_text()).exists()


def _wait_long(address: str) -> list[int]:
    from datetime import timedelta

    from zerostart.upstream.torch.process_group import made_groups

    model = _model()
    for made in made_groups():
        made._get_backend(torch.device("cpu"))._set_default_timeout(timedelta(seconds=4))
    Path(address.removeprefix("unix://")).with_name("begun").touch()
    with zerostart.refit(model, address, workers=1, timeout=60) as refitter:
        return [worker.version for worker in refitter.push().workers]


@pytest.mark.slow
def test_workers_are_waited_for_longer_than_ranks_for_each_other(tmp_path: Path) -> None:
    address = f"unix://{tmp_path}/workers"
    started: list[Any] = []

    def late() -> None:
        _await(tmp_path / "begun")
        time.sleep(8)
        started.append(_start(address, "late", tmp_path, ""))

    thread = threading.Thread(target=late, daemon=True)
    thread.start()
    try:
        assert run_ranks(_wait_long, 2, address, timeout=90) == [[1], [1]]
    finally:
        thread.join(60)
        for worker in started:
            worker.kill()
