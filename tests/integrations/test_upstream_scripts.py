"""Example scripts of transformers, accelerate and TRL, unmodified but for the added line, or by ``run``.

They are run from checkouts that the environment names; nothing of them is kept here:

    ZEROSTART_TRANSFORMERS, ZEROSTART_ACCELERATE, ZEROSTART_TRL

`datasets` and `evaluate` are the installed ones, or the stand-ins of `shims` where they are not installed.
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

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Script:
    """A script of a checkout; with ``trainer``, one that uses the HF Trainer, which saves what it did."""

    checkout: str
    path: str
    arguments: Sequence[str]
    trainer: bool


STEPS = [
    "--max_train_steps",
    "3",
    "--learning_rate",
    "1e-2",
    "--seed",
    "5",
    "--per_device_eval_batch_size",
    "2",
]
TEXT = ["--train_file", "{data}/text.txt", "--validation_file", "{data}/more.txt", "--block_size", "12"]
LOOP = ["--model_name_or_path", "{model}", *TEXT, "--output_dir", "{out}", *STEPS]
TRAINER = [
    *("--model_name_or_path", "{model}", "--output_dir", "{out}", "--max_steps", "3"),
    *("--learning_rate", "1e-2", "--seed", "5", "--logging_steps", "1", "--report_to", "none"),
    *("--per_device_train_batch_size", "2", "--lr_scheduler_type", "constant"),
]
TRL = ["--max_length", "12", "--dtype", "float32", "--bf16", "False", "--gradient_checkpointing", "False"]
CLM = "examples/pytorch/language-modeling"
SCRIPTS = {
    "run_clm": Script(
        "TRANSFORMERS", f"{CLM}/run_clm.py", [*TRAINER, *TEXT, "--do_train", "--do_eval"], True
    ),
    "run_clm_no_trainer": Script(
        "TRANSFORMERS",
        f"{CLM}/run_clm_no_trainer.py",
        [*LOOP, "--per_device_train_batch_size", "2"],
        False,
    ),
    "deepspeed_with_config_support": Script(
        "ACCELERATE",
        "examples/by_feature/deepspeed_with_config_support.py",
        [*LOOP, "--per_device_train_batch_size", "2"],
        False,
    ),
    "sft": Script(
        "TRL",
        "trl/scripts/sft.py",
        [*TRAINER, "--dataset_name", "{data}/sft", *TRL],
        True,
    ),
    "dpo": Script(
        "TRL",
        "trl/scripts/dpo.py",
        [*TRAINER, "--dataset_name", "{data}/dpo", *TRL],
        True,
    ),
    # Its model has a head that the checkpoint lacks.
    "reward": Script(
        "TRL",
        "trl/scripts/reward.py",
        [*TRAINER, "--dataset_name", "{data}/dpo", *TRL],
        True,
    ),
    "kto": Script(
        "TRL",
        "trl/scripts/kto.py",
        [*TRAINER, "--dataset_name", "{data}/kto", *TRL],
        True,
    ),
}


#: Scripts that do not get to their end on FSDP2, with zerostart or without, by what stops them.
FSDP2_STOPS = {
    # Without the line it saves the sharded model itself, which transformers does not gather.
    "run_clm_no_trainer": r"Cannot flatten unevenly sharded tensor",
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
    for name in ("sft", "dpo", "kto"):
        (made / name).mkdir()
    rows = [{"text": words(10)} for _ in range(16)]
    (made / "sft" / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    pairs = [{"prompt": words(4), "chosen": words(5), "rejected": words(5)} for _ in range(16)]
    (made / "dpo" / "train.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    judged = [{"prompt": words(4), "completion": words(5), "label": bool(number % 2)} for number in range(16)]
    (made / "kto" / "train.jsonl").write_text("\n".join(map(json.dumps, judged)))
    return made


def absent_libraries() -> list[Path]:
    """The stand-ins, where they are needed."""
    needed = [name for name in ("datasets", "evaluate") if importlib.util.find_spec(name) is None]
    assert len(needed) in (0, 2), f"{needed[0]} is not installed, but the other is: install both, or none"
    return [HERE / "shims"] if needed else []


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
    paths = [*absent_libraries(), HERE / "recorder"]
    if script.checkout == "TRL":
        paths += [checkout, metadata(checkout, out)]
    if not script.trainer:
        line = f"import zerostart_recorder; {line}".removesuffix("; ")
    record = {"ZEROSTART_RECORD": str(out / "record")}
    text = added(text, line) if line else text
    output = launch(text, out, CONFIGS[config], arguments, paths, record, timeout=280, module=module)
    assert (ANNOUNCED in output) == (LINE in line or module is not None)
    if script.trainer:
        states = sorted((out / "out").glob("**/trainer_state.json"))
        log = json.loads(states[-1].read_text())["log_history"]
        return [entry["loss"] for entry in log if "loss" in entry], load_file(
            out / "out" / "model.safetensors"
        )
    losses = [json.loads((out / "record" / f"losses-{rank}.json").read_text()) for rank in range(2)]
    return [*losses[0], *losses[1]], torch.load(out / "record" / "state.pt")


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
    if config == "fsdp2" and name in FSDP2_STOPS:
        with pytest.raises(AssertionError, match=FSDP2_STOPS[name]):
            run(script, config, data, tmp_path / "stock", REHEARSAL)
        losses, found = run(script, config, data, tmp_path / "ours", line, module)
        assert len(losses) >= 3
        saved = load_file(tmp_path / "ours" / "out" / "model.safetensors")
        assert all(torch.equal(tensor, found[key]) for key, tensor in saved.items())
        return
    losses, found = run(script, config, data, tmp_path / "ours", line, module)
    expected_losses, expected = run(script, config, data, tmp_path / "stock", REHEARSAL)
    assert len(losses) >= 3
    # Stock saves a copy of the state dict but at ZeRO-3, and so the head that is tied a second time.
    if config != "zero3" and script.trainer and "lm_head.weight" in expected.keys() - found.keys():
        assert torch.equal(expected.pop("lm_head.weight"), expected["model.embed_tokens.weight"])
    assert found.keys() == expected.keys()
    if config == "fsdp2":
        assert losses == pytest.approx(expected_losses, rel=1e-5)
        for key in expected:
            torch.testing.assert_close(found[key], expected[key], rtol=1e-4, atol=1e-5)
    else:
        assert losses == expected_losses
        assert [key for key in expected if not torch.equal(found[key], expected[key])] == []
