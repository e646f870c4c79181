"""The sections of a configuration that say what of a model is trained, averaged and saved."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from zerostart.training.config.sections import Positive, Section


class LoraConfig(Section):
    """Low-rank adapters, trained in the place of the model, which stays as it was loaded.

    Each gives its module ``alpha / rank`` times the product of two factors of rank ``rank``; ``alpha`` None:
    as much. ``targets`` is ``auto`` (those of DiffSynth's scripts for its families, else every linear layer
    of the model's repeated blocks), the name of a preset, a list of names (``to_q`` is every module that is
    called so, ``blocks.*.attn1.to_q`` one of each block), or DiffSynth's comma-separated list as it is, in
    the names of DiffSynth's model. What ``exclude`` names is left out. ``init``: the first factor is drawn as
    PEFT draws it, or from a normal distribution; the second is zero, so that training starts from the model.
    ``start_from`` is a LoRA file, or its directory, that training goes on from: of PEFT, diffusers or
    DiffSynth.
    """

    places: ClassVar[frozenset[str]] = frozenset({"start_from"})

    rank: Positive = 32
    alpha: Annotated[float, Field(gt=0.0)] | None = None
    dropout: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    targets: str | list[str] = "auto"
    exclude: list[str] = Field(default_factory=list)
    init: Literal["default", "gaussian"] = "default"
    start_from: str | None = None

    @property
    def scaling(self) -> float:
        """What the product of the factors is multiplied by."""
        return 1.0 if self.alpha is None else self.alpha / self.rank


class EmaConfig(Section):
    """An average of the weights, as diffusers' ``EMAModel`` has it: saved in ``ema`` of the output directory.

    Update ``n`` (from 1) keeps the part ``d`` of what there was: ``d`` is 0 up to update
    ``update_after_step + 1``, then, with ``k = n - update_after_step - 1``, ``(1 + k) / (10 + k)``, or with
    ``warmup`` ``1 - (1 + k / inv_gamma) ** -power``; at most ``decay``, at least ``min_decay``. There is one
    update ``every`` so many steps. The average is in fp32, where the weights are or in host memory
    (``place``). ``evaluate``: the held-out loss is that of the average.
    """

    decay: Annotated[float, Field(ge=0.0, le=1.0)] = 0.9999
    min_decay: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0
    update_after_step: Annotated[int, Field(ge=0)] = 0
    warmup: bool = False
    inv_gamma: Annotated[float, Field(gt=0.0)] = 1.0
    power: Annotated[float, Field(gt=0.0)] = 2 / 3
    every: Positive = 1
    place: Literal["device", "host"] = "device"
    evaluate: bool = False

    @model_validator(mode="after")
    def _ordered(self) -> EmaConfig:
        if self.min_decay > self.decay:
            raise ValueError(f"min_decay {self.min_decay} is more than decay {self.decay}")
        return self

    def decay_of(self, update: int) -> float:
        """What part of the average the update number ``update`` (from 1) keeps."""
        step = max(0, update - self.update_after_step - 1)
        if step <= 0:
            return 0.0
        rising = 1 - (1 + step / self.inv_gamma) ** -self.power if self.warmup else (1 + step) / (10 + step)
        return max(min(rising, self.decay), self.min_decay)
