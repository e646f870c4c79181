"""Example scripts of transformers and TRL, unmodified but for the added line, or by ``run``.

They are run from checkouts that ``ZEROSTART_TRANSFORMERS`` and ``ZEROSTART_TRL`` name, where `datasets` and
`evaluate` are installed.
"""

import importlib.util
import json
import os
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.integrations.launching import ANNOUNCED, CONFIGS, LINE, REHEARSAL, added, launch, tokenizer

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not all(map(importlib.util.find_spec, ("datasets", "evaluate"))),
        reason="datasets and evaluate are not installed",
    ),
]


@dataclass(frozen=True)
class Script:
    """A script of a checkout on the HF Trainer, which saves what it did."""

    checkout: str
    path: str
    arguments: Sequence[str]


TEXT = ["--train_file", "{data}/text.txt", "--validation_file", "{data}/more.txt", "--block_size", "12"]
TRAINER = [
    *("--model_name_or_path", "{model}", "--output_dir", "{out}", "--max_steps", "3"),
    *("--learning_rate", "1e-2", "--seed", "5", "--logging_steps", "1", "--report_to", "none"),
    *("--per_device_train_batch_size", "2", "--lr_scheduler_type", "constant"),
]
TRL = ["--max_length", "12", "--dtype", "float32", "--bf16", "False", "--gradient_checkpointing", "False"]
CLM = "examples/pytorch/language-modeling"
SCRIPTS = {
    "run_clm": Script("TRANSFORMERS", f"{CLM}/run_clm.py", [*TRAINER, *TEXT, "--do_train", "--do_eval"]),
    "sft": Script("TRL", "trl/scripts/sft.py", [*TRAINER, "--dataset_name", "{data}/sft", *TRL]),
    "dpo": Script("TRL", "trl/scripts/dpo.py", [*TRAINER, "--dataset_name", "{data}/dpo", *TRL]),
    # Its model has a head that the checkpoint lacks.
    "reward": Script("TRL", "trl/scripts/reward.py", [*TRAINER, "--dataset_name", "{data}/dpo", *TRL]),
}


def save_model(path: Path) -> None:
    """A tiny model with biases: the scripts give these a parameter group of their own, and DeepSpeed drops a
    group that is empty, which torch's schedulers no longer take.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"hidden_size": 24, "intermediate_size": 37, "num_hidden_layers": 2, "vocab_size": 131}
    heads = {"num_attention_heads": 3, "num_key_value_heads": 1, "max_position_embeddings": 64}
    tokens = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    kind = {"attention_bias": True, "head_dim": 8, "tie_word_embeddings": True}
    torch.manual_seed(0)
    config = AutoConfig.for_model("qwen3", **sizes, **heads, **tokens, **kind)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.05)
    model.save_pretrained(path)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a tokenizer, texts, and tiny data sets for TRL."""
    made = tmp_path_factory.mktemp("upstream")
    save_model(made / "model")
    tokenizer(made / "model")
    draw = random.Random(0)

    def words(count: int) -> str:
        return " ".join(f"w{n}" for n in draw.choices(range(3, 80), k=count))

    (made / "text.txt").write_text("\n".join(words(30) for _ in range(30)))
    (made / "more.txt").write_text("\n".join(words(30) for _ in range(6)))
    for name in ("sft", "dpo"):
        (made / name).mkdir()
    rows = [{"text": words(10)} for _ in range(16)]
    (made / "sft" / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    pairs = [{"prompt": words(4), "chosen": words(5), "rejected": words(5)} for _ in range(16)]
    (made / "dpo" / "train.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    return made


def metadata(checkout: Path, out: Path) -> Path:
    """A folder that tells the version of TRL, which its trainers ask for, as its installation would."""
    version = (checkout / "VERSION").read_text().strip()
    made = out / "metadata" / f"trl-{version}.dist-info"
    made.mkdir(parents=True)
    (made / "METADATA").write_text(f"Metadata-Version: 2.1\nName: trl\nVersion: {version}\n")
    return made.parent


def run(
    script: Script, config: str, data: Path, out: Path, line: str, module: str | None = None
) -> tuple[list[float], dict[str, torch.Tensor]]:
    checkout = Path(os.environ[f"ZEROSTART_{script.checkout}"])
    text = (checkout / script.path).read_text()
    arguments = [part.format(model=data / "model", data=data, out=out / "out") for part in script.arguments]
    paths = [checkout, metadata(checkout, out)] if script.checkout == "TRL" else []
    text = added(text, line) if line else text
    output = launch(text, out, CONFIGS[config], arguments, paths, timeout=280, module=module)
    assert (ANNOUNCED in output) == (LINE in line or module is not None)
    states = sorted((out / "out").glob("**/trainer_state.json"))
    log = json.loads(states[-1].read_text())["log_history"]
    weights = load_file(out / "out" / "model.safetensors")
    return [entry["loss"] for entry in log if "loss" in entry], weights


#: The added line, and what is launched: the script itself, or ``zerostart run`` of it.
BY = {"line": (LINE, None), "run": ("", "zerostart")}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("by", BY)
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("name", SCRIPTS)
def test_with_and_without_the_line(name: str, config: str, by: str, data: Path, tmp_path: Path) -> None:
    script, (line, module) = SCRIPTS[name], BY[by]
    if f"ZEROSTART_{script.checkout}" not in os.environ:
        pytest.skip(f"ZEROSTART_{script.checkout} names no checkout")
    losses, found = run(script, config, data, tmp_path / "ours", line, module)
    expected_losses, expected = run(script, config, data, tmp_path / "stock", REHEARSAL)
    assert len(losses) >= 3
    # Stock saves a copy of the state dict but at ZeRO-3, and so the head that is tied a second time.
    if config != "zero3" and "lm_head.weight" in expected.keys() - found.keys():
        assert torch.equal(expected.pop("lm_head.weight"), expected["model.embed_tokens.weight"])
    assert found.keys() == expected.keys()
    if config == "fsdp2":
        assert losses == pytest.approx(expected_losses, rel=1e-5)
        for key in expected:
            torch.testing.assert_close(found[key], expected[key], rtol=1e-4, atol=1e-5)
    else:
        assert losses == expected_losses
        assert [key for key in expected if not torch.equal(found[key], expected[key])] == []
