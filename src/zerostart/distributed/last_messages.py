"""Messages that threads of gloo's still hold when a script ends.

A thread of gloo's lets go of a message a moment after the rank that waited for it has gone on. It takes the
interpreter's lock for that, since Python knows the tensor. If the interpreter is ending by then, CPython ends
the thread instead, which ends the process: SIGABRT, and "terminate called without an active exception" as the
last words of a run that has done all its work (torch 2.13: about one of three scripts whose last statement is
a collective).
"""

import atexit
import time
import weakref
from collections import deque
from collections.abc import Iterable

import torch

#: Seconds for which the end of a script waits at most: a traceback that is kept may hold a message for good.
LONGEST = 0.5
#: The tensors of the last messages. More than gloo has threads for a group.
_last: deque[weakref.ref[torch.Tensor]] = deque(maxlen=16)


def remember(values: Iterable[object]) -> None:
    """Note the tensors of a message, alone or in lists, that torch has just sent or received."""
    for value in values:
        for one in value if isinstance(value, list) else [value]:
            if isinstance(one, torch.Tensor):
                _last.append(weakref.ref(one))


# Registered before a save in the background registers its own end, which sends messages: so called after it.
@atexit.register
def await_threads() -> None:
    """Wait until no thread of gloo's holds a message any more, or for ``LONGEST``."""
    until = time.monotonic() + LONGEST
    # Python's own references have gone with their frames: a tensor that lives is held by a thread.
    while any(one() is not None for one in tuple(_last)) and time.monotonic() < until:
        time.sleep(0.001)  # which leaves the interpreter's lock to that thread
    _last.clear()
