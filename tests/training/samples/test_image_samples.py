"""Samples from start pictures and by two experts equal diffusers' pipelines."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ranks import run_ranks
from tests.training.data.tiny_media import make_picture, save_pipeline, write_media
from tests.training.samples.test_samples import compare_pictures, read_pictures
from zerostart.errors import ConfigError
from zerostart.training.config.load import parse_config

PROMPTS = ["a cat", "the sea sleeps", "the cat"]
SIZE = {"height": 32, "width": 32}


def shrink_kontext_sizes() -> None:
    """Replace the sizes of a million pixels to which Kontext scales pictures."""
    from diffusers.pipelines.flux import pipeline_flux_kontext

    pipeline_flux_kontext.PREFERRED_KONTEXT_RESOLUTIONS = [(32, 32)]


def join_frames(frames: torch.Tensor) -> torch.Tensor:
    """Join a video [F, 3, H, W] to one picture, whose file is lossless."""
    return torch.cat(list(frames), dim=-1)[None]


def run(values: dict[str, Any]) -> Any:
    from zerostart.training.loop.runner import train
    from zerostart.training.samples import sampler

    write = sampler.write_sample
    sampler.write_sample = lambda path, frames, fps: write(path, join_frames(frames), fps)
    shrink_kontext_sizes()
    return train(parse_config(values))


def make_config(
    pipeline: Path, columns: dict[str, str], tmp_path: Path, engine: dict[str, Any], frames: int = 5
) -> dict[str, Any]:
    media = write_media(tmp_path / "media", columns, [(32, 32)] * 2, frames=frames)
    starts = []
    for number in range(len(PROMPTS)):
        starts.append(str(tmp_path / f"{number}.png"))
        make_picture(32, 32, 50 + number).save(starts[-1])
    samples = {"prompts": PROMPTS, "images": starts, "steps": 4, "seed": 5, **SIZE}
    return {
        "model": {"source": str(pipeline)},
        "task": {"name": "flow-matching"},
        "media": {**media, **SIZE},
        "cache": {"max_sequence_length": 512 if "image" not in columns else 12},
        "engine": engine,
        "train": {"steps": 1, "batch_size": 1, "learning_rate": 1e-2},
        "samples": samples,
        "output": {"directory": str(tmp_path / "out")},
    }


def draw_with_diffusers(
    pipeline: Path, component: str, trained: Path | None, **options: Any
) -> list[torch.Tensor]:
    """Draw equal texts, pictures and noise in one process, [F, 3, H, W] each."""
    import diffusers
    from PIL import Image

    shrink_kontext_sizes()
    pipe = diffusers.DiffusionPipeline.from_pretrained(pipeline)
    if trained is not None:
        setattr(pipe, component, type(getattr(pipe, component)).from_pretrained(trained))
    pipe.set_progress_bar_config(disable=True)
    samples, starts = [], options.pop("images", None)
    for number, prompt in enumerate(PROMPTS):
        image = {} if starts is None else {"image": Image.open(starts[number])}
        sample = pipe(
            prompt=prompt,
            num_inference_steps=4,
            output_type="pt",
            generator=torch.Generator().manual_seed(5 + number),
            **SIZE,
            **image,
            **options,
        )[0]
        samples.append(join_frames(sample[0] if sample.dim() == 5 else sample))
    return samples


CASES: dict[str, tuple[dict[str, str], dict[str, Any], dict[str, Any]]] = {
    "wan_i2v": ({"video": "video"}, {"num_frames": 1, "max_sequence_length": 512}, {"name": "fsdp2"}),
    "ltx2_i2v": (
        {"video": "video"},
        {"num_frames": 9, "max_sequence_length": 512},
        {"name": "deepspeed", "zero_stage": 3},
    ),
    "flux_kontext": (
        {"image": "image", "edit_image": "image"},
        {"max_sequence_length": 12, "max_area": 32 * 32},
        {"name": "deepspeed", "zero_stage": 3},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("key", CASES)
def test_samples_that_start_from_pictures(key: str, tmp_path: Path) -> None:
    """Draw before and after training, three prompts on two ranks."""
    columns, options, engine = CASES[key]
    pipeline = save_pipeline(key, tmp_path / "pipeline")
    values = make_config(pipeline, columns, tmp_path, engine, frames=9 if key == "ltx2_i2v" else 5)
    if "num_frames" in options:
        values["samples"]["num_frames"] = options["num_frames"]
    if key == "wan_i2v":
        pytest.importorskip("ftfy")
    if key == "ltx2_i2v":
        pytest.importorskip("av")  # the pipeline compresses the picture as a video's frame
    run_ranks(run, 2, values)
    images = values["samples"]["images"]
    samples = [read_pictures(tmp_path / "out" / "samples" / f"step-{step:08d}") for step in (0, 1)]
    compare_pictures(samples[0], draw_with_diffusers(pipeline, "transformer", None, images=images, **options))
    trained = tmp_path / "out"
    compare_pictures(
        samples[1], draw_with_diffusers(pipeline, "transformer", trained, images=images, **options)
    )
    assert not all(torch.equal(a, b) for a, b in zip(*samples, strict=True))
    swapped = draw_with_diffusers(pipeline, "transformer", None, images=images[::-1], **options)
    assert max(float((a - b).abs().max()) for a, b in zip(samples[0], swapped, strict=True)) > 2 / 255


@pytest.mark.slow
@pytest.mark.parametrize("component", ["transformer", "transformer_2"])
def test_samples_of_one_of_two_experts(component: str, tmp_path: Path) -> None:
    """Wan2.2 A14B: the other expert is loaded sharded, in addition to the trained one."""
    pipeline = save_pipeline("wan_of_two", tmp_path / "pipeline")
    values = make_config(pipeline, {"image": "image"}, tmp_path, {"name": "fsdp2"})
    del values["samples"]["images"]
    values["model"]["component"] = component
    values["samples"] |= {"num_frames": 1, "guidance": 3.0}
    run_ranks(run, 2, values)
    options = {"num_frames": 1, "guidance_scale": 3.0, "max_sequence_length": 12}
    samples = [read_pictures(tmp_path / "out" / "samples" / f"step-{step:08d}") for step in (0, 1)]
    compare_pictures(samples[0], draw_with_diffusers(pipeline, component, None, **options))
    compare_pictures(samples[1], draw_with_diffusers(pipeline, component, tmp_path / "out", **options))
    assert not all(torch.equal(a, b) for a, b in zip(*samples, strict=True))


def test_each_prompt_needs_pictures(tmp_path: Path) -> None:
    values = make_config(tmp_path, {"image": "image"}, tmp_path, {"name": "fsdp2"})
    values["samples"]["images"] = values["samples"]["images"][:2]
    with pytest.raises(ConfigError, match="images has entries for 2 prompts, and there are 3"):
        parse_config(values)
