"""Whole runs, started by the commands, on an accelerator of another kind: they give what the host's give.

The accelerator is ``tests/simulated/npu``: torch's backend for others, found as a vendor's package is.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.documents.folders import character_tokenizer, make_folders
from tests.npu_ranks import npu_environment
from tests.tiny import TinyCheckpoints
from tests.training.language import CAUSAL

ZEROSTART = [sys.executable, "-c", "from zerostart.cli import main; main()"]


def start(folder: Path, *words: str, accelerator: bool) -> int:
    """Run a command in ``folder``; gives how many operators ran on the accelerator."""
    counts, environment = folder / "operators", dict(os.environ)
    shutil.rmtree(counts, ignore_errors=True)
    if accelerator:
        counts.mkdir()
        # DeepSpeed's as well: the tests' own environment says that it computes on the CPU.
        environment = {**npu_environment(), "ZEROSTART_TEST_NPU_OPERATORS": str(counts)}
    done = subprocess.run(
        [*ZEROSTART, *words], cwd=folder, env=environment, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return sum(int(path.read_text()) for path in counts.glob("*"))


def losses(out: Path) -> list[float]:
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [value for line in lines for name, value in line.items() if name in ("loss", "held_out_loss")]


@pytest.fixture
def language(tmp_path: Path, checkpoints: TinyCheckpoints) -> Path:
    """A directory with ``run.json``, a short run of whole parameters of a model with dropout."""
    shutil.copytree(checkpoints("qwen3_even"), tmp_path / "model")
    character_tokenizer(tmp_path / "model")
    described = tmp_path / "model" / "config.json"
    described.write_text(json.dumps({**json.loads(described.read_text()), "attention_dropout": 0.3}))
    (tmp_path / "text.txt").write_text("the cat sat on the mat, and the dog sat on the cat. " * 40)
    train = {"steps": 4, "batch_size": 2, "learning_rate": 1e-2, "schedule": "constant"}
    task = {"name": CAUSAL, "source": "text.txt", "sequence_length": 16, "held_out": 0.1}
    write(tmp_path, {"task": task, "train": train})
    return tmp_path


def write(folder: Path, values: Mapping[str, Any]) -> None:
    common = {
        "model": {"source": "model"},
        "engine": {"name": "fsdp2", "zero_stage": 0},
        "output": {"directory": "out"},
    }
    (folder / "run.yaml").write_text(json.dumps({**common, **values}))


@pytest.mark.slow
def test_a_run_on_another_accelerator_is_the_hosts(language: Path) -> None:
    """Without dropout, for each device has random numbers of its own; in bf16 by torch's autocast, about."""
    described = language / "model" / "config.json"
    described.write_text(json.dumps({**json.loads(described.read_text()), "attention_dropout": 0.0}))
    assert start(language, "train", "run.yaml", "output.directory=host", accelerator=False) == 0
    assert start(language, "train", "run.yaml", accelerator=True) > 1000
    assert losses(language / "out") == pytest.approx(losses(language / "host"), rel=1e-5)
    found, expected = (load_file(language / name / "model.safetensors") for name in ("out", "host"))
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-4, msg=name)
    words = ("train", "run.yaml", "train.mixed_precision=bf16", "output.directory=lower")
    assert start(language, *words, accelerator=True) > 1000
    assert losses(language / "lower") != losses(language / "out")
    assert losses(language / "lower") == pytest.approx(losses(language / "out"), rel=0.02)


