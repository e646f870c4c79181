"""Threads that share a list of things to do, each with buffers of its own, and one error for all."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Generic, TypeVar

import torch

T = TypeVar("T")


class Crew(Generic[T]):
    """Threads that each run ``work`` over what they take of ``items``, in order, until there is none left.

    ``device`` is the accelerator that they use, if any; ``name`` is what the threads are called.
    """

    def __init__(
        self,
        items: Iterable[T],
        work: Callable[[Iterator[T]], None],
        device: torch.device | None,
        name: str,
    ) -> None:
        self._items = iter(items)
        self._work = work
        self._device = device
        self._name = name
        self._lock = threading.Lock()
        self._error: BaseException | None = None

    def run(self, threads: int) -> None:
        """Work in this thread and in others beside it, ``threads`` in all, until all have ended.

        The first error of any of them stops the others and is raised here.
        """
        started: list[threading.Thread] = []
        try:
            for number in range(threads - 1):
                worker = threading.Thread(
                    target=self._take_part_beside, name=f"{self._name}-{number}", daemon=True
                )
                worker.start()
                started.append(worker)
            self._take_part()
            for worker in started:
                worker.join()
        except BaseException as error:  # an interrupt: what the others use is closed after they end
            self._error = self._error or error
            for worker in started:
                worker.join()
        if self._error is not None:
            raise self._error

    def _take_part(self) -> None:
        try:
            self._work(self._taken())
        except BaseException as error:  # whatever it is, it is raised again in the calling thread
            self._error = self._error or error

    def _take_part_beside(self) -> None:
        """The same in a thread of its own: which device is the current one is a matter of each thread."""
        if self._device is not None and self._device.index is not None:
            torch.accelerator.set_device_index(self._device.index)
        self._take_part()

    def _taken(self) -> Iterator[T]:
        while self._error is None:
            with self._lock:
                try:
                    item = next(self._items)
                except StopIteration:
                    return
            yield item
