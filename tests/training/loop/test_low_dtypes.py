"""``model.dtype`` below float32 on FSDP2 is trained with fp32 masters."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.ranks import run_ranks
from tests.training.adapt.test_lora_runs import LORA, TARGETS, load_batches, read_losses, run
from tests.training.adapt.test_lora_runs import make_config as make_config
from zerostart.errors import ConfigError
from zerostart.training.config.load import parse_config

RATE = 1e-5


def train_in_fp32(path, config, lora):
    """Train by plain torch or PEFT with fp32 masters; return weights before and after."""
    from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
    from transformers import AutoModelForCausalLM

    training, _ = load_batches(config)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    if lora:
        torch.manual_seed(config["train"]["seed"])
        model = get_peft_model(model, LoraConfig(r=3, lora_alpha=6, target_modules=TARGETS))
    read = get_peft_model_state_dict if lora else lambda module: module.state_dict()
    before = {name: tensor.clone() for name, tensor in read(model).items()}
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=RATE, weight_decay=0.0
    )
    for _ in range(config["train"]["steps"]):
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(**training, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return before, read(model)


def compute_changed_share(before, after):
    names = before.keys() & after.keys()
    count = sum(int((before[name] != after[name].float()).sum()) for name in names)
    return count / sum(before[name].numel() for name in names)


@pytest.mark.parametrize(
    ("stage", "precision", "lora"),
    [
        (3, "no", False),
        pytest.param(3, "bf16", False, marks=pytest.mark.slow),
        pytest.param(2, "no", False, marks=pytest.mark.slow),
        pytest.param(0, "no", False, marks=pytest.mark.slow),
        pytest.param(3, "no", True, marks=pytest.mark.slow),
        pytest.param(0, "no", True, marks=pytest.mark.slow),
    ],
)
def test_bfloat16_on_fsdp2_is_trained_in_fp32_masters(stage, precision, lora, checkpoints, make_config):
    path = checkpoints("qwen3")
    sections = {"lora": LORA} if lora else {}
    train = {"learning_rate": RATE, "mixed_precision": precision}
    config = make_config(path, {"name": "fsdp2", "zero_stage": stage}, "out", **sections, train=train)
    config["model"]["dtype"] = "bfloat16"
    config["checkpoint"] = {"every": 2, "keep": 9}
    result = run_ranks(run, 2, config)[0]
    before, after = train_in_fp32(path, config, lora)
    tensors = load_file(Path(result.directory, "adapter_model.safetensors" if lora else "model.safetensors"))
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}
    # PEFT creates adapters in the dtype of the base weights, and masters start from them.
    start = {name: tensor.bfloat16().float() if lora else tensor for name, tensor in before.items()}
    assert compute_changed_share(start, tensors) >= 0.99 * compute_changed_share(before, after)
    for name, tensor in tensors.items():
        steps, expected = tensor - start[name], after[name] - before[name]
        torch.testing.assert_close(steps, expected, rtol=0, atol=2 * RATE * config["train"]["steps"])
    config["resume"] = str(Path(result.directory, "checkpoints", "step-00000002"))
    config["output"] = {"directory": f"{result.directory}-again"}
    assert read_losses(run_ranks(run, 2, config)[0]) == read_losses(result)[2:]


def test_dtype_and_precision_of_a_run(make_config):
    def parse(engine, dtype, **sections):
        values = make_config("m", {"name": engine}, "out", **sections)
        values["model"]["dtype"] = dtype
        return parse_config(values)

    full, lora = parse("fsdp2", "bfloat16"), parse("fsdp2", "bfloat16", lora=LORA)
    assert (full.dtype, full.precision) == ("float32", "bf16")
    assert (lora.dtype, lora.precision) == ("bfloat16", "bf16")
    assert (parse("fsdp2", None).dtype, parse("fsdp2", None).precision) == ("float32", "no")
    with pytest.raises(ConfigError, match=r"model\.dtype float16 is not available with engine\.name fsdp2"):
        parse("fsdp2", "float16")
    with pytest.raises(ConfigError, match=r"model\.dtype bfloat16 contradicts train\.mixed_precision no"):
        parse("deepspeed", "bfloat16")
