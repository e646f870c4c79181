"""What can go wrong in a step: an error on one rank alone, and losses or weights that are not finite.

An error on one rank is announced to the others in the next sum over the ranks. Losses and gradient norms are
looked at in every step, where they are on the host anyway; weights where they are about to be saved: one pass
over this rank's own trained weights and optimizer states before each save, with one wait for the device.
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
    """Holds back an error of this rank until the ranks meet, for the others are on their way there."""

    # Between two collectives of the engine no message can be sent. So a rank that fails there carries on, and
    # every sum over the ranks has one number more, by which all learn of it.

    def __init__(self, world: World, summing: Callable[..., list[float]]) -> None:
        self._world = world
        self._summing = summing
        self._first: BaseException | None = None

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Hold back an error of the body, which has no collective, until the next sum over the ranks."""
        begun = now()
        try:
            yield
        except BaseException as error:
            # The other ranks raise it too, or are gone: nobody is left to whom it would have to be told.
            if find_agreed(error, begun) is not None:
                raise  # as the others do
            # The first counts: what fails after it in the same step is mostly its consequence.
            self._first = self._first or error

    def sum_over_ranks(self, *values: float) -> list[float]:
        """Each value added up over all ranks; raises the first rank's failure on all if any has failed."""
        # One number more in a sum that is made anyway: telling costs no message as long as nothing fails.
        *sums, failed = self._summing(*values, float(self._first is not None))
        if failed:
            self.raise_together()
        return sums

    def raise_together(self) -> None:
        """Meet, and raise the first rank's failure on all if any has failed; collective."""
        self._world.raise_together(self._first, "training")


@contextmanager
def unreported() -> Iterator[None]:
    """Inside are collectives of the engine: the others wait in them, and cannot be sent an error.

    They notice when this process ends, and raise `PeerError`.
    """
    try:
        yield
    except BaseException as error:
        # Marked, so that no phase around waits to tell it to ranks that are not listening.
        mark_agreed(error)
        raise


def is_finite(model: nn.Module, optimizer: Any) -> bool:
    """Return True if this rank's share of what is trained, masters and optimizer states, is finite.

    ``model`` and ``optimizer`` as accelerate has prepared them. Buffers and frozen parameters are not
    looked at: a mask of minus infinity is one that its model means.
    """
    held = [t for t in _trained(model, optimizer) if t.is_floating_point() and t.itemsize > 1 and t.numel()]
    with torch.no_grad():
        # The largest magnitude of each, in which nan and infinity come out; one wait for each device.
        found: dict[torch.device, list[torch.Tensor]] = {}
        for tensor in held:
            largest = torch.linalg.vector_norm(tensor, math.inf)
            found.setdefault(tensor.device, []).append(largest.isfinite())
        return all(bool(torch.stack(some).all()) for some in found.values())


def _trained(model: nn.Module, optimizer: Any) -> Iterator[torch.Tensor]:
    for parameter in model.parameters():
        # Of an engine that steps masters the parameters are what is saved, so they count beside what it
        # steps.
        if parameter.requires_grad:
            # ZeRO-3 leaves an empty parameter behind, and this rank's part of it in ``ds_tensor``.
            yield _local(getattr(parameter, "ds_tensor", parameter))
    # DeepSpeed's engine has an optimizer around the one of torch, and accelerate one around either.
    while (inner := getattr(optimizer, "optimizer", None)) is not None:
        optimizer = inner
    for stepped, state in getattr(optimizer, "state", {}).items():
        yield from (_local(one) for one in (stepped, *state.values()) if isinstance(one, torch.Tensor))


def _local(tensor: torch.Tensor) -> torch.Tensor:
    to_local = getattr(tensor, "to_local", None)  # of a DTensor
    found: torch.Tensor = (tensor if to_local is None else to_local()).detach()
    return found


class Divergence:
    """Counts the steps in a row whose loss or gradient norm is not finite; at ``patience`` the run ends."""

    def __init__(self, patience: int, world: World) -> None:
        self._patience = patience
        self._world = world
        self._steps = 0
        self._began = ""

    def note(self, step: int, own_loss: float, norm: float | None, diverging: bool, hint: str) -> str | None:
        """Count a step; gives what there is to say of it, if anything.

        ``diverging``, the same on every rank: it is not finite on some; collective then. ``own_loss`` is
        this rank's share of the loss. Raises DivergedError, on every rank, for one too many; ``hint`` says
        what can be done then.
        """
        if not diverging:
            self._steps = 0
            return None
        self._steps += 1
        losses = self._world.all_gather_object(own_loss, "comparing a step that is not finite")
        rank = next((rank for rank, loss in enumerate(losses) if not math.isfinite(loss)), 0)
        shown = "" if norm is None else f", the gradient norm {norm:.4g}"
        told = f"step {step} is not finite on rank {rank}: its loss is {losses[rank]:.4g}{shown}"
        if self._steps == 1:
            self._began = told  # by the next one every rank may have weights that are not finite
        if self._steps >= self._patience:
            raise DivergedError(
                f"{self._began}; with it {self._steps} steps in a row are not finite, and "
                f"train.patience_nonfinite is {self._patience}: the run has ended after step {step}, and no "
                f"model was saved. {hint}"
            )
        return f"{told} ({self._steps} in a row; at {self._patience} the run ends)"

    def check_end(self, directory: str) -> None:
        """Raise DivergedError where the last steps of a run were not finite, though its weights are."""
        if self._steps:
            raise DivergedError(
                f"the last {self._steps} steps of the run are not finite: {self._began}. The model that was "
                f"saved in {directory} has the finite weights of before"
            )
