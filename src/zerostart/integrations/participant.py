"""In an engine's worker: its model, and its connection with a trainer while there is one."""

from __future__ import annotations

import os
import socket

from torch import nn

from zerostart.errors import ConfigError
from zerostart.state.refitting.connection import Connection
from zerostart.state.refitting.receiver import EngineWeights, Receiver

_ATTRIBUTE = "_zerostart_participant"


class Participant:
    """Joins trainers, one after the other, and follows their pushes."""

    def __init__(self, receiver: Receiver) -> None:
        #: Kept from trainer to trainer: it knows which version the model has.
        self.receiver = receiver
        self._connection: Connection | None = None

    def join(self, address: str, secret: str | None = None, timeout: float = 300.0) -> None:
        """Connect with a trainer, in the place of the one before; raises what ``Connection`` raises."""
        self.leave()
        self._connection = Connection(self.receiver, address, secret=secret, timeout=timeout)

    def follow(self, version: int) -> int:
        """Take part in the push of ``version``; raises what it failed with."""
        if self._connection is None:
            raise ConfigError(f"version {version} cannot be taken: this worker has not joined a trainer")
        return self._connection.follow(version=version)

    def leave(self) -> None:
        """Close the connection; raises nothing."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()


def participant_of(model: nn.Module, weights: EngineWeights, role: str) -> Participant:
    """That of a model, the same at each call; it lives as long as the model.

    ``role`` tells the workers of a process apart in messages.
    """
    found = vars(model).get(_ATTRIBUTE)
    if found is None:
        name = f"{socket.gethostname()}-{os.getpid()}-{role}"
        found = vars(model)[_ATTRIBUTE] = Participant(Receiver(weights, name=name))
    assert isinstance(found, Participant), "the attribute is ours"
    return found
