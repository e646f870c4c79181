"""Compare whole training runs on the pretend accelerator (``tests/simulated/npu``) with the host."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.documents.folders import make_folders
from tests.npu_ranks import npu_environment
from tests.tiny import TinyCheckpoints

ZEROSTART = [sys.executable, "-c", "from zerostart.cli import main; main()"]


def start(folder: Path, *words: str, accelerator: bool) -> int:
    """Run a command in ``folder``; return the number of operators on the accelerator."""
    counts, environment = folder / "operators", dict(os.environ)
    shutil.rmtree(counts, ignore_errors=True)
    if accelerator:
        counts.mkdir()
        # Also replaces DS_ACCELERATOR=cpu of the tests' own environment.
        environment = {**npu_environment(), "ZEROSTART_TEST_NPU_OPERATORS": str(counts)}
    result = subprocess.run(
        [*ZEROSTART, *words], cwd=folder, env=environment, capture_output=True, text=True, timeout=200
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return sum(int(path.read_text()) for path in counts.glob("*"))


def losses(out: Path) -> list[float]:
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [value for line in lines for name, value in line.items() if name in ("loss", "held_out_loss")]


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
def test_diffusion_runs_equal_the_host(
    family: str, options: tuple[str, ...], ranks: int, checkpoints: TinyCheckpoints, tmp_path: Path
) -> None:
    """Run ``cache``, ``train`` with samples and EMA, and ``export``."""
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
        folders = f"output.directory={name}", f"cache.directory={name}/cache"
        options_of_run = [*words, *folders, "--nproc", str(ranks)]
        for command in ("cache", "train"):
            operators = start(tmp_path, command, "run.yaml", *options_of_run, accelerator=name == "out")
            assert (operators > 0) == (name == "out")
        if not lora:
            state = f"{name}/checkpoints/step-00000004"
            start(tmp_path, "export", state, f"exported-{name}", accelerator=name == "out")
    assert losses(tmp_path / "out") == pytest.approx(losses(tmp_path / "host"), rel=1e-4)
    pictures = sorted(path.name for path in (tmp_path / "host" / "samples" / "step-00000004").iterdir())
    assert (
        sorted(path.name for path in (tmp_path / "out" / "samples" / "step-00000004").iterdir()) == pictures
    )
