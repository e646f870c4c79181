"""Handle errors of one rank, and losses or weights that are not finite.

The next sum over the ranks announces an error to the others. Losses and gradient norms are checked in every
step, weights and optimizer states before each save.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from zerostart.distributed.failures import find_agreed, mark_agreed, now
from zerostart.distributed.world import World
from zerostart.errors import DivergedError


class Failures:
    """Defers an error of this rank to the next meeting of the ranks.

    Between two collectives of the engine no message can be sent. So a rank that fails continues, and every
    sum over the ranks has one more number that announces it.
    """

    def __init__(self, world: World, summing: Callable[..., list[float]]) -> None:
        self._world = world
        self._summing = summing
        self._first: BaseException | None = None

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Defer an error of the block, without collectives, to the next sum over the ranks."""
        started = now()
        try:
            yield
        except BaseException as error:
            if find_agreed(error, started) is not None:
                raise  # the other ranks raise it too
            # Later errors of the same step are mostly consequences of the first.
            self._first = self._first or error

    def sum_over_ranks(self, *values: float) -> list[float]:
        """Return the sum of each value over all ranks, or raise a rank's error on all."""
        *sums, failed = self._summing(*values, float(self._first is not None))
        if failed:
            self.raise_together()
        return sums

    def raise_together(self) -> None:
        """Raise the first rank's error on all if a rank has failed; collective."""
        self._world.raise_together(self._first, "training")


@contextmanager
def raised_locally() -> Iterator[None]:
    """Raise an error of the block, with collectives of the engine, on this rank only.

    The others wait in these collectives, and raise PeerError when this process ends.
    """
    try:
        yield
    except BaseException as error:
        mark_agreed(error)
        raise


def is_finite(model: nn.Module, optimizer: Any) -> bool:
    """Return True if this rank's trained weights, masters and optimizer states are finite.

    ``model`` and ``optimizer`` are prepared by accelerate. Buffers and frozen parameters, which may hold
    masks of minus infinity, are ignored.
    """
    values = [t for t in _trained(model, optimizer) if t.is_floating_point() and t.itemsize > 1 and t.numel()]
    with torch.no_grad():
        # The largest magnitude of each shows nan and infinity; there is one wait for each device.
        checks: dict[torch.device, list[torch.Tensor]] = {}
        for tensor in values:
            largest = torch.linalg.vector_norm(tensor, math.inf)
            checks.setdefault(tensor.device, []).append(largest.isfinite())
        return all(bool(torch.stack(some).all()) for some in checks.values())


def _trained(model: nn.Module, optimizer: Any) -> Iterator[torch.Tensor]:
    for parameter in model.parameters():
        # Parameters are saved, also by an engine that steps masters.
        if parameter.requires_grad:
            # ZeRO-3 keeps this rank's part in ``ds_tensor``.
            yield _local(getattr(parameter, "ds_tensor", parameter))
    # DeepSpeed and accelerate wrap torch's optimizer.
    while (inner := getattr(optimizer, "optimizer", None)) is not None:
        optimizer = inner
    for key, state in getattr(optimizer, "state", {}).items():
        yield from (_local(one) for one in (key, *state.values()) if isinstance(one, torch.Tensor))


def _local(tensor: torch.Tensor) -> torch.Tensor:
    to_local = getattr(tensor, "to_local", None)  # of a DTensor
    local: torch.Tensor = (tensor if to_local is None else to_local()).detach()
    return local


class Divergence:
    """Ends the run after ``patience`` consecutive steps without a finite loss or gradient norm."""

    def __init__(self, patience: int, world: World) -> None:
        self._patience = patience
        self._world = world
        self._steps = 0
        self._began = ""

    def check(self, step: int, own_loss: float, norm: float | None, diverging: bool, hint: str) -> str | None:
        """Count a step; return a warning about it, or None.

        ``diverging``, the same on every rank: it is not finite on a rank; then collective. ``own_loss`` is
        this rank's share of the loss. Raises DivergedError, with ``hint``, on every rank after too many
        steps.
        """
        if not diverging:
            self._steps = 0
            return None
        self._steps += 1
        losses = self._world.all_gather_object(own_loss, "comparing a step that is not finite")
        rank = next((rank for rank, loss in enumerate(losses) if not math.isfinite(loss)), 0)
        shown = "" if norm is None else f", the gradient norm {norm:.4g}"
        warning = f"step {step} is not finite on rank {rank}: its loss is {losses[rank]:.4g}{shown}"
        if self._steps == 1:
            self._began = warning  # in the next step every rank may have infinite weights
        if self._steps >= self._patience:
            raise DivergedError(
                f"{self._began}; with it {self._steps} steps in a row are not finite, and "
                f"train.patience_nonfinite is {self._patience}: the run has ended after step {step}, and no "
                f"model was saved. {hint}"
            )
        return f"{warning} ({self._steps} in a row; at {self._patience} the run ends)"

    def check_end(self) -> None:
        """Raise DivergedError if the last steps of a run were not finite, though its weights are."""
        if self._steps:
            raise DivergedError(
                f"the last {self._steps} steps of the run are not finite: {self._began}; the model is finite"
            )
