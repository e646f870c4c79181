"""One thread within an operator of torch, for results whose bits depend on how many share the work."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def one_thread(wanted: bool = True) -> Iterator[None]:
    """Have each operator computed by the thread that calls it, here and in threads that start meanwhile.

    torch divides long loops among its threads, and what each of them has left over at its end is computed by
    another routine; sums are added up in another order. Several of our own threads compute at a time anyway.
    """
    before = torch.get_num_threads()
    if not wanted or before == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
