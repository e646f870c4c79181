"""An engine within a rank of the trainer that has no workers of its own: any module with a loader."""

from __future__ import annotations

from torch import nn

from zerostart.checkpoint.strict_json import JsonMapping
from zerostart.state.refitting.connection import Connection
from zerostart.state.refitting.receiver import Receiver


class Within:
    """A module as a target of the rank that it lives in, see ``targets.Driver``.

    The rank is a worker, too: it connects with rank 0 as others do, and follows in a thread beside the push.
    """

    workers = 1
    in_process = True

    def __init__(self, receiver: Receiver) -> None:
        self._receiver = receiver
        self._connection: Connection | None = None

    @classmethod
    def of(cls, target: object) -> Within | None:
        """That of a ``Receiver``, or of a module with ``load_weights``; None for any other target."""
        if isinstance(target, nn.Module) and callable(getattr(target, "load_weights", None)):
            target = Receiver(target)
        return cls(target) if isinstance(target, Receiver) else None

    def join(self, how: JsonMapping) -> None:
        """Connect. Raises what ``Connection`` raises."""
        self._connection = Connection(
            self._receiver, str(how["address"]), secret=how["secret"], timeout=float(how["timeout"])
        )

    def follow(self, version: int) -> None:
        """Take part in a push. Raises what ``Connection.follow`` raises."""
        assert self._connection is not None, "joined before"
        self._connection.follow(version=version)

    def leave(self) -> None:
        """Close the connection."""
        if self._connection is not None:
            self._connection.close()
