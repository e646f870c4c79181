"""Drive an engine whose own calls fail."""

import threading
from pathlib import Path

import pytest
import torch
from torch import nn

import zerostart
from zerostart import serving
from zerostart.errors import PeerError


class Engine:
    """A ``serving.Driver`` of one worker in this process; ``failing`` selects the next failing call."""

    workers = 1

    def __init__(self) -> None:
        self.module = nn.Linear(3, 2)
        self.failing = ""
        self._connection: serving.Connection | None = None

    def join(self, address: str, timeout: float) -> None:
        receiver = serving.Receiver(self.module, lambda pairs: self.module.load_state_dict(dict(pairs)))
        self._connection = serving.Connection(receiver, address, timeout=timeout)

    def follow(self, version: int) -> None:
        assert self._connection is not None
        failing, self.failing = self.failing, ""
        if failing == "before":
            raise RuntimeError("the engine is asleep")
        self._connection.follow(version=version)
        if failing == "after":
            raise RuntimeError("the cache is in use")

    def leave(self) -> None:
        if self._connection is not None:
            self._connection.close()


def test_an_engine_that_cannot_disconnect_does_not_stop_a_close(caplog: pytest.LogCaptureFixture) -> None:
    class Gone(Engine):
        def leave(self) -> None:
            super().leave()
            raise RuntimeError("the engine is gone")

    weights = {"weight": torch.ones(2, 3), "bias": torch.zeros(2)}
    model = zerostart.load(weights, lambda: nn.Linear(3, 2), engine="fsdp2", progress=False)
    refitter = zerostart.refit(model, Gone(), timeout=20)
    refitter.close()
    assert not Path(refitter.address.removeprefix("unix://")).exists()
    assert "could not disconnect: the engine is gone" in caplog.text


def test_errors_of_an_engine_are_raised_and_the_next_push_succeeds() -> None:
    weights = {"weight": torch.ones(2, 3), "bias": torch.zeros(2)}
    model = zerostart.load(weights, lambda: nn.Linear(3, 2), engine="fsdp2", progress=False)
    engine = Engine()
    with zerostart.refit(model, engine, timeout=20) as refitter:
        # The worker looks at neither the push nor its cancellation.
        engine.failing = "before"
        with pytest.raises(PeerError, match="the engine is asleep"):
            refitter.push()
        refitter.push()
        assert engine.module.weight.tolist() == torch.ones(2, 3).tolist()
        engine.failing = "after"
        with pytest.raises(PeerError, match=r"all workers have version 3, but .* the cache is in use"):
            refitter.push()
        assert refitter.push().workers[0].version == 4
    assert not [t for t in threading.enumerate() if t.name == "zerostart-refit-engine"]
