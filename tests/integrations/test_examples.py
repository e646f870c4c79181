"""Run the examples under ``accelerate launch`` with the added line, by ``run``, and without."""

import functools
import json
import os
import random
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.integrations.launching import (
    ANNOUNCED,
    CONFIGS,
    EXAMPLES,
    REHEARSAL,
    add_line,
    launch,
    losses_of,
    remove_line,
    write_tokenizer,
)
from tests.processes import run_command
from tests.tiny import TinyCheckpoints


@pytest.fixture(scope="module")
def folder(checkpoints: TinyCheckpoints, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with a tiny model, its tokenizer, and a text."""
    root = tmp_path_factory.mktemp("examples")
    shutil.copytree(checkpoints("qwen3"), root / "model")
    write_tokenizer(root / "model")
    words = random.Random(0).choices(range(3, 80), k=900)
    (root / "text.txt").write_text(" ".join(f"w{n}" for n in words))
    return root


def weights(out: Path) -> dict[str, torch.Tensor]:
    return load_file(out / "model.safetensors")


@functools.lru_cache(maxsize=3)
def run(script: str, config: str, folder: Path, by: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Run an example ``by`` the added line, by ``zerostart run``, or as ``stock``."""
    text = (EXAMPLES / f"causal_lm_{script}.py").read_text()
    plain = remove_line(text)
    text = {"line": text, "run": plain, "stock": add_line(plain, REHEARSAL)}[by]
    module = "zerostart" if by == "run" else None
    out = folder / script / config / by
    common = ["--model", str(folder / "model"), "--text", str(folder / "text.txt"), "--block", "12"]
    if script == "accelerate":
        own = ["--out", str(out), "--steps", "3", "--learning-rate", "1e-2"]
    else:
        own = ["--output_dir", str(out), "--max_steps", "3", "--learning_rate", "1e-2", "--report_to", "none"]
        own += ["--logging_steps", "1", "--per_device_train_batch_size", "2"]
    output = launch(text, out, CONFIGS[config], [*common, *own], module=module)
    assert (ANNOUNCED in output) == (by != "stock")
    assert output.count("zerostart run: Qwen3ForCausalLM loaded in shards") == int(by == "run")
    if script == "accelerate":
        return losses_of(output), weights(out)
    log = json.loads((out / "trainer_state.json").read_text())["log_history"]
    return [entry["loss"] for entry in log if "loss" in entry], weights(out)


SCRIPTS = [("accelerate", "zero2"), ("trainer", "zero3"), ("trainer", "fsdp2")]


@pytest.mark.slow
@pytest.mark.parametrize(("script", "config"), SCRIPTS)
def test_run_command_equals_the_added_line(script: str, config: str, folder: Path) -> None:
    losses, weights_by_line = run(script, config, folder, "line")
    losses_by_run, weights_by_run = run(script, config, folder, "run")
    assert losses_by_run == losses
    assert weights_by_run.keys() == weights_by_line.keys()
    assert [
        name for name in weights_by_run if not torch.equal(weights_by_run[name], weights_by_line[name])
    ] == []


@pytest.mark.slow
@pytest.mark.parametrize(("script", "config"), SCRIPTS)
def test_added_line_equals_stock(script: str, config: str, folder: Path) -> None:
    losses, trained = run(script, config, folder, "line")
    expected_losses, expected = run(script, config, folder, "stock")
    assert len(losses) == 3
    # The Trainer's stock route may save gathered copies of tied weights; ours saves one.
    for name in expected.keys() - trained.keys():
        assert torch.equal(expected.pop(name), expected["model.embed_tokens.weight"]), name
    assert trained.keys() == expected.keys()
    if config == "fsdp2":  # the stock route sums in another order
        assert losses == pytest.approx(expected_losses, rel=1e-5)
        for name in expected:
            torch.testing.assert_close(trained[name], expected[name], rtol=1e-4, atol=1e-5)
    else:
        assert losses == expected_losses
        assert [name for name in expected if not torch.equal(trained[name], expected[name])] == []


@pytest.mark.slow
def test_a_driver_calls_trainers_and_a_rollout_engine(folder: Path) -> None:
    command = [sys.executable, str(EXAMPLES.parent / "rollout.py"), "model", "2"]
    output = run_command(
        command, folder, {**os.environ, "OMP_NUM_THREADS": "1"}, seconds=200, name="rollout.py"
    )
    versions = re.findall(r"^step (\d) .* serves version (\d)$", output, flags=re.MULTILINE)
    assert versions == [("1", "1"), ("2", "2")]
