"""The cache of a run: opened where it fits what is asked for, else made first."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from zerostart.distributed.world import World
    from zerostart.training.cached import CachedItems
    from zerostart.training.config import TrainConfig

__all__ = ["ensure_cache"]


def ensure_cache(config: TrainConfig, world: World) -> CachedItems:
    """The items that ``config`` asks for, encoded; collective, and the same on every rank.

    A cache that is there and fits is opened, and no file of an encoder is. Where there is none the encoders are loaded, what
    ``media`` names goes through them, and they are let go before this returns. Raises ConfigError, on
    every rank, for a cache that was made of other data, other encoders or by other settings, saying which.
    """
    raise NotImplementedError
