"""A wrong value of a DeepSpeed configuration is the same error wherever the configuration is read."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import zerostart
from zerostart.engines.deepspeed.settings import DeepSpeedSettings
from zerostart.errors import ConfigError
from zerostart.integrations.engine_setup import EngineSetup

WRONG = {
    "a size of groups": ({"zero_hpz_partition_size": "two"}, "zero_hpz_partition_size='two'"),
    "a bucket": ({"reduce_bucket_size": -1}, "reduce_bucket_size=-1"),
    "an offload that is no section": ({"offload_optimizer": "cpu"}, "'offload_optimizer'.* is not a dict"),
    "a device": ({"offload_optimizer": {"device": "disk"}}, "offload_optimizer to 'disk' is unknown"),
}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("settings") / "model.safetensors"
    save_file({"weight": torch.randn(4, 4), "bias": torch.zeros(4)}, file)
    return file


@pytest.mark.parametrize(("zero", "message"), WRONG.values(), ids=WRONG)
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_wrong_value_is_told_alike(path: Path, stage: int, zero: dict[str, Any], message: str) -> None:
    config = {"zero_optimization": zero}
    model = torch.nn.Linear(4, 4, device="meta")
    given: dict[str, Any] = {"model": model, "zero_stage": stage, "engine_config": config}
    with pytest.raises(ConfigError, match=message):
        zerostart.plan(path, 2, **given)
    with pytest.raises(ConfigError, match=message):
        zerostart.load(path, progress=False, **given)
    with pytest.raises(ConfigError, match=message):
        EngineSetup.of("deepspeed", stage, config)


def test_what_a_trainer_fills_in_is_left_to_it(path: Path) -> None:
    zero = dict.fromkeys(("stage", "zero_hpz_partition_size", "reduce_bucket_size", "sub_group_size"), "auto")
    config = {"zero_optimization": zero}
    assert DeepSpeedSettings.of(config) == DeepSpeedSettings.of({})
    model = torch.nn.Linear(4, 4, device="meta")
    loaded = zerostart.load(path, model=model, engine_config=config, progress=False)
    assert dict(zerostart.full_tensors(loaded)).keys() == {"weight", "bias"}
