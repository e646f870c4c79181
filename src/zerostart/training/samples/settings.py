"""The section ``samples`` of a configuration."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from zerostart.training.config.sections import Count, Positive, Section


class SamplesConfig(Section):
    """What a run draws with the model in training: before the first step, after the last, ``every`` steps.

    ``every`` 0 leaves out those in between. The pipeline of ``model.source`` draws each of ``prompts`` in
    ``steps`` steps, at ``height`` and ``width`` in pixels and ``num_frames`` frames (each its own default
    where it is not given). ``guidance`` is the pipeline's ``true_cfg_scale``, or its ``guidance_scale`` where
    it has no such or the transformer embeds its guidance; ``negative_prompt`` is what it guides away from.
    The prompts are gone through ``count`` times, and ``batch_size`` samples are drawn at once. The noise of
    sample ``i`` is drawn from ``seed`` + ``i``, the same every time. ``with_ema`` draws with
    the averaged weights of the section ``ema``. Videos are played at ``fps`` frames a
    second.
    """

    prompts: Annotated[list[str], Field(min_length=1)]
    every: Count = 0
    negative_prompt: str = ""
    steps: Positive = 28
    guidance: Annotated[float, Field(ge=0.0)] | None = None
    height: Positive | None = None
    width: Positive | None = None
    num_frames: Positive | None = None
    seed: Count = 0
    count: Positive = 1
    batch_size: Positive = 1
    with_ema: bool = False
    fps: Positive = 16
