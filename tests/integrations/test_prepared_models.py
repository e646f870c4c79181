"""Train with accelerate and one added line, in any order of creation."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import zerostart
from tests.integrations.scripts import accelerate_script, fsdp2, zero3
from tests.ranks import rank_outcomes, run_ranks
from tests.tiny import TinyCheckpoints


def environment_of(engine: str, folder: Path) -> dict[str, str]:
    if engine == "fsdp2":
        return fsdp2()
    # accelerate's optimizer belongs to the script, and its batches are configured nowhere else.
    more = {"train_micro_batch_size_per_gpu": 2, "gradient_clipping": 1.0, "bf16": {"enabled": "auto"}}
    if engine == "zero2":
        more["zero_optimization"] = {"stage": 2}
    return zero3(folder, **more)


def run(path: Path, environment: dict[str, str], adopt: Any, *options: Any) -> dict[str, Any]:
    results = run_ranks(
        accelerate_script, 2, path, environment, adopt, *options, process_group=False, timeout=200
    )
    assert results[0]["losses"] == results[1]["losses"]
    first: dict[str, Any] = results[0]
    return first


def check_equal(ours: dict[str, Any], stock: dict[str, Any], tolerance: float) -> None:
    assert ours["losses"] == pytest.approx(stock["losses"], rel=tolerance)
    assert ours["norms"] == pytest.approx(stock["norms"], rel=tolerance)
    assert ours["dtypes"] == stock["dtypes"]
    assert ours["weights"].keys() == stock["weights"].keys()
    for name, tensor in stock["weights"].items():
        torch.testing.assert_close(ours["weights"][name], tensor, rtol=10 * tolerance, atol=tolerance)


@pytest.mark.parametrize(
    "engine",
    [
        pytest.param("deepspeed", marks=pytest.mark.slow),
        pytest.param("zero2", marks=pytest.mark.slow),
        "fsdp2",
    ],
)
def test_mixed_precision_and_either_order(engine: str, checkpoints: TinyCheckpoints, tmp_path: Path) -> None:
    path, environment = checkpoints("qwen3", torch.bfloat16), environment_of(engine, tmp_path)
    environment["ACCELERATE_MIXED_PRECISION"] = "bf16"
    stock = run(path, environment, None, "bf16")
    check_equal(run(path, environment, {}, "bf16"), stock, 1e-6)
    check_equal(run(path, environment, {}, "bf16", True), stock, 1e-6)


def test_adapters_of_a_prepared_model(checkpoints: TinyCheckpoints) -> None:
    path = checkpoints("qwen3")
    stock = run(path, fsdp2(), None, "no", False, True)
    check_equal(run(path, fsdp2(), {}, "no", False, True), stock, 1e-5)


@pytest.mark.slow
def test_shards_offloaded_to_the_host(checkpoints: TinyCheckpoints) -> None:
    """Compare with stock without offloading, for which accelerate needs pinned memory."""
    path = checkpoints("qwen3")
    stock = run(path, fsdp2(), None, "no")
    for adapter in (False, True):
        expected = run(path, fsdp2(), None, "no", False, True) if adapter else stock
        check_equal(run(path, fsdp2(FSDP_OFFLOAD_PARAMS="true"), {}, "no", False, adapter), expected, 1e-5)


@pytest.mark.slow
def test_a_model_of_another_stage_is_refused(checkpoints: TinyCheckpoints, tmp_path: Path) -> None:
    path, adopt = checkpoints("qwen3"), {"engine": "deepspeed", "engine_config": {}}
    outcomes = rank_outcomes(
        accelerate_script, 2, path, environment_of("zero2", tmp_path), adopt, "no", process_group=False
    )
    assert {o.error for o in outcomes} == {"zerostart.errors.ConfigError"}
    assert "was loaded for DeepSpeed ZeRO-3, but accelerate prepares it for DeepSpeed ZeRO-2" in (
        outcomes[0].message
    )


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("ignored_modules", ["a"]),
        ("activation_checkpointing", True),
        ("auto_wrap_policy", "SIZE_BASED_WRAP"),
    ],
)
def test_settings_that_cannot_be_honoured_are_refused_by_name(setting: str, value: Any) -> None:
    from accelerate.utils import FullyShardedDataParallelPlugin

    from zerostart.errors import ZerostartError
    from zerostart.integrations.engine_setup import fsdp2_config
    from zerostart.upstream.accelerate.plugins import FSDP2Plugin

    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, **{setting: value})
    with pytest.raises(ZerostartError, match=r"is not available under zerostart\.enabled\(\)"):
        fsdp2_config(FSDP2Plugin(plugin, "no"), torch.nn.Linear)


def prepare_too_late(path: Path) -> str:
    from accelerate import Accelerator
    from accelerate.utils import FullyShardedDataParallelPlugin

    zerostart.enable()
    model = AutoModelForCausalLM.from_pretrained(path)
    accelerator = Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2), cpu=True)
    with pytest.raises(zerostart.ZerostartError) as caught:
        accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return str(caught.value)


@pytest.mark.slow
def test_a_model_loaded_before_any_configuration_is_named(checkpoints: TinyCheckpoints) -> None:
    for message in run_ranks(prepare_too_late, 2, checkpoints("qwen3"), process_group=False):
        assert message.startswith(
            "every rank has loaded Qwen3ForCausalLM whole, because FSDP2 was not set up yet"
        )
        assert "zerostart.enable(engine='fsdp2')" in message
