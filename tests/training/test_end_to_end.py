"""Train by commands only: configure, cache, kill and resume, draw samples."""

import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.documents.folders import make_folders
from tests.training.samples.test_samples import compare_pictures, read_pictures
from zerostart.training.samples.sampler import write_sample

ZEROSTART = [sys.executable, "-c", "from zerostart.cli import main; main()"]
PROMPTS = ["a cat", "the sea sleeps"]
STEPS = 8
#: Overrides of the file that `zerostart config` writes: a small run in float32.
VALUES: dict[str, Any] = {
    "model.source": "model",
    "media.source": "pictures/metadata.csv",
    "media.height": 16,
    "media.width": 16,
    "train.steps": STEPS,
    "train.learning_rate": 1e-3,
    "train.mixed_precision": "no",
    "checkpoint.every": 2,
    "samples.prompts": json.dumps(PROMPTS),
    "samples.every": 0,
    "samples.steps": 2,
    "samples.height": 16,
    "samples.width": 16,
    "samples.seed": 5,
    "ema.decay": 0.9,
}
#: Overrides for video models, which train on pictures here and draw videos.
VIDEOS: dict[str, Any] = {"media.num_frames": 1, "samples.num_frames": 5}


def run_command(folder: Path, *arguments: str) -> str:
    """Run a command of zerostart, which must succeed, and return its stderr."""
    result = subprocess.run([*ZEROSTART, *arguments], cwd=folder, capture_output=True, text=True, timeout=200)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stderr


def run_and_kill(folder: Path, checkpoint: Path, *arguments: str) -> None:
    """Run a command and kill it with its ranks when ``checkpoint`` exists."""
    with (folder / "killed.log").open("w") as log:
        process = subprocess.Popen(
            [*ZEROSTART, *arguments], cwd=folder, stdout=log, stderr=log, start_new_session=True
        )
        end = time.monotonic() + 150
        while not checkpoint.exists() and process.poll() is None and time.monotonic() < end:
            time.sleep(0.01)
        process.kill()
        assert process.wait() < 0, (folder / "killed.log").read_text()
    assert checkpoint.exists()
    while list_processes(process.pid) and time.monotonic() < end:
        time.sleep(0.1)
    assert list_processes(process.pid) == []


def list_processes(session: int) -> list[str]:
    """Return the command lines of the running processes of a session."""
    commands = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            state = (path / "stat").read_text().rpartition(")")[2].split()
            if state[3] == str(session) and state[0] != "Z":
                commands.append((path / "cmdline").read_text())
    return commands


def draw_with_diffusers(model: Path, out: Path, exported: Path | None, **options: Any) -> list[torch.Tensor]:
    """Draw [F, 3, H, W] each with the exported model or the LoRA."""
    import diffusers

    pipe = diffusers.DiffusionPipeline.from_pretrained(model)
    if exported is None:
        pipe.load_lora_weights(out)
    else:
        pipe.transformer = type(pipe.transformer).from_pretrained(exported)
    pipe.set_progress_bar_config(disable=True)
    size = {"height": 16, "width": 16, "num_inference_steps": 2, "output_type": "pt", **options}
    samples = [
        pipe(prompt=prompt, generator=torch.Generator().manual_seed(5 + number), **size)[0]
        for number, prompt in enumerate(PROMPTS)
    ]
    return [sample[0] if sample.dim() == 5 else sample for sample in samples]


def check_videos(samples: list[torch.Tensor], folder: Path, before: Path, scratch: Path) -> None:
    """Compare the videos in ``folder`` with ``samples``, encoded in the same lossy format."""
    written, earlier = decode_videos(folder), decode_videos(before)
    for number, frames in enumerate(samples):
        write_sample(scratch / "found" / f"{number}", frames, fps=16)
    expected = decode_videos(scratch / "found")
    assert len(written) == len(expected) == len(samples)
    for video, reference, start in zip(written, expected, earlier, strict=True):
        assert video.shape == reference.shape
        error, change = float((video - reference).abs().mean()), float((video - start).abs().mean())
        assert error < 1 / 255, error
        assert change > 2 * error, (change, error)


def decode_videos(folder: Path) -> list[torch.Tensor]:
    """Decode each video in ``folder`` to [F, H, W, 3], from 0 to 1."""
    import av

    videos = []
    for path in sorted(folder.glob("*.mp4")):
        with av.open(str(path)) as container:
            frames = [torch.tensor(frame.to_ndarray(format="rgb24")) for frame in container.decode(video=0)]
        videos.append(torch.stack(frames) / 255)
    return videos


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "options", "ranks"),
    [
        ("flux", ("--engine", "deepspeed", "--zero-stage", "2", "--lora"), 1),
        ("z-image", ("--engine", "deepspeed", "--zero-stage", "3"), 1),
        ("flux", ("--engine", "fsdp2"), 3),
        ("wan", ("--engine", "deepspeed", "--zero-stage", "3", "--lora"), 3),
        ("wan", ("--engine", "deepspeed", "--zero-stage", "2"), 3),
        ("wan", ("--engine", "fsdp2"), 1),
    ],
)
def test_train_resume_and_sample_by_commands(
    family: str, options: tuple[str, ...], ranks: int, checkpoints: Any, tmp_path: Path
) -> None:
    pytest.importorskip("peft")
    key = family.replace("-", "_")
    make_folders(tmp_path, {"model": f"pipeline:{key}", "pictures": "pictures:12"}, checkpoints)
    out, last = tmp_path / "out" / "run", f"step-{STEPS:08d}"
    run_command(tmp_path, "config", family, "run.yaml", *options)
    lora = {"lora.rank": 4} if "--lora" in options else {}
    videos = VIDEOS if family == "wan" else {}
    values = [f"{name}={value}" for name, value in {**VALUES, **lora, **videos}.items()]
    run_command(tmp_path, "cache", "run.yaml", *values, "train.batch_size=3", "--nproc", "2")
    training = ("train", "run.yaml", *values)
    run_and_kill(
        tmp_path, out / "checkpoints" / "step-00000004", *training, "train.batch_size=3", "--nproc", "2"
    )
    assert not list(out.glob("*.safetensors"))
    run_command(tmp_path, *training, f"train.batch_size={6 // ranks}", "--nproc", str(ranks))
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "loss" in line] == list(range(1, STEPS + 1))
    if not lora:
        run_command(tmp_path, "export", os.fspath(out / "checkpoints" / last), "exported")
    exported, before = None if lora else tmp_path / "exported", out / "samples" / "step-00000000"
    if videos:
        samples = draw_with_diffusers(tmp_path / "model", out, exported, num_frames=5)
        check_videos(samples, out / "samples" / last, before, tmp_path)
        return
    expected = read_pictures(out / "samples" / last)
    compare_pictures(draw_with_diffusers(tmp_path / "model", out, exported), expected)
    assert not all(torch.equal(a, b) for a, b in zip(read_pictures(before), expected, strict=True))
