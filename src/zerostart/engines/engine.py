"""An engine: how it loads, trains, keeps state and forecasts, resolved once for each job and handed on.

An outsider's engine is a subclass of ``Engine``, registered by name (``register_engine``, or the entry point
group ``zerostart.engines``); ``zerostart.testing.EngineConformance`` is what it has to pass.
"""

from __future__ import annotations

from dataclasses import dataclass

from zerostart.engines.base import EngineConfig
from zerostart.engines.forecast import ForecastEngine
from zerostart.engines.loading import LoadingEngine
from zerostart.engines.state import StateEngine
from zerostart.engines.training import TrainingEngine
from zerostart.geometry.layout import Mesh


@dataclass(frozen=True)
class Engine(LoadingEngine, TrainingEngine, StateEngine, ForecastEngine):
    """One engine at one ZeRO stage, with its configuration, over one mesh of ranks.

    To be written for an engine of one's own: ``name``, ``placements``, ``shard_maker`` and ``shards_of``; the
    rest has defaults.
    """

    @classmethod
    def for_stage(
        cls, zero_stage: int, config: EngineConfig | None, mesh: Mesh, exchange: bool | None
    ) -> Engine:
        """Make the engine of this family for a ZeRO stage; a subclass may choose a class by the stage."""
        return cls(zero_stage, config, mesh, exchange)
