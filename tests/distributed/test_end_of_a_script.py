"""A script may end with a call of all ranks: its end waits for gloo's threads, which hold the last message.

What happens otherwise (the thread is ended while it waits for the interpreter's lock, and takes the process
along by SIGABRT) is a race of microseconds, lost by about one script of six.
"""

import threading
import time

import torch

from tests.ranks import run_ranks
from zerostart.distributed import last_messages
from zerostart.distributed.world import current_world


def meet() -> None:
    """Meet often enough that a thread of gloo's is late once at least; nothing is held after the wait."""
    late = 0
    for _ in range(200):
        current_world().raise_together(None, "meeting")
        late += any(one() is not None for one in last_messages._last)
    assert last_messages._last
    held = list(last_messages._last)
    last_messages.await_threads()
    assert not any(one() is not None for one in held), f"late {late} times"


def test_no_thread_holds_a_message_at_the_end() -> None:
    run_ranks(meet, 2)


def test_it_waits_for_a_thread_and_not_for_ever() -> None:
    def hold(message: torch.Tensor, seconds: float) -> None:
        time.sleep(seconds)

    for seconds, longest in ((0.2, 0.5), (30.0, 2.0)):
        messages = [torch.ones(1), torch.ones(2)]
        last_messages.remember([messages, "options"])
        holder = threading.Thread(target=hold, args=(messages.pop(), seconds), daemon=True)
        holder.start()
        messages.clear()
        begun = time.monotonic()
        last_messages.await_threads()
        assert min(seconds, last_messages.LONGEST) * 0.9 < time.monotonic() - begun < longest
