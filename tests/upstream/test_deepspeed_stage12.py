"""A DeepSpeed whose stages 1 and 2 are not as declared takes the stock route."""

import pytest
import torch

from zerostart.upstream.deepspeed import zero12_optimizers as ds12


def test_a_constructor_of_another_shape_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    def initialize_optimizer_states(self: object) -> None:
        """With a step, as in older releases."""

    monkeypatch.setattr(DeepSpeedZeroOptimizer, "initialize_optimizer_states", initialize_optimizer_states)
    ds12.is_known.cache_clear()
    try:
        parameter = torch.nn.Parameter(torch.zeros(2))
        ds12.mark(parameter, "p", None)  # type: ignore[arg-type]
        assert ds12.marked(parameter) is None
        assert "initialize_optimizer_states has changed" in caplog.text
    finally:
        ds12.is_known.cache_clear()
