"""A trainer, or a worker, killed at each step of a version that goes by a directory."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zerostart
from tests.ranks import _context
from zerostart import serving
from zerostart.state.refitting import directory, follower, publisher
from zerostart.state.refitting.follower import Follower

pytestmark = [pytest.mark.slow, pytest.mark.timeout(560)]
#: That it was not killed: there are no more steps.
THROUGH = 7


class _Doom:
    """Counts the beginnings and the ends of calls; at number ``at`` of them the process is killed."""

    def __init__(self, at: int) -> None:
        self._at, self._count, self.armed = at, 0, False

    def step(self) -> None:
        self._count += self.armed
        if self.armed and self._count == self._at:
            os.kill(os.getpid(), signal.SIGKILL)

    def over(self, owner: Any, name: str) -> None:
        """Have the calls of ``owner.name`` counted."""
        real = getattr(owner, name)

        def counted(*arguments: Any, **options: Any) -> Any:
            self.step()
            try:
                return real(*arguments, **options)
            finally:
                self.step()

        setattr(owner, name, counted)


def _model() -> Any:
    weights = {"weight": torch.rand(64, 96), "bias": torch.rand(64)}
    return zerostart.load(weights, lambda: nn.Linear(96, 64), engine="fsdp2", progress=False)


def _set(model: Any, version: int) -> None:
    """Values by which a version is known: those of an odd row alone change from one to the next."""
    weight = model.weight.detach().to_local()
    weight.fill_(1.0)
    weight[1::2] = float(version)


def _worker(path: Path) -> tuple[nn.Module, Follower]:
    engine = nn.Linear(96, 64)
    load = lambda pairs: engine.load_state_dict(dict(pairs))  # noqa: E731
    return engine, Follower(serving.Receiver(engine, load, name="worker"), path, 20)


def _value(engine: nn.Module) -> float:
    """The version that the weights of ``engine`` are whole of."""
    weight = engine.weight.detach()  # type: ignore[union-attr, operator]
    assert (weight[::2] == 1.0).all()
    assert (weight[1::2] == weight[1, 0]).all()
    return float(weight[1, 0])


def _killed_trainer(path: Path, at: int) -> None:
    doom = _Doom(at)
    for owner, name in (
        (publisher.PartWriter, "add"),
        (publisher.PartWriter, "close"),
        (directory, "write_whole"),
        (directory, "sync_directory"),
        (publisher, "write_version"),
        (publisher, "remove_old"),
    ):
        doom.over(owner, name)
    model = _model()
    refitter = zerostart.refit(model, path.as_uri(), full_every=9)
    for version in (1, 2, 3):
        _set(model, version)
        doom.armed = version == 3
        refitter.push()
    os._exit(THROUGH)


def _killed_worker(path: Path, at: int) -> None:
    doom = _Doom(at)
    for name in ("read_version", "read_messages", "take", "sum_read", "note_follower"):
        doom.over(follower, name)
    engine, follows = _worker(path)
    fill = follows.receiver._fill_stage

    def torn(*arguments: Any) -> None:
        doom.step()
        fill(*arguments)
        doom.step()

    follows.receiver._fill_stage = torn  # type: ignore[method-assign]
    follows.follow()
    assert _value(engine) == 1
    (path.parent / "first").touch()
    while not follows.pending(1):
        pass
    doom.armed = True
    follows.follow()
    os._exit(THROUGH)


def _ended(function: Callable[[Path, int], None], path: Path, at: int, meanwhile: Any = None) -> bool:
    """Run it in a process; whether it was killed, and not through."""
    process = _context().Process(target=function, args=(path, at), daemon=True)
    process.start()
    try:
        if meanwhile is not None:
            meanwhile()
        process.join(60)
        assert process.exitcode in (-signal.SIGKILL, THROUGH), process.exitcode
        return bool(process.exitcode != THROUGH)
    finally:
        process.kill()


def test_a_trainer_killed_at_each_step_leaves_a_whole_version(tmp_path: Path) -> None:
    at, found, going_on = 0, set(), True
    while going_on:
        at += 1
        path = tmp_path / str(at)
        going_on = _ended(_killed_trainer, path, at)
        document = directory.Document.read(path)
        assert document is not None
        engine, follows = _worker(path)
        assert follows.follow() == document.version == _value(engine)
        found.add(document.version)
        # Another one goes on, and what was left half done goes.
        model = _model()
        with zerostart.refit(model, path.as_uri(), full_every=9) as refitter:
            for version in (document.version + 1, document.version + 2):
                _set(model, version)
                assert refitter.push().version == version
                assert follows.follow() == version == _value(engine)
        kept = {file.name[:8] for file in path.iterdir() if file.name.lstrip(".")[0] == "0"}
        assert not {name for name in kept if name.startswith(".")}
    assert found == {2, 3}
    assert at > 12


def test_a_worker_killed_at_each_step_is_replaced(tmp_path: Path) -> None:
    at, going_on = 0, True
    while going_on:
        at += 1
        path = tmp_path / str(at) / "versions"
        model = _model()
        with zerostart.refit(model, path.as_uri(), full_every=9) as refitter:
            _set(model, 1)
            refitter.push()

            def on(path: Path = path, model: Any = model, refitter: Any = refitter) -> None:
                until = time.monotonic() + 60
                while not (path.parent / "first").exists():
                    assert time.monotonic() < until
                    time.sleep(0.02)
                _set(model, 2)
                refitter.push()

            going_on = _ended(_killed_worker, path, at, on)
            _set(model, 3)
            report = refitter.push()  # waits for nobody, and says what was said last
            assert [worker.version for worker in report.workers] in ([1], [2])
            engine, follows = _worker(path)
            assert follows.follow() == 3 == _value(engine)
            _set(model, 4)
            assert [worker.version for worker in refitter.push().workers] == [3]
    assert at > 8
