"""A training loop over accelerate with one added line trains as without it, whatever is made first."""

import logging
import os
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

import zerostart
from tests.integrations.scripts import accelerate_script, fsdp2, zero3
from tests.parity import checkpoint
from tests.ranks import rank_outcomes, run_ranks
from tests.tiny import TinyCheckpoints

ENGINES = ("deepspeed", "zero2", "fsdp2")


def environment_of(engine: str, folder: Path) -> dict[str, str]:
    if engine == "fsdp2":
        return fsdp2()
    # accelerate's optimizer is the script's own, and its batches are told nowhere else.
    more = {"train_micro_batch_size_per_gpu": 2, "gradient_clipping": 1.0, "bf16": {"enabled": "auto"}}
    if engine == "zero2":
        more["zero_optimization"] = {"stage": 2}
    return zero3(folder, **more)


def run(path: Path, environment: dict[str, str], adopt: Any, *options: Any) -> dict[str, Any]:
    found = run_ranks(
        accelerate_script, 2, path, environment, adopt, *options, process_group=False, timeout=200
    )
    assert found[0]["losses"] == found[1]["losses"]
    first: dict[str, Any] = found[0]
    return first


def agree(ours: dict[str, Any], stock: dict[str, Any], tolerance: float) -> None:
    assert ours["losses"] == pytest.approx(stock["losses"], rel=tolerance)
    assert ours["norms"] == pytest.approx(stock["norms"], rel=tolerance)
    assert ours["dtypes"] == stock["dtypes"]
    assert ours["weights"].keys() == stock["weights"].keys()
    for name, tensor in stock["weights"].items():
        torch.testing.assert_close(ours["weights"][name], tensor, rtol=10 * tolerance, atol=tolerance)


@pytest.mark.parametrize("engine", ENGINES)
def test_mixed_precision_and_either_order(engine: str, checkpoints: TinyCheckpoints, tmp_path: Path) -> None:
    path, environment = checkpoints("qwen3", torch.bfloat16), environment_of(engine, tmp_path)
    environment["ACCELERATE_MIXED_PRECISION"] = "bf16"
    stock = run(path, environment, None, "bf16")
    agree(run(path, environment, {}, "bf16"), stock, 1e-6)
    agree(run(path, environment, {}, "bf16", True), stock, 1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_adapters_on_top(engine: str, checkpoints: TinyCheckpoints, tmp_path: Path) -> None:
    path, environment = checkpoints("qwen3"), environment_of(engine, tmp_path)
    stock = run(path, environment, None, "no", False, True)
    agree(run(path, environment, {}, "no", False, True), stock, 1e-5)


@pytest.mark.slow
def test_shards_on_the_host(checkpoints: TinyCheckpoints) -> None:
    """On CPU ranks accelerate itself cannot offload: it asks for pinned memory."""
    path = checkpoints("qwen3")
    stock = run(path, fsdp2(), None, "no")
    for adapter in (False, True):
        expected = run(path, fsdp2(), None, "no", False, True) if adapter else stock
        agree(run(path, fsdp2(FSDP_OFFLOAD_PARAMS="true"), {}, "no", False, adapter), expected, 1e-5)


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


@pytest.mark.slow
def test_a_model_that_is_whole_on_every_rank_is_refused(checkpoints: TinyCheckpoints) -> None:
    path, adopt = checkpoints("qwen3"), {"engine": "fsdp2", "zero_stage": 0, "engine_config": {}}
    outcomes = rank_outcomes(accelerate_script, 2, path, fsdp2(), adopt, "no", process_group=False)
    assert {o.error for o in outcomes} == {"zerostart.errors.ConfigError"}
    assert "was loaded with zero_stage=0 and is whole on every rank" in outcomes[0].message


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


@pytest.mark.slow
def test_settings_that_change_between_load_and_preparation_are_refused(
    checkpoints: TinyCheckpoints,
) -> None:
    path, environment = checkpoints("qwen3"), fsdp2()
    outcomes = rank_outcomes(accelerate_script, 2, path, environment, {}, "bf16", True, process_group=False)
    assert {o.error for o in outcomes} == {"zerostart.errors.ConfigError"}
    assert "other FSDP2 settings than accelerate has now (mp_policy)" in outcomes[0].message


def late(path: Path) -> str:
    from accelerate import Accelerator
    from accelerate.utils import FullyShardedDataParallelPlugin
    from transformers import AutoModelForCausalLM

    import zerostart

    zerostart.enable()
    model = AutoModelForCausalLM.from_pretrained(path)
    accelerator = Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2), cpu=True)
    with pytest.raises(zerostart.ZerostartError) as caught:
        accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return str(caught.value)


def aside() -> list[str]:
    from accelerate import Accelerator

    import zerostart

    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("zerostart").addHandler(handler)
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    zerostart.enable()
    Accelerator(cpu=True)
    return told


@pytest.mark.slow
def test_a_launchers_deepspeed_that_is_left_aside_is_told_of() -> None:
    (told,) = run_ranks(aside, 1, process_group=False)
    assert ["accelerate trains without the DeepSpeed" in text for text in told].count(True) == 1


@pytest.mark.slow
def test_a_model_that_came_before_any_configuration_is_named(checkpoints: TinyCheckpoints) -> None:
    for message in run_ranks(late, 2, checkpoints("qwen3"), process_group=False):
        assert message.startswith(
            "every rank has loaded Qwen3ForCausalLM whole, because FSDP2 was not set up yet"
        )
        assert "zerostart.enable(engine='fsdp2')" in message


# PEFT on FSDP2 in a loop that prepares nothing: around a model, and beside experts that ranks share.


LORA = {"r": 2, "target_modules": ["q_proj"], "init_lora_weights": False}


def gradients_around(path: Path) -> list[str]:
    """Where gradients of a prefix are not those of one process, from other seeds on each rank."""
    rank = dist.get_rank()
    batches = torch.arange(32).view(2, 2, 8)
    plain: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    ours: Any = zerostart.load(path, engine="fsdp2", dtype=torch.float32, progress=False)
    found = []
    for model, seed in ((plain, 3), (ours, 3 + rank)):
        torch.manual_seed(seed)
        config = peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
        model = peft.get_peft_model(model, config)
        batch = batches[rank] if found else batches.flatten(0, 1)
        model(input_ids=batch, labels=batch).loss.backward()
        found.append({name: p.grad for name, p in model.named_parameters() if p.requires_grad})
    expected, got = found
    assert expected.keys() == got.keys()
    return [n for n, g in got.items() if not torch.allclose(g, expected[n], rtol=1e-4, atol=1e-7)]


def beside_experts(path: Path) -> None:
    """A LoRA beside experts that ranks share computes, and is not trained on each rank alone."""
    model: Any = zerostart.load(path, engine="fsdp2", expert_parallel=2, progress=False)
    model = peft.get_peft_model(model, peft.LoraConfig(**LORA))
    tokens = torch.arange(8).view(1, 8)
    with torch.no_grad():
        assert model(input_ids=tokens).logits.isfinite().all()
    with pytest.raises(zerostart.errors.EngineError, match=r"lora_A.*with expert_parallel=2 was added after"):
        model(input_ids=tokens, labels=tokens)


def both(dense: Path, experts: Path) -> list[str]:
    beside_experts(experts)
    return gradients_around(dense)


@pytest.mark.slow
def test_adapters_that_nothing_prepares(checkpoints: TinyCheckpoints, tmp_path: Path) -> None:
    assert run_ranks(both, 2, checkpoints("qwen3"), checkpoint("mixtral", tmp_path)) == [[], []]
