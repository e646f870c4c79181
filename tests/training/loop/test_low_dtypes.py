"""``model.dtype`` below float32 on FSDP2, which has no masters: what is trained moves as in float32."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.ranks import run_ranks
from tests.training.adapt.test_lora_runs import LORA, TARGETS, examples, losses, run
from tests.training.adapt.test_lora_runs import given as given
from zerostart.errors import ConfigError
from zerostart.training.config.load import parse_config

RATE = 1e-5


def in_fp32(path, config, lora):
    """What plain torch makes of the weights, all of them or PEFT's, with fp32 masters: before and after."""
    from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
    from transformers import AutoModelForCausalLM

    training, _ = examples(config)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    if lora:
        torch.manual_seed(config["train"]["seed"])
        model = get_peft_model(model, LoraConfig(r=3, lora_alpha=6, target_modules=TARGETS))
    read = get_peft_model_state_dict if lora else lambda held: held.state_dict()
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


def moved(before, after):
    """The share of all elements that are not what they were."""
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
def test_bfloat16_on_fsdp2_is_trained_in_fp32_masters(stage, precision, lora, checkpoints, given):
    path = checkpoints("qwen3")
    sections = {"lora": LORA} if lora else {}
    train = {"learning_rate": RATE, "mixed_precision": precision}
    config = given(path, {"name": "fsdp2", "zero_stage": stage}, "out", **sections, train=train)
    config["model"]["dtype"] = "bfloat16"
    config["checkpoint"] = {"every": 2, "keep": 9}
    result = run_ranks(run, 2, config)[0]
    before, after = in_fp32(path, config, lora)
    found = load_file(Path(result.directory, "adapter_model.safetensors" if lora else "model.safetensors"))
    assert {tensor.dtype for tensor in found.values()} == {torch.float32}
    # PEFT makes adapters in the dtype of what they adapt, and masters begin from that.
    start = {name: tensor.bfloat16().float() if lora else tensor for name, tensor in before.items()}
    assert moved(start, found) >= 0.99 * moved(before, after)
    for name, tensor in found.items():
        steps, expected = tensor - start[name], after[name] - before[name]
        torch.testing.assert_close(steps, expected, rtol=0, atol=2 * RATE * config["train"]["steps"])
    config["resume"] = str(Path(result.directory, "checkpoints", "step-00000002"))
    config["output"] = {"directory": f"{result.directory}-again"}
    assert losses(run_ranks(run, 2, config)[0]) == losses(result)[2:]


def test_what_the_sections_mean_together(given):
    def parsed(engine, dtype, **sections):
        values = given("m", {"name": engine}, "out", **sections)
        values["model"]["dtype"] = dtype
        return parse_config(values)

    whole, adapted = parsed("fsdp2", "bfloat16"), parsed("fsdp2", "bfloat16", lora=LORA)
    assert (whole.dtype, whole.precision) == ("float32", "bf16")
    assert (adapted.dtype, adapted.precision) == ("bfloat16", "bf16")
    assert (parsed("fsdp2", None).dtype, parsed("fsdp2", None).precision) == ("float32", "no")
    with pytest.raises(ConfigError, match=r"model\.dtype float16 is not available with engine\.name fsdp2"):
        parsed("fsdp2", "float16")
    with pytest.raises(ConfigError, match=r"model\.dtype bfloat16 contradicts train\.mixed_precision no"):
        parsed("deepspeed", "bfloat16")
