"""From an empty directory to pictures by commands alone, with a kill in between and other ranks after it."""

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
from tests.training.samples.test_samples import check_alike, pictures
from zerostart.training.samples.sampler import write_sample

ZEROSTART = [sys.executable, "-c", "from zerostart.cli import main; main()"]
PROMPTS = ["a cat", "the sea sleeps"]
STEPS = 8
#: What is changed in the file that `zerostart config` has written: a small run of float32.
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
#: What differs for videos, which are learnt from pictures here: how many frames are drawn.
VIDEOS: dict[str, Any] = {"media.num_frames": 1, "samples.num_frames": 5}


def run(folder: Path, *words: str) -> str:
    """What a command of zerostart says on stderr; it has to end well."""
    done = subprocess.run([*ZEROSTART, *words], cwd=folder, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stderr


def killed(folder: Path, checkpoint: Path, *words: str) -> None:
    """The command, killed as soon as ``checkpoint`` is there; its ranks go with it."""
    with (folder / "killed.log").open("w") as log:
        process = subprocess.Popen(
            [*ZEROSTART, *words], cwd=folder, stdout=log, stderr=log, start_new_session=True
        )
        end = time.monotonic() + 150
        while not checkpoint.exists() and process.poll() is None and time.monotonic() < end:
            time.sleep(0.01)
        process.kill()
        assert process.wait() < 0, (folder / "killed.log").read_text()
    assert checkpoint.exists()
    while members(process.pid) and time.monotonic() < end:
        time.sleep(0.1)
    assert members(process.pid) == []


def members(session: int) -> list[str]:
    """The processes of a session that run."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            state = (path / "stat").read_text().rpartition(")")[2].split()
            if state[3] == str(session) and state[0] != "Z":
                found.append((path / "cmdline").read_text())
    return found


def drawn(model: Path, out: Path, exported: Path | None, **more: Any) -> list[torch.Tensor]:
    """By diffusers, with the model that was exported or the LoRA in ``out``, [F, 3, H, W] each."""
    import diffusers

    pipe = diffusers.DiffusionPipeline.from_pretrained(model)
    if exported is None:
        pipe.load_lora_weights(out)
    else:
        pipe.transformer = type(pipe.transformer).from_pretrained(exported)
    pipe.set_progress_bar_config(disable=True)
    size = {"height": 16, "width": 16, "num_inference_steps": 2, "output_type": "pt", **more}
    made = [
        pipe(prompt=prompt, generator=torch.Generator().manual_seed(5 + number), **size)[0]
        for number, prompt in enumerate(PROMPTS)
    ]
    return [one[0] if one.dim() == 5 else one for one in made]


def check_videos(found: list[torch.Tensor], folder: Path, before: Path, scratch: Path) -> None:
    """What is in the files of ``folder`` is what ``found`` is in files of that kind, which lose a little."""
    written, others = played(folder), played(before)
    for number, frames in enumerate(found):
        write_sample(scratch / "found" / f"{number}", frames, fps=16)
    expected = played(scratch / "found")
    assert len(written) == len(expected) == len(found)
    for one, same, other in zip(written, expected, others, strict=True):
        assert one.shape == same.shape
        off, moved = float((one - same).abs().mean()), float((one - other).abs().mean())
        assert off < 1 / 255, off
        assert moved > 2 * off, (moved, off)


def played(folder: Path) -> list[torch.Tensor]:
    """The frames of each video in ``folder``, [F, H, W, 3] from 0 to 1."""
    import av

    found = []
    for path in sorted(folder.glob("*.mp4")):
        with av.open(str(path)) as container:
            frames = [torch.tensor(one.to_ndarray(format="rgb24")) for one in container.decode(video=0)]
        found.append(torch.stack(frames) / 255)
    return found


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
def test_from_an_empty_directory_to_pictures(
    family: str, options: tuple[str, ...], ranks: int, checkpoints: Any, tmp_path: Path
) -> None:
    pytest.importorskip("peft")
    key = family.replace("-", "_")
    make_folders(tmp_path, {"model": f"pipeline:{key}", "pictures": "pictures:12"}, checkpoints)
    out, last = tmp_path / "out" / "run", f"step-{STEPS:08d}"
    run(tmp_path, "config", family, "run.yaml", *options)
    lora = {"lora.rank": 4} if "--lora" in options else {}
    videos = VIDEOS if family == "wan" else {}
    values = [f"{name}={value}" for name, value in {**VALUES, **lora, **videos}.items()]
    run(tmp_path, "cache", "run.yaml", *values, "train.batch_size=3", "--nproc", "2")
    training = ("train", "run.yaml", *values)
    killed(tmp_path, out / "checkpoints" / "step-00000004", *training, "train.batch_size=3", "--nproc", "2")
    assert not list(out.glob("*.safetensors"))
    run(tmp_path, *training, f"train.batch_size={6 // ranks}", "--nproc", str(ranks))
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "loss" in line] == list(range(1, STEPS + 1))
    if not lora:
        run(tmp_path, "export", os.fspath(out / "checkpoints" / last), "exported")
    exported, before = None if lora else tmp_path / "exported", out / "samples" / "step-00000000"
    if videos:
        found = drawn(tmp_path / "model", out, exported, num_frames=5)
        check_videos(found, out / "samples" / last, before, tmp_path)
        return
    wanted = pictures(out / "samples" / last)
    check_alike(drawn(tmp_path / "model", out, exported), wanted)
    assert not all(torch.equal(one, other) for one, other in zip(pictures(before), wanted, strict=True))
