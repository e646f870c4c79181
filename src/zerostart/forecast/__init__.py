"""What a load will read, hold and take, rank by rank, before it runs."""

from zerostart.forecast.job import Subject, foresee
from zerostart.forecast.limits import Fit
from zerostart.forecast.optimizers import OPTIMIZERS
from zerostart.forecast.result import PHASES, Memory, RankForecast, WorldPlan

__all__ = [
    "OPTIMIZERS",
    "PHASES",
    "Fit",
    "Memory",
    "RankForecast",
    "Subject",
    "WorldPlan",
    "foresee",
]
