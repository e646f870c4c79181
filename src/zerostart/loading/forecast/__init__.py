"""What a load will read, hold and take, rank by rank, before it runs."""

from zerostart.loading.forecast.memory import OPTIMIZERS
from zerostart.loading.forecast.result import PHASES, Fit, Memory, RankForecast, WorldPlan

__all__ = ["OPTIMIZERS", "PHASES", "Fit", "Memory", "RankForecast", "WorldPlan"]
