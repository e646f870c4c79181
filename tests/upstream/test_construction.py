"""What a release of DeepSpeed without one thing that we use at an engine's construction loses: that alone."""

from contextlib import ExitStack
from typing import Any

import pytest

from zerostart.upstream.deepspeed import construction


def test_slices_and_experts_do_not_depend_on_the_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    from deepspeed.runtime.engine import DeepSpeedEngine

    def misfit(points: Any) -> str:
        return "no stage" if construction._STAGE in points else ""

    monkeypatch.setattr(construction, "misfit", misfit)
    stock = DeepSpeedEngine._configure_expert_parallel
    with ExitStack() as stack:
        construction._enter(stack)
        assert DeepSpeedEngine._configure_expert_parallel is not stock
    assert DeepSpeedEngine._configure_expert_parallel is stock
