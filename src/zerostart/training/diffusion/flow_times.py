"""Times of flow matching: how they are drawn, and what a loss at one weighs."""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from pydantic import Field, model_validator

from zerostart.training.config.sections import TaskConfig
from zerostart.training.diffusion.family import Family

Fraction = Annotated[float, Field(ge=0.0, le=1.0)]


class FlowConfig(TaskConfig):
    """The velocity from data to noise, at times between 0 (data) and 1 (noise).

    ``family`` is found by the class of the transformer, and needed for one that is derived from it. Times are
    drawn evenly (``uniform``), or as the logistic function of normal numbers (``logit-normal``, with
    ``logit_mean`` and ``logit_std``), then moved towards noise by ``shift``: a number, ``resolution`` for
    that of the family's pipeline at so many tokens, or the one that the family is trained with.
    ``boundaries`` are the lowest and the highest time that is drawn; of the two experts of a pipeline with a
    boundary each has its own by itself. ``weighting``: ``none``; ``bell``, DiffSynth's; ``sigma-sqrt`` or
    ``cosmap``, diffusers'. ``guidance`` is told to transformers that take it. An example is trained without
    its text with probability ``drop_prompt``. The last part ``held_out`` of the examples is kept out of
    training and evaluated before and after.
    """

    name: str = "flow-matching"
    family: str | None = None
    sampling: Literal["uniform", "logit-normal"] = "uniform"
    logit_mean: float = 0.0
    logit_std: Annotated[float, Field(gt=0.0)] = 1.0
    shift: Annotated[float, Field(gt=0.0)] | Literal["resolution"] | None = None
    boundaries: tuple[Fraction, Fraction] | None = None
    weighting: Literal["none", "bell", "sigma-sqrt", "cosmap"] = "none"
    guidance: float = 1.0
    drop_prompt: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    held_out: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0

    @model_validator(mode="after")
    def _in_order(self) -> FlowConfig:
        if self.boundaries is not None and self.boundaries[0] >= self.boundaries[1]:
            low, high = self.boundaries
            raise ValueError(f"boundaries are the lowest time and a higher one, not {low} and {high}")
        return self


class Times:
    """The times of a ``family`` between two boundaries, and their weights."""

    def __init__(self, config: FlowConfig, family: Family, boundaries: tuple[float, float]) -> None:
        self._config = config
        self._family = family
        self._boundaries = boundaries

    def shift(self, tokens: int) -> float:
        """How far times of latents of so many tokens are moved. Raises ConfigError."""
        chosen = self._config.shift
        if chosen == "resolution":
            return self._family.shift_at(tokens)
        return self._family.shift if chosen is None else float(chosen)

    def at(self, places: torch.Tensor, shifts: torch.Tensor) -> torch.Tensor:
        """The times, [batch], that lie at ``places`` (0 to 1) of their distribution; in double precision."""
        low, high = (self._place(end / (shifts - (shifts - 1) * end)) for end in self._boundaries)
        u = self._drawn(low + places * (high - low))
        return (shifts * u / (1 + (shifts - 1) * u)).clamp(*self._boundaries)

    def _place(self, u: torch.Tensor) -> torch.Tensor:
        """The part of the distribution below ``u``."""
        if self._config.sampling == "uniform":
            return u
        below: torch.Tensor = torch.special.ndtr(
            (torch.logit(u) - self._config.logit_mean) / self._config.logit_std
        )
        return below

    def _drawn(self, place: torch.Tensor) -> torch.Tensor:
        """The reverse of ``_place``."""
        if self._config.sampling == "uniform":
            return place
        normal = torch.special.ndtri(place.clamp(0.0, 1.0))
        return torch.sigmoid(self._config.logit_mean + self._config.logit_std * normal)

    def weights(self, times: torch.Tensor, shifts: torch.Tensor) -> torch.Tensor:
        """What losses at ``times`` ([batch]) weigh, [batch]."""
        match self._config.weighting:
            case "none":
                return torch.ones_like(times)
            case "sigma-sqrt":
                return times.clamp(min=1e-3) ** -2
            case "cosmap":
                return 2 / (torch.pi * (1 - 2 * times + 2 * times**2))
        bells = [self._bell(shift) for shift in shifts.tolist()]
        lowest, scale = torch.tensor(bells, dtype=times.dtype, device=times.device).unbind(1)
        return (_bell(times) - lowest) * scale

    def _bell(self, shift: float) -> tuple[float, float]:
        """What is taken from a bell, and what multiplies it then, for a mean of 1 over the family's times."""
        heights = _bell(self._family.schedule(shift))
        above = heights - heights.min()
        return float(heights.min()), float(len(above) / above.sum())


def _bell(times: torch.Tensor) -> torch.Tensor:
    return torch.exp(-2 * (times - 0.5) ** 2)
