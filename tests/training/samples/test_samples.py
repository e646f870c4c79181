"""Samples of a run equal diffusers' pipeline and do not change the training."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.integrations.pipelines.tiny_pipelines import CALLS, make_pipeline
from tests.ranks import run_ranks
from tests.training.data.media_files import CHINA
from tests.training.samples.sample_runs import encode, run
from zerostart.errors import ConfigError
from zerostart.training.config.configuration import SamplesConfig
from zerostart.training.config.load import parse_config
from zerostart.training.loop.runner import train
from zerostart.training.samples.pipeline import SamplePipeline
from zerostart.training.samples.sampler import divide_prompts, write_sample

PROMPTS = ["a cat", "the sea", "the cat sleeps"]
ENGINES: dict[str, dict[str, Any]] = {
    "ZeRO-3": {"name": "deepspeed", "zero_stage": 3},
    "ZeRO-2": {"name": "deepspeed", "zero_stage": 2},
    "FSDP2": {"name": "fsdp2"},
    "DDP": {"name": "fsdp2", "zero_stage": 0},
}


@pytest.fixture(scope="module")
def flux(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return encode(make_pipeline("flux", tmp_path_factory.mktemp("flux")), *PROMPTS)


def make_config(path: Path, engine: str, output: Path, **samples: Any) -> dict[str, Any]:
    return {
        "model": {"source": str(path)},
        "task": {"name": "tests.training.samples.sample_runs:RandomFlowMatching"},
        "engine": ENGINES[engine],
        "train": {"steps": 3, "batch_size": 2, "learning_rate": 1e-2},
        "output": {"directory": str(output)},
        **({"samples": {"prompts": PROMPTS, "steps": 2, "seed": 5, **samples}} if samples else {}),
    }


def read_losses(output: Path) -> list[float]:
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


def draw_with_diffusers(path: Path, key: str, trained: Path | None, **options: Any) -> list[torch.Tensor]:
    """Draw the same prompts and noise in one process, [F, 3, H, W] each."""
    import diffusers

    pipe = diffusers.DiffusionPipeline.from_pretrained(path)
    if trained is not None:
        pipe.transformer = type(pipe.transformer).from_pretrained(trained)
    pipe.set_progress_bar_config(disable=True)
    samples = []
    for number, prompt in enumerate(PROMPTS):
        arguments = {**CALLS[key], "num_inference_steps": 2, "output_type": "pt", **options}
        sample = pipe(prompt, generator=torch.Generator().manual_seed(5 + number), **arguments)[0]
        samples.append(sample[0] if sample.dim() == 5 else sample)
    return samples


def read_pictures(folder: Path) -> list[torch.Tensor]:
    from PIL import Image

    rows = [np.asarray(Image.open(path)) for path in sorted(folder.glob("*.png"))]
    return [torch.tensor(row).permute(2, 0, 1)[None] / 255 for row in rows]


def compare_pictures(
    actual: list[torch.Tensor], expected: list[torch.Tensor], tolerance: float = 1.01 / 255
) -> None:
    assert len(actual) == len(expected)
    for a, b in zip(actual, expected, strict=True):
        assert a.shape == b.shape
        assert float((a - b).abs().max()) <= tolerance


def compare_with_diffusers(
    key: str, path: Path, engine: str, root: Path, size: dict[str, Any], **call: Any
) -> None:
    """Compare pictures before and after training, and losses with a run without samples."""
    with_samples = make_config(path, engine, root / "drawing", every=2, **size)
    run_ranks(run, 2, with_samples)
    run_ranks(run, 2, make_config(path, engine, root / "plain"))
    assert read_losses(root / "drawing") == read_losses(root / "plain")
    samples = root / "drawing" / "samples"
    steps = [f"step-{step:08d}" for step in (0, 2, 3)]
    assert sorted(folder.name for folder in samples.iterdir()) == steps
    before, _, after = (read_pictures(samples / step) for step in steps)
    compare_pictures(before, draw_with_diffusers(path, key, None, **call))
    compare_pictures(after, draw_with_diffusers(path, key, root / "drawing", **call))
    assert not all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert min(float(a.std()) for a in before) > 0.01


@pytest.mark.slow
def test_samples_equal_diffusers_and_do_not_change_training(flux: Path, tmp_path: Path) -> None:
    """Three prompts on two ranks: one rank draws a prompt again."""
    compare_with_diffusers("flux", flux, "ZeRO-3", tmp_path, {"height": 16, "width": 16})


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["ZeRO-2", "FSDP2", "DDP"])
def test_samples_on_other_engines(flux: Path, tmp_path: Path, engine: str) -> None:
    size = {"height": 16, "width": 16, "batch_size": 2}
    compare_with_diffusers("flux", flux, engine, tmp_path, size)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["ZeRO-3", "FSDP2"])
@pytest.mark.parametrize("key", ["qwen_image", "z_image"])
def test_samples_of_other_families(key: str, engine: str, tmp_path: Path) -> None:
    """Prompts differ in length, with masks or lists, and there are negative prompts."""
    path = encode(make_pipeline(key, tmp_path / "pipeline"), *PROMPTS)
    negative = {"negative_prompt": CALLS[key].get("negative_prompt", "")}
    compare_with_diffusers(key, path, engine, tmp_path, {"height": 16, "width": 16, **negative})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("key", "engine"), [("hunyuan_video", "ZeRO-3"), ("ltx2", "FSDP2"), ("ltx2", "ZeRO-3")]
)
def test_samples_of_videos(key: str, engine: str, tmp_path: Path) -> None:
    """Draw one frame, whose file is lossless."""
    path = encode(make_pipeline(key, tmp_path / "pipeline"), *PROMPTS)
    side = CALLS[key]["height"]
    size = {"height": side, "width": side, "num_frames": 1}
    compare_with_diffusers(key, path, engine, tmp_path, size, num_frames=1)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["ZeRO-3", "ZeRO-2", "FSDP2"])
def test_samples_of_averaged_weights(flux: Path, tmp_path: Path, engine: str) -> None:
    """Samples equal diffusers with the saved average; the training does not change."""
    values = make_config(flux, engine, tmp_path / "out", with_ema=True, every=2, height=16, width=16)
    averaged = {"ema": {"decay": 0.5}}
    run_ranks(run, 2, values | averaged)
    run_ranks(run, 2, make_config(flux, engine, tmp_path / "plain") | averaged)
    assert read_losses(tmp_path / "out") == read_losses(tmp_path / "plain")
    samples = read_pictures(tmp_path / "out" / "samples" / "step-00000003")
    compare_pictures(samples, draw_with_diffusers(flux, "flux", tmp_path / "out" / "ema"))
    live = draw_with_diffusers(flux, "flux", tmp_path / "out")
    assert max(float((a - b).abs().max()) for a, b in zip(samples, live, strict=True)) > 2 / 255


def test_written_videos_can_be_played(tmp_path: Path) -> None:
    av = pytest.importorskip("av")
    frames = torch.zeros(5, 3, 33, 48)
    frames[:, 0] = torch.linspace(0, 1, 5).view(5, 1, 1)
    path = write_sample(tmp_path / "clip", frames, fps=8)
    assert path.suffix == ".mp4"
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        frames_read = [frame.to_ndarray(format="rgb24") for frame in container.decode(stream)]
        assert stream.average_rate == 8
    assert len(frames_read) == 5
    reds = [float(row[:33, :48, 0].mean()) / 255 for row in frames_read]
    assert reds == pytest.approx([0, 0.25, 0.5, 0.75, 1], abs=0.05)


def test_batches_have_prompts_of_one_shape() -> None:
    lengths = [3, 4, 3, 3, 4, 5]
    prompts = [{"prompt_embeds": torch.zeros(length, 2)} for length in lengths]
    batches = divide_prompts(prompts, 2)
    assert sorted(number for batch in batches for number in batch) == list(range(6))
    assert all(len({lengths[number] for number in batch}) == 1 and len(batch) <= 2 for batch in batches)


@pytest.mark.parametrize(
    ("index", "settings", "message"),
    [
        ({"_class_name": "WanImageToVideoPipeline"}, {}, "starts from pictures: name one for each prompt in"),
        ({"_class_name": "FluxPipeline"}, {"images": [str(CHINA)]}, "FluxPipeline draws from texts only"),
        ({"_class_name": "WanVACEPipeline"}, {}, "WanVACEPipeline takes more .video"),
        ({"_class_name": "FluxKontextPipeline"}, {"images": ["no.png"]}, "no.png: no such file"),
        (
            {"_class_name": "WanPipeline", "boundary_ratio": 0.9},
            {},
            "two experts, of which .* has only transformer",
        ),
        (
            {"_class_name": "FluxPipeline"},
            {"num_frames": 5},
            "FluxPipeline draws pictures: leave samples.num_frames",
        ),
        ({"_class_name": "FluxPipeline", "vae": [None, None]}, {}, "has no vae to draw with"),
        ({"_class_name": "FluxPipeline"}, {}, "has no scheduler, which drawing needs"),
    ],
)
def test_impossible_samples_are_refused(
    index: dict[str, Any], settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    parts = {"transformer": ["diffusers", "FluxTransformer2DModel"], "vae": ["diffusers", "AutoencoderKL"]}
    for name in parts:
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    (tmp_path / "model_index.json").write_text(json.dumps({**parts, **index}))
    with pytest.raises(ConfigError, match=message):
        SamplePipeline(str(tmp_path), "transformer", SamplesConfig(prompts=["a"], **settings))


def test_samples_need_a_whole_pipeline(flux: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no model_index\.json"):
        SamplePipeline(str(flux / "transformer"), "transformer", SamplesConfig(prompts=["a"]))


def test_samples_with_ema_need_averaged_weights(flux: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"samples\.with_ema: the run has no averaged weights; add"):
        parse_config(make_config(flux, "FSDP2", tmp_path, with_ema=True))


def test_impossible_samples_are_refused_before_encoding(flux: Path, tmp_path: Path) -> None:
    from PIL import Image

    values = make_config(flux, "FSDP2", tmp_path / "out", num_frames=5)
    folder = tmp_path / "pictures"
    folder.mkdir()
    Image.new("RGB", (16, 16)).save(folder / "one.png")
    values |= {"task": {"name": "flow-matching"}, "media": {"source": str(folder)}}
    with pytest.raises(ConfigError, match=r"FluxPipeline draws pictures"):
        train(parse_config(values))
    assert not (tmp_path / "out" / "cache").exists()
