"""Test ``zerostart train`` in subprocesses: launchers, Ctrl-C, deaths and mistakes."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from tests.tiny import minilm_path
from tests.training.language import MASKED

ZEROSTART = [sys.executable, "-c", "from zerostart.cli import main; main()"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A tiny BERT without a head, with MiniLM's tokenizer."""
    from transformers import AutoTokenizer, BertConfig, BertModel

    path = tmp_path_factory.mktemp("bert")
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    BertModel(BertConfig(vocab_size=30522, **sizes)).save_pretrained(path)
    AutoTokenizer.from_pretrained(minilm_path()).save_pretrained(path)
    return path


@pytest.fixture
def config(checkpoint, tmp_path):
    """Configuration of a small masked-LM run."""
    values = {
        "model": {"source": str(checkpoint), "strict": False},
        "task": {
            "name": MASKED,
            "source": str(tmp_path / "text.txt"),
            "sequence_length": 16,
            "held_out": 0.02,
        },
        "train": {"steps": 2, "batch_size": 1},
        "output": {"directory": str(tmp_path / "out")},
        "logging": {"every": 1},
    }
    (tmp_path / "text.txt").write_text("the cat sat on the mat, and the dog sat on the cat. " * 40)
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


def start(*argv, **environment):
    clean = {name: value for name, value in os.environ.items() if name != "DS_ACCELERATOR"}
    return subprocess.Popen(
        [*ZEROSTART, *map(str, argv)],
        env={**clean, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow
def test_two_local_ranks_train_and_save(config, tmp_path):
    process = start("train", config, "--nproc", 2, "train.accumulation=2")
    out, err = process.communicate(timeout=200)
    assert process.returncode == 0, err
    for text in ("initialised", "held-out loss after step 0", "step 2/2  loss", "model saved in"):
        assert text in out, text
    entries = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert [entry["items"] for entry in entries if "items" in entry] == [2 * 2] * 2
    saved = {path.name for path in (tmp_path / "out").iterdir()}
    assert saved >= {"config.json", "model.safetensors", "tokenizer.json", "metrics.jsonl"}
    assert json.loads((tmp_path / "out" / "config.json").read_text())["architectures"] == ["BertForMaskedLM"]


@pytest.mark.slow
def test_a_run_of_another_launcher_stops_cleanly(config, tmp_path):
    """Start like torchrun; one Ctrl-C ends the run after a step and saves."""
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    process = start(
        "train", config, "engine.name=fsdp2", "train.steps=1000", **environment, MASTER_PORT=str(port)
    )
    lines = []
    for line in process.stdout:
        lines.append(line)
        if line.startswith("step 2/"):
            process.send_signal(signal.SIGINT)
    process.wait(timeout=60)
    assert process.returncode == 0, process.stderr.read()
    assert any(line.startswith("stopped after") for line in lines), lines
    assert (tmp_path / "out" / "model.safetensors").exists()


@pytest.mark.slow
def test_a_rank_that_dies_ends_the_run_with_one_line(config, tmp_path):
    process = start("train", config, "--nproc", 2, "engine.name=fsdp2", "train.steps=1000")
    for line in process.stdout:
        if line.startswith("step 1/"):
            os.kill(find_rank_one(process.pid), signal.SIGKILL)
            break
    start_time = time.monotonic()
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "error: rank 1 was killed by signal 9 (SIGKILL" in err
    assert "Traceback" not in err
    assert time.monotonic() - start_time < 30
    assert not list((tmp_path / "out").glob("*.safetensors"))


def find_rank_one(launcher):
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            environment = dict(part.split("=", 1) for part in path.read_text().split("\0") if "=" in part)
        except (OSError, UnicodeDecodeError):  # ended, or not readable
            continue
        if environment.get("ZEROSTART_LAUNCHER_PID") == str(launcher) and environment.get("RANK") == "1":
            return int(path.parent.name)
    raise AssertionError("no rank 1")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["train.stepz=3"], "unknown key train.stepz; did you mean train.steps?"),
    ],
)
def test_a_mistake_is_one_line(config, argv, message):
    process = start("train", config, *argv)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (1, "")
    assert message in err
    assert len(err.splitlines()) == 1
