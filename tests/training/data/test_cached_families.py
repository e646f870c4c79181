"""Cached items of every family equal diffusers' inputs, on any number of ranks."""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch

from tests.integrations.pipelines import tiny_pipelines as tiny
from tests.ranks import run_ranks
from tests.training.data.tiny_media import (
    PROMPTS,
    make_config,
    make_picture,
    read_cache,
    save_pipeline,
    write_media,
)
from zerostart.distributed.world import current_world
from zerostart.training.config.configuration import CacheConfig
from zerostart.training.config.load import parse_config
from zerostart.training.data.cache import ensure_cache
from zerostart.training.data.cached import CachedItems
from zerostart.training.diffusion.families import encoder_class

pytestmark = pytest.mark.usefixtures("one_thread")


def make_cache(values: dict[str, Any]) -> str:
    return ensure_cache(parse_config(values), current_world()).digest()


class TransformerCalled(Exception):
    """Raised instead of calling the transformer."""


def capture(pipe: Any, **call: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of the first call of a pipeline's transformer."""
    arguments: list[Any] = []

    def record(module: Any, positional: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        arguments.extend((positional, keywords))
        raise TransformerCalled

    handle = pipe.transformer.register_forward_pre_hook(record, with_kwargs=True)
    pipe.set_progress_bar_config(disable=True)
    with pytest.raises(TransformerCalled):
        pipe(num_inference_steps=2, generator=torch.Generator().manual_seed(1), **call)
    handle.remove()
    return arguments[0], arguments[1]


Row = Mapping[str, Any]


def make_rng(number: int) -> torch.Generator:
    import hashlib

    seed = hashlib.blake2b(f"0 {number}".encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(seed, "little") >> 1)


@dataclass(frozen=True)
class Case:
    """Columns and sizes of a family's media, and the items expected for a row."""

    columns: Mapping[str, str]
    expected: Callable[[Any, str, Row, int], Mapping[str, torch.Tensor]]
    size: tuple[int, int] = (16, 16)
    column_options: Mapping[str, Any] | None = None
    frames: int = 5


def encode_wan_video(pipe: Any, video: list[Any], number: int) -> torch.Tensor:
    pixels = pipe.video_processor.preprocess_video(video)
    shape = (1, -1, 1, 1, 1)
    mean, std = (
        torch.tensor(getattr(pipe.vae.config, f"latents_{name}")).view(shape) for name in ("mean", "std")
    )
    return (pipe.vae.encode(pixels).latent_dist.sample(make_rng(number)) - mean) * (1.0 / std)


WAN = {"height": 16, "width": 16, "num_frames": 5, "guidance_scale": 1.0, "max_sequence_length": 12}
WAN_I2V = {**WAN, "max_sequence_length": 512}  # its attention requires this length


def expect_wan(pipe: Any, prompt: str, row: Row, number: int) -> Mapping[str, torch.Tensor]:
    _, inputs = capture(pipe, prompt=prompt, **WAN)
    latents = encode_wan_video(pipe, row["video"], number)[0]
    return {"latents": latents, "prompt_embeds": inputs["encoder_hidden_states"][0]}


def expect_wan_i2v(pipe: Any, prompt: str, row: Row, number: int) -> Mapping[str, torch.Tensor]:
    last = {"last_image": row["last_frame"]} if "last_frame" in row else {}
    _, inputs = capture(pipe, image=row.get("first_frame", row["video"][0]), prompt=prompt, **last, **WAN_I2V)
    return {
        "latents": encode_wan_video(pipe, row["video"], number)[0],
        "prompt_embeds": inputs["encoder_hidden_states"][0],
        "condition": inputs["hidden_states"][0, 4:],
        "image_embeds": inputs["encoder_hidden_states_image"].flatten(0, 1),
    }


def expect_wan_vace(pipe: Any, prompt: str, row: Row, number: int) -> Mapping[str, torch.Tensor]:
    references = row.get("reference_image", [])
    options = {"reference_images": references} if references else {}
    _, inputs = capture(
        pipe, prompt=prompt, video=row["control_video"], mask=row["control_mask"], **options, **WAN
    )
    latents = encode_wan_video(pipe, row["video"], number)[0]
    shape, config = (1, -1, 1, 1, 1), pipe.vae.config
    mean, std = (torch.tensor(getattr(config, f"latents_{name}")).view(shape) for name in ("mean", "std"))
    for reference in references:
        encoded = pipe.vae.encode(pipe.video_processor.preprocess_video([reference])).latent_dist.mode()
        latents = torch.cat([((encoded - mean) * (1.0 / std))[0], latents], dim=1)
    return {
        "latents": latents,
        "prompt_embeds": inputs["encoder_hidden_states"][0],
        "control_latents": inputs["control_hidden_states"][0],
    }


IMAGE = {"height": 16, "width": 16, "max_sequence_length": 24}


def expect_qwen_image(pipe: Any, prompt: str, row: Row, number: int) -> Mapping[str, torch.Tensor]:
    _, inputs = capture(pipe, prompt=prompt, **IMAGE)
    img2img = diffusers.QwenImageImg2ImgPipeline(**pipe.components)
    pixels = img2img.image_processor.preprocess(row["image"]).unsqueeze(2)
    embeds = inputs["encoder_hidden_states"][0]
    return {
        "latents": img2img._encode_vae_image(pixels, make_rng(number))[0, :, 0],
        "prompt_embeds": embeds,
        "prompt_embeds_mask": torch.ones(len(embeds), dtype=torch.long),
    }


def expect_flux(pipe: Any, prompt: str, row: Row, number: int, **edit: Any) -> Mapping[str, torch.Tensor]:
    _, inputs = capture(pipe, prompt=prompt, **IMAGE, **edit)
    parts = {
        name: part
        for name, part in pipe.components.items()
        if name not in ("image_encoder", "feature_extractor")
    }
    img2img = diffusers.FluxImg2ImgPipeline(**parts)
    latents = img2img._encode_vae_image(img2img.image_processor.preprocess(row["image"]), make_rng(number))[0]
    item = {
        "latents": latents,
        "prompt_embeds": inputs["encoder_hidden_states"][0],
        "pooled_prompt_embeds": inputs["pooled_projections"][0],
    }
    if edit:
        height, width = latents.shape[1:]
        tokens = inputs["hidden_states"][:, height * width // 4 :]
        factor = pipe.vae_scale_factor
        item["image_latents.0"] = pipe._unpack_latents(tokens, height * factor, width * factor, factor)[0]
    return item


def expect_flux_kontext(pipe: Any, prompt: str, row: Row, number: int) -> Mapping[str, torch.Tensor]:
    return expect_flux(pipe, prompt, row, number, image=row["edit_image"], max_area=256, _auto_resize=False)


def expect_flux2(pipe: Any, prompt: str, row: Row, number: int) -> Mapping[str, torch.Tensor]:
    call = {"height": 64, "width": 64, "max_sequence_length": 24, "guidance_scale": 1.0}
    _, inputs = capture(pipe, prompt=prompt, image=row["edit_image"], **call)
    posterior = pipe.vae.encode(pipe.image_processor.preprocess(row["image"])).latent_dist
    bn = pipe.vae.bn
    mean, std = bn.running_mean.view(1, -1, 1, 1), torch.sqrt(bn.running_var + pipe.vae.config.batch_norm_eps)
    patches = pipe._patchify_latents(posterior.sample(make_rng(number)))
    latents = ((patches - mean) / std.view(1, -1, 1, 1))[0]
    height, width = latents.shape[1:]
    tokens = inputs["hidden_states"][0, height * width :].unflatten(0, (-1, height, width))
    edits = {f"image_latents.{n}": edit.permute(2, 0, 1) for n, edit in enumerate(tokens)}
    return {"latents": latents, "prompt_embeds": inputs["encoder_hidden_states"][0], **edits}


def expect_z_image(pipe: Any, prompt: str, row: Row, number: int) -> Mapping[str, torch.Tensor]:
    inputs, _ = capture(pipe, prompt=prompt, guidance_scale=0.0, **IMAGE)
    pixels, config = pipe.image_processor.preprocess(row["image"]), pipe.vae.config
    sample = pipe.vae.encode(pixels).latent_dist.sample(make_rng(number))
    return {
        "latents": ((sample - config.shift_factor) * config.scaling_factor)[0],
        "prompt_embeds": inputs[2][0],
    }


def expect_hunyuan_video(pipe: Any, prompt: str, row: Row, number: int) -> Mapping[str, torch.Tensor]:
    call = {"height": 16, "width": 16, "num_frames": 5, "max_sequence_length": 24}
    _, inputs = capture(pipe, prompt=prompt, **call)
    posterior = pipe.vae.encode(pipe.video_processor.preprocess_video(row["video"])).latent_dist
    return {
        "latents": posterior.sample(make_rng(number))[0] * pipe.vae.config.scaling_factor,
        "prompt_embeds": inputs["encoder_hidden_states"][0],
        "pooled_prompt_embeds": inputs["pooled_projections"][0],
        "prompt_attention_mask": inputs["encoder_attention_mask"][0].long(),
    }


def expect_ltx2(pipe: Any, prompt: str, row: Row, number: int, **options: Any) -> Mapping[str, torch.Tensor]:
    call = {"height": 32, "width": 32, "num_frames": 9, "max_sequence_length": 24, **options}
    _, inputs = capture(pipe, prompt=prompt, guidance_scale=1.0, audio_guidance_scale=1.0, **call)
    vae = pipe.vae
    sample = vae.encode(pipe.video_processor.preprocess_video(row["video"])).latent_dist.sample(
        make_rng(number)
    )
    embeds = [inputs["encoder_hidden_states"], inputs["audio_encoder_hidden_states"]]
    return {
        "latents": pipe._normalize_latents(sample, vae.latents_mean, vae.latents_std)[0],
        "prompt_embeds": torch.cat(embeds, dim=-1)[0],
        "prompt_attention_mask": inputs["encoder_attention_mask"][0],
        "frame_rate": torch.tensor(inputs["fps"], dtype=torch.float64),
    }


def expect_ltx2_i2v(pipe: Any, prompt: str, row: Row, number: int) -> Mapping[str, torch.Tensor]:
    """Skip the compression that the pipeline applies to a first frame by default."""
    image = row.get("first_frame", row["video"][0])
    _, inputs = capture(pipe, prompt=prompt, image=image, guidance_scale=1.0, image_crf=0, **LTX2_I2V)
    frames, height, width = (inputs[name] for name in ("num_frames", "height", "width"))
    latents = pipe._unpack_latents(inputs["hidden_states"], frames, height, width)[0]
    item = expect_ltx2(pipe, prompt, row, number, image=image, image_crf=0)
    return {**item, "condition": latents[:, :1]}


LTX2_I2V = {
    "audio_guidance_scale": 1.0,
    "height": 32,
    "width": 32,
    "num_frames": 9,
    "max_sequence_length": 24,
}
REFERENCE_COLUMN = {"reference_image": {"kind": "images", "size": "item"}}
CASES = {
    "wan": Case({"video": "video"}, expect_wan),
    "wan_i2v": Case({"video": "video"}, expect_wan_i2v),
    "wan_i2v last": Case({"video": "video", "first_frame": "image", "last_frame": "image"}, expect_wan_i2v),
    "wan_vace": Case({"video": "video", "control_video": "video", "control_mask": "video"}, expect_wan_vace),
    "wan_vace reference": Case(
        {"video": "video", "control_video": "video", "control_mask": "video", "reference_image": "images"},
        expect_wan_vace,
        column_options=REFERENCE_COLUMN,
    ),
    "qwen_image": Case({"image": "image"}, expect_qwen_image),
    "flux": Case({"image": "image"}, expect_flux),
    "flux_kontext": Case(
        {"image": "image", "edit_image": "image"},
        expect_flux_kontext,
        column_options={"edit_image": {"kind": "images"}},
    ),
    "flux2_klein": Case({"image": "image", "edit_image": "images"}, expect_flux2, size=(64, 64)),
    "z_image": Case({"image": "image"}, expect_z_image),
    "hunyuan_video": Case({"video": "video"}, expect_hunyuan_video),
    "ltx2": Case({"video": "video"}, expect_ltx2, size=(32, 32), frames=9),
    "ltx2_i2v": Case({"video": "video"}, expect_ltx2_i2v, size=(32, 32), frames=9),
    "ltx2_i2v first": Case(
        {"video": "video", "first_frame": "image"}, expect_ltx2_i2v, size=(32, 32), frames=9
    ),
}


def open_pictures(media: Mapping[str, Any], number: int, columns: Mapping[str, str]) -> dict[str, Any]:
    """Open the pictures and frames of a row."""
    from PIL import Image

    folder, media_of_row = Path(media["source"]).parent, {}
    for name, kind in columns.items():
        path = folder / f"{name}-{number}"
        files = [path.with_suffix(".png")] if kind == "image" else sorted(path.iterdir())
        opened = [Image.open(file) for file in files]
        media_of_row[name] = opened[0] if kind == "image" else opened
    return media_of_row


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_cached_items_equal_the_inputs_of_the_pipeline(name: str, tmp_path: Path) -> None:
    case, rows = CASES[name], 5
    if name.startswith(("wan_i2v", "wan_vace")):
        pytest.importorskip("ftfy", reason="diffusers' pipelines of these classes need it")
    pipeline = save_pipeline(name.partition(" ")[0], tmp_path / "pipeline")
    media = write_media(tmp_path / "media", case.columns, [case.size] * rows, case.frames)
    media["columns"] = {**dict.fromkeys(case.columns), **(case.column_options or {})}
    media["columns"] = {column: value or column for column, value in media["columns"].items()}
    length = 512 if name.startswith("wan_i2v") else 12 if name.startswith("wan") else 24
    for ranks in (1, 2, 3):
        values = make_config(pipeline, media, tmp_path / f"out{ranks}", max_sequence_length=length)
        assert len(set(run_ranks(make_cache, ranks, values))) == 1
    files = read_cache(tmp_path / "out1" / "cache")
    assert read_cache(tmp_path / "out2" / "cache") == files
    assert read_cache(tmp_path / "out3" / "cache") == files
    pipe = diffusers.DiffusionPipeline.from_pretrained(str(pipeline))
    for number, item in enumerate(CachedItems(tmp_path / "out1" / "cache")):
        expected = case.expected(pipe, PROMPTS[number], open_pictures(media, number, case.columns), number)
        assert item.keys() == expected.keys()
        different = {
            key: (item[key].shape, value.shape)
            for key, value in expected.items()
            if not torch.equal(item[key], value)
        }
        assert not different


class Processor:
    """Stand-in for transformers' processor, which needs torchvision."""

    def __init__(self) -> None:
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

        self.tokenizer = tiny.tokenizer(template=True)
        self.images = Qwen2VLImageProcessorPil(min_pixels=28 * 28, max_pixels=28 * 28 * 4)

    def __call__(self, text: list[str], images: Any, padding: bool, return_tensors: str) -> Any:
        from transformers import BatchFeature

        pixels = self.images(images=images, return_tensors="pt")
        (words,) = self.tokenizer([text[0].replace("<|image_pad|>", " ")])["input_ids"]
        counts = (pixels["image_grid_thw"].prod(1) // self.images.merge_size**2).tolist()
        image_tokens = [token for count in counts for token in (VISION_START, *[IMAGE_PAD] * count)]
        ids = torch.tensor([[*words, *image_tokens]])
        batch = {**pixels, "input_ids": ids, "attention_mask": torch.ones_like(ids)}
        return BatchFeature(batch)


IMAGE_PAD, VISION_START = tiny.VOCABULARY - 1, tiny.VOCABULARY - 2


def build_edit_pipeline(kind: str) -> Any:
    parts = dict(tiny.qwen_image().components)
    config = parts["text_encoder"].config
    config.image_token_id, config.vision_start_token_id = IMAGE_PAD, VISION_START
    torch.manual_seed(7)
    parts["text_encoder"] = type(parts["text_encoder"])(config).eval()
    return getattr(diffusers, kind)(**parts, processor=Processor())


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "count"), [("QwenImageEditPipeline", 1), ("QwenImageEditPlusPipeline", 2)])
@torch.no_grad()
def test_editing_of_qwen_image(kind: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pipelines scale edited pictures to an area that is small here."""
    for module in ("edit", "edit_plus"):
        full = importlib.import_module(f"diffusers.pipelines.qwenimage.pipeline_qwenimage_{module}")
        calculate = full.calculate_dimensions
        monkeypatch.setattr(full, "calculate_dimensions", lambda area, ratio, c=calculate: c(32 * 32, ratio))
    pipe = build_edit_pipeline(kind)
    pictures = [make_picture(32, 32, seed) for seed in range(count + 1)]
    tensors = [torch.from_numpy(np.array(image)).permute(2, 0, 1) for image in pictures]
    encoder = encoder_class(kind)(pipe, CacheConfig())
    example = {"prompt": "a cat", "image": tensors[0], "edit_image": tensors[1:]}
    encoder.check(example)
    item = encoder.encode(example, make_rng(0))
    call = {"prompt": "a cat", "height": 32, "width": 32, "max_sequence_length": 512}
    _, inputs = capture(pipe, image=pictures[1:] if count > 1 else pictures[1], **call)
    assert torch.equal(item["prompt_embeds"], inputs["encoder_hidden_states"][0])
    assert item["prompt_embeds_mask"].all()
    sampled = encoder.sample("a cat", pictures[1:])["prompt_embeds"]
    assert torch.equal(sampled, inputs["encoder_hidden_states"][0])
    latents = [item[f"image_latents.{n}"] for n in range(count)]
    packed = [pipe._pack_latents(latent[None], 1, *latent.shape) for latent in latents]
    tokens = inputs["hidden_states"].shape[1] - sum(latent.shape[1] for latent in packed)
    assert torch.equal(inputs["hidden_states"][:, tokens:], torch.cat(packed, dim=1))
    assert item["latents"].shape == latents[0].shape
