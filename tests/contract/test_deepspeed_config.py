"""Refuse wrong DeepSpeed configurations on every rank before reading."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import zerostart
from tests.tiny import TinyCheckpoints
from zerostart.engines.deepspeed.settings import DeepSpeedSettings
from zerostart.errors import ConfigError
from zerostart.integrations.engine_setup import EngineSetup

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "tensors": (
        {"tensor_parallel": {"autotp_size": 3}},
        "tensor_parallel=3 does not divide the 2 ranks",
    ),
    "AutoEP": ({"expert_parallel": {"enabled": True}}, "autoep_size=1, so that no ranks share experts"),
    "another router": (
        {"expert_parallel": {"enabled": True, "autoep_size": 2, "top_k": 1}},
        "top_k=1, but the model itself decides how its experts run",
    ),
    "quantised": (
        {"weight_quantization": {"quantized_initialization": {"num_bits": 8}}},
        "quantized_initialization",
    ),
    "no section": ({"tensor_parallel": 2}, r"\['tensor_parallel'\] is not a dict"),
}
ACCEPTED: dict[str, dict[str, Any]] = {
    "one rank": {"tensor_parallel": {"autotp_size": 1, "tp": {"tp_size": 1}}},
    "switched off": {"expert_parallel": {"enabled": False, "autoep_size": 2}},
    "a note": {"owner": "someone", "comment": "free text"},
}


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("case", REFUSED)
def test_a_plan_refuses_unsupported_settings(case: str, stage: int, checkpoints: TinyCheckpoints) -> None:
    config, text = REFUSED[case]
    with pytest.raises(zerostart.ZerostartError, match=text):
        zerostart.plan(checkpoints("qwen3"), world_size=2, zero_stage=stage, engine_config=config)


@pytest.mark.parametrize("case", ACCEPTED)
def test_a_plan_accepts_harmless_settings(case: str, checkpoints: TinyCheckpoints) -> None:
    zerostart.plan(checkpoints("qwen3"), world_size=2, engine_config=ACCEPTED[case])


# A wrong value of a DeepSpeed configuration is the same error in a plan, a load and an engine's setup.


WRONG_VALUES = {
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


@pytest.mark.parametrize(("zero", "message"), WRONG_VALUES.values(), ids=WRONG_VALUES)
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_wrong_value_is_the_same_error_everywhere(
    path: Path, stage: int, zero: dict[str, Any], message: str
) -> None:
    config = {"zero_optimization": zero}
    model = torch.nn.Linear(4, 4, device="meta")
    options: dict[str, Any] = {"model": model, "zero_stage": stage, "engine_config": config}
    with pytest.raises(ConfigError, match=message):
        zerostart.plan(path, 2, **options)
    with pytest.raises(ConfigError, match=message):
        zerostart.load(path, progress=False, **options)
    with pytest.raises(ConfigError, match=message):
        EngineSetup.of("deepspeed", stage, config)


def test_auto_values_are_left_to_the_trainer(path: Path) -> None:
    zero = dict.fromkeys(("stage", "zero_hpz_partition_size", "reduce_bucket_size", "sub_group_size"), "auto")
    config = {"zero_optimization": zero}
    assert DeepSpeedSettings.of(config) == DeepSpeedSettings.of({})
    model = torch.nn.Linear(4, 4, device="meta")
    loaded = zerostart.load(path, model=model, engine_config=config, progress=False)
    assert dict(zerostart.full_tensors(loaded)).keys() == {"weight", "bias"}