@pytest.mark.slow
def test_random_numbers_of_the_accelerator_go_on_where_they_were(language: Path) -> None:
    """A run with dropout, gone on with from its middle: the same losses as in one piece, to the bit."""
    words = ("train", "run.yaml", "checkpoint.every=2")
    start(language, *words, accelerator=True)
    middle = language / "out" / "checkpoints" / "step-00000002"
    start(language, *words, f"resume={middle}", "output.directory=again", accelerator=True)
    assert losses(language / "again")[-3:] == losses(language / "out")[-3:]
    start(language, *words, "train.seed=43", "output.directory=other", accelerator=True)
    assert losses(language / "other")[0] == losses(language / "out")[0]  # evaluation drops nothing out
    assert losses(language / "other")[-1] != losses(language / "out")[-1]


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ("engine.name=fsdp2", "engine.zero_stage=3", "train.checkpoint_blocks=offload", "ema.decay=0.9"),
        ("engine.name=deepspeed", "engine.zero_stage=3", "ema.decay=0.9"),
        ("engine.name=deepspeed", "engine.zero_stage=2", "lora.rank=2"),
        ("engine.name=fsdp2", "engine.zero_stage=3", "engine.sequence_parallel=2"),
        ("engine.name=deepspeed", "engine.zero_stage=3", "engine.sequence_parallel=2"),
    ],
    ids=["fsdp2", "deepspeed", "lora", "fsdp2-sequences", "deepspeed-sequences"],
)
def test_two_ranks_on_another_accelerator_are_the_hosts(words: tuple[str, ...], language: Path) -> None:
    """With states in the background, from which the accelerator's run goes on to the same end."""
    described = language / "model" / "config.json"
    described.write_text(json.dumps({**json.loads(described.read_text()), "attention_dropout": 0.0}))
    common = ("train", "run.yaml", *words, "checkpoint.every=2", "checkpoint.background=true", "--nproc", "2")
    assert start(language, *common, "output.directory=host", accelerator=False) == 0
    assert start(language, *common, accelerator=True) > 1000
    assert losses(language / "out") == pytest.approx(losses(language / "host"), rel=1e-5)
    middle = language / "out" / "checkpoints" / "step-00000002"
    start(language, *common, f"resume={middle}", "output.directory=again", accelerator=True)
    assert losses(language / "again")[-2:] == losses(language / "out")[-2:]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "options", "ranks"),
    [
        ("z-image", ("--engine", "fsdp2"), 1),
        ("z-image", ("--engine", "deepspeed", "--zero-stage", "3"), 2),
        ("flux", ("--engine", "deepspeed", "--zero-stage", "2", "--lora"), 2),
        ("wan", ("--engine", "fsdp2"), 2),
    ],
    ids=["1-fsdp2", "2-deepspeed", "2-lora", "2-fsdp2-videos"],
)
def test_pictures_are_encoded_learnt_and_drawn_on_another_accelerator(
    family: str, options: tuple[str, ...], ranks: int, checkpoints: TinyCheckpoints, tmp_path: Path
) -> None:
    """``cache``, ``train`` with samples and an average of the weights, and ``export``, beside the host."""
    pytest.importorskip("peft")
    pipeline = f"pipeline:{family.replace('-', '_')}"
    make_folders(tmp_path, {"model": pipeline, "pictures": "pictures:12"}, checkpoints)
    start(tmp_path, "config", family, "run.yaml", *options, accelerator=False)
    lora, videos = "--lora" in options, family == "wan"
    values: dict[str, Any] = {
        **{"model.source": "model", "media.source": "pictures/metadata.csv", "media.height": 16},
        **{"media.width": 16, "train.steps": 4, "train.learning_rate": 1e-3, "train.mixed_precision": "no"},
        **{"checkpoint.every": 2, "samples.prompts": '["a cat", "the sea sleeps"]', "samples.steps": 2},
        **{"samples.height": 16, "samples.width": 16, "samples.seed": 5, "ema.decay": 0.9},
        **{"train.batch_size": 6 // ranks, "train.checkpoint_blocks": "offload"},
        **({"lora.rank": 4} if lora else {}),
        **({"media.num_frames": 1, "samples.num_frames": 5} if videos else {}),
    }
    words = [f"{name}={value}" for name, value in values.items()]
    for name in ("host", "out"):
        own = [*words, f"output.directory={name}", "--nproc", str(ranks)]
        for command in ("cache", "train"):
            ran = start(tmp_path, command, "run.yaml", *own, accelerator=name == "out")
            assert (ran > 0) == (name == "out")
        if not lora:
            state = f"{name}/checkpoints/step-00000004"
            start(tmp_path, "export", state, f"exported-{name}", accelerator=name == "out")
    assert losses(tmp_path / "out") == pytest.approx(losses(tmp_path / "host"), rel=1e-4)
    drawn = sorted(path.name for path in (tmp_path / "host" / "samples" / "step-00000004").iterdir())
    assert sorted(path.name for path in (tmp_path / "out" / "samples" / "step-00000004").iterdir()) == drawn
