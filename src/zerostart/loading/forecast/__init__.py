"""Forecast bytes, memory and seconds of a load for each rank."""

from zerostart.loading.forecast.memory import OPTIMIZERS
from zerostart.loading.forecast.result import PHASES, Fit, PhaseMemory, RankForecast, WorldPlan

__all__ = ["OPTIMIZERS", "PHASES", "Fit", "PhaseMemory", "RankForecast", "WorldPlan"]
