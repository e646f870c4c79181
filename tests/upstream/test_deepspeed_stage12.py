"""A DeepSpeed whose stages 1 and 2 are not as declared takes the stock route."""

import logging

import pytest
import torch

from zerostart.upstream.deepspeed import zero12_optimizers as ds12


def test_the_installed_version_is_known() -> None:
    ds12.is_known.cache_clear()
    assert ds12.is_known()


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


def test_older_versions_take_the_stock_route_with_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import deepspeed

    monkeypatch.setattr(deepspeed, "__version__", "0.1.0")
    ds12.is_known.cache_clear()
    try:
        with caplog.at_level(logging.WARNING, "zerostart"):
            parameter = torch.nn.Parameter(torch.zeros(2))
            for _ in range(3):
                ds12.mark(parameter, "p", None)  # type: ignore[arg-type]
        assert ds12.marked(parameter) is None
        assert len(caplog.records) == 1
        assert "deepspeed 0.1.0 is installed" in caplog.text
        assert "initialize will flatten the parameters of stages 1 and 2 itself" in caplog.text
    finally:
        ds12.is_known.cache_clear()


def test_storages_tell_their_users() -> None:
    from zerostart.upstream.torch.tensors import storage_users

    tensor = torch.zeros(8)
    storage = tensor.untyped_storage()
    assert storage_users(storage) == 2
    view = tensor[2:4]
    assert storage_users(storage) == 3
    del view
    assert storage_users(storage) == 2
