"""The section ``samples`` of a configuration."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from zerostart.training.config.sections import Count, Positive, Section


class SamplesConfig(Section):
    """What a run draws with the model in training: before the first step, after the last, and in between.

    The pipeline of ``model.source`` draws. What is null is the pipeline's own default.
    """

    prompts: Annotated[list[str], Field(min_length=1)]
    """What is drawn with the model in training."""
    every: Count = 0
    """Steps between samples; 0: at the start and the end alone."""
    negative_prompt: str = ""
    """What guidance leads away from."""
    steps: Positive = 28
    """Steps of the pipeline for one sample."""
    guidance: Annotated[float, Field(ge=0.0)] | None = None
    """null: the pipeline's own.

    It is the ``true_cfg_scale``, or the ``guidance_scale`` where the pipeline has no such or the transformer
    embeds its guidance.
    """
    height: Positive | None = None
    """Pixels."""
    width: Positive | None = None
    """Pixels."""
    num_frames: Positive | None = None
    """Of a video."""
    seed: Count = 0
    """Of the noise: that of sample i is drawn from seed + i, the same every time."""
    count: Positive = 1
    """How often the prompts are gone through."""
    batch_size: Positive = 1
    """Samples that are drawn at once."""
    with_ema: bool = False
    """true: draw with the averaged weights of the section ema."""
    fps: Positive = 16
    """Frames a second at which videos are played."""
