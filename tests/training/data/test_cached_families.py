"""Every family: the same bytes on one, two and three ranks, and what diffusers feeds its transformer."""

import importlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch

from tests.integrations.pipelines import tiny_pipelines as tiny
from tests.ranks import run_ranks
from tests.training.data.encoded import PROMPTS, bytes_of, configured, make, picture, write_media
from zerostart.distributed.world import current_world
from zerostart.training.config.configuration import CacheConfig
from zerostart.training.config.load import parse_config
from zerostart.training.data.cache import ensure_cache
from zerostart.training.data.cached import CachedItems
from zerostart.training.diffusion.families import encoder_class


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """As encoders compute on a CPU: bits depend on it."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def cached(values: dict[str, Any]) -> str:
    return ensure_cache(parse_config(values), current_world()).digest()


class Fed(Exception):
    """The transformer was about to be called."""


def fed(pipe: Any, **call: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of the first call of a pipeline's transformer."""
    found: list[Any] = []

    def note(module: Any, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        found.extend((given, named))
        raise Fed

    handle = pipe.transformer.register_forward_pre_hook(note, with_kwargs=True)
    pipe.set_progress_bar_config(disable=True)
    with pytest.raises(Fed):
        pipe(num_inference_steps=2, generator=torch.Generator().manual_seed(1), **call)
    handle.remove()
    return found[0], found[1]


Row = Mapping[str, Any]


def drawn(number: int) -> torch.Generator:
    import hashlib

    seed = hashlib.blake2b(f"0 {number}".encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(seed, "little") >> 1)


@dataclass(frozen=True)
class Case:
    """A family: its columns, the size of all its media, and what its pipeline makes of a row."""

    columns: Mapping[str, str]
    expected: Callable[[Any, str, Row, int], Mapping[str, torch.Tensor]]
    size: tuple[int, int] = (16, 16)
    sizes: Mapping[str, Any] | None = None
    frames: int = 5


def wan_latents(pipe: Any, video: list[Any], number: int) -> torch.Tensor:
    pixels = pipe.video_processor.preprocess_video(video)
    shape = (1, -1, 1, 1, 1)
    mean, std = (
        torch.tensor(getattr(pipe.vae.config, f"latents_{name}")).view(shape) for name in ("mean", "std")
    )
    return (pipe.vae.encode(pixels).latent_dist.sample(drawn(number)) - mean) * (1.0 / std)


WAN = {"height": 16, "width": 16, "num_frames": 5, "guidance_scale": 1.0, "max_sequence_length": 12}
WAN_I2V = {**WAN, "max_sequence_length": 512}  # its attention knows no other length


def wan(pipe: Any, prompt: str, row: Row, number: int) -> Mapping[str, torch.Tensor]:
    _, given = fed(pipe, prompt=prompt, **WAN)
    latents = wan_latents(pipe, row["video"], number)[0]
    return {"latents": latents, "prompt_embeds": given["encoder_hidden_states"][0]}


def wan_i2v(pipe: Any, prompt: str, row: Row, number: int) -> Mapping[str, torch.Tensor]:
    last = {"last_image": row["last_frame"]} if "last_frame" in row else {}
    _, given = fed(pipe, image=row.get("first_frame", row["video"][0]), prompt=prompt, **last, **WAN_I2V)
    return {
        "latents": wan_latents(pipe, row["video"], number)[0],
        "prompt_embeds": given["encoder_hidden_states"][0],
        "condition": given["hidden_states"][0, 4:],
        "image_embeds": given["encoder_hidden_states_image"].flatten(0, 1),
    }


def wan_vace(pipe: Any, prompt: str, row: Row, number: int) -> Mapping[str, torch.Tensor]:
    references = row.get("reference_image", [])
    more = {"reference_images": references} if references else {}
    _, given = fed(pipe, prompt=prompt, video=row["control_video"], mask=row["control_mask"], **more, **WAN)
    latents = wan_latents(pipe, row["video"], number)[0]
    shape, config = (1, -1, 1, 1, 1), pipe.vae.config
    mean, std = (torch.tensor(getattr(config, f"latents_{name}")).view(shape) for name in ("mean", "std"))
    for reference in references:
        kept = pipe.vae.encode(pipe.video_processor.preprocess_video([reference])).latent_dist.mode()
        latents = torch.cat([((kept - mean) * (1.0 / std))[0], latents], dim=1)
    return {
        "latents": latents,
        "prompt_embeds": given["encoder_hidden_states"][0],
        "control_latents": given["control_hidden_states"][0],
    }


IMAGE = {"height": 16, "width": 16, "max_sequence_length": 24}


def qwen_image(pipe: Any, prompt: str, row: Row, number: int) -> Mapping[str, torch.Tensor]:
    _, given = fed(pipe, prompt=prompt, **IMAGE)
    other = diffusers.QwenImageImg2ImgPipeline(**pipe.components)
    pixels = other.image_processor.preprocess(row["image"]).unsqueeze(2)
    embeds = given["encoder_hidden_states"][0]
    return {
        "latents": other._encode_vae_image(pixels, drawn(number))[0, :, 0],
        "prompt_embeds": embeds,
        "prompt_embeds_mask": torch.ones(len(embeds), dtype=torch.long),
    }


def flux(pipe: Any, prompt: str, row: Row, number: int, **more: Any) -> Mapping[str, torch.Tensor]:
    _, given = fed(pipe, prompt=prompt, **IMAGE, **more)
    parts = {
        name: part
        for name, part in pipe.components.items()
        if name not in ("image_encoder", "feature_extractor")
    }
    other = diffusers.FluxImg2ImgPipeline(**parts)
    latents = other._encode_vae_image(other.image_processor.preprocess(row["image"]), drawn(number))[0]
    found = {
        "latents": latents,
        "prompt_embeds": given["encoder_hidden_states"][0],
        "pooled_prompt_embeds": given["pooled_projections"][0],
    }
    if more:
        height, width = latents.shape[1:]
        tokens = given["hidden_states"][:, height * width // 4 :]
        factor = pipe.vae_scale_factor
        found["image_latents.0"] = pipe._unpack_latents(tokens, height * factor, width * factor, factor)[0]
    return found


def flux_kontext(pipe: Any, prompt: str, row: Row, number: int) -> Mapping[str, torch.Tensor]:
    return flux(pipe, prompt, row, number, image=row["edit_image"], max_area=256, _auto_resize=False)


def flux2(pipe: Any, prompt: str, row: Row, number: int) -> Mapping[str, torch.Tensor]:
    call = {"height": 64, "width": 64, "max_sequence_length": 24, "guidance_scale": 1.0}
    _, given = fed(pipe, prompt=prompt, image=row["edit_image"], **call)
    posterior = pipe.vae.encode(pipe.image_processor.preprocess(row["image"])).latent_dist
    bn = pipe.vae.bn
    mean, std = bn.running_mean.view(1, -1, 1, 1), torch.sqrt(bn.running_var + pipe.vae.config.batch_norm_eps)
    patches = pipe._patchify_latents(posterior.sample(drawn(number)))
    latents = ((patches - mean) / std.view(1, -1, 1, 1))[0]
    height, width = latents.shape[1:]
    tokens = given["hidden_states"][0, height * width :].unflatten(0, (-1, height, width))
    others = {f"image_latents.{n}": one.permute(2, 0, 1) for n, one in enumerate(tokens)}
    return {"latents": latents, "prompt_embeds": given["encoder_hidden_states"][0], **others}


def z_image(pipe: Any, prompt: str, row: Row, number: int) -> Mapping[str, torch.Tensor]:
    given, _ = fed(pipe, prompt=prompt, guidance_scale=0.0, **IMAGE)
    pixels, config = pipe.image_processor.preprocess(row["image"]), pipe.vae.config
    sample = pipe.vae.encode(pixels).latent_dist.sample(drawn(number))
    return {
        "latents": ((sample - config.shift_factor) * config.scaling_factor)[0],
        "prompt_embeds": given[2][0],
    }


def hunyuan_video(pipe: Any, prompt: str, row: Row, number: int) -> Mapping[str, torch.Tensor]:
    call = {"height": 16, "width": 16, "num_frames": 5, "max_sequence_length": 24}
    _, given = fed(pipe, prompt=prompt, **call)
    posterior = pipe.vae.encode(pipe.video_processor.preprocess_video(row["video"])).latent_dist
    return {
        "latents": posterior.sample(drawn(number))[0] * pipe.vae.config.scaling_factor,
        "prompt_embeds": given["encoder_hidden_states"][0],
        "pooled_prompt_embeds": given["pooled_projections"][0],
        "prompt_attention_mask": given["encoder_attention_mask"][0].long(),
    }


def ltx2(pipe: Any, prompt: str, row: Row, number: int, **more: Any) -> Mapping[str, torch.Tensor]:
    call = {"height": 32, "width": 32, "num_frames": 9, "max_sequence_length": 24, **more}
    _, given = fed(pipe, prompt=prompt, guidance_scale=1.0, audio_guidance_scale=1.0, **call)
    vae = pipe.vae
    sample = vae.encode(pipe.video_processor.preprocess_video(row["video"])).latent_dist.sample(drawn(number))
    embeds = [given["encoder_hidden_states"], given["audio_encoder_hidden_states"]]
    return {
        "latents": pipe._normalize_latents(sample, vae.latents_mean, vae.latents_std)[0],
        "prompt_embeds": torch.cat(embeds, dim=-1)[0],
        "prompt_attention_mask": given["encoder_attention_mask"][0],
        "frame_rate": torch.tensor(given["fps"], dtype=torch.float64),
    }


def ltx2_i2v(pipe: Any, prompt: str, row: Row, number: int) -> Mapping[str, torch.Tensor]:
    """With the frame as it is: the pipeline compresses it as a video's first, unless it is told otherwise."""
    image = row.get("first_frame", row["video"][0])
    _, given = fed(pipe, prompt=prompt, image=image, guidance_scale=1.0, image_crf=0, **LTX2_I2V)
    frames, height, width = (given[name] for name in ("num_frames", "height", "width"))
    shown = pipe._unpack_latents(given["hidden_states"], frames, height, width)[0]
    made = ltx2(pipe, prompt, row, number, image=image, image_crf=0)
    return {**made, "condition": shown[:, :1]}


LTX2_I2V = {
    "audio_guidance_scale": 1.0,
    "height": 32,
    "width": 32,
    "num_frames": 9,
    "max_sequence_length": 24,
}
OWN = {"reference_image": {"kind": "images", "size": "item"}}
CASES = {
    "wan": Case({"video": "video"}, wan),
    "wan_i2v": Case({"video": "video"}, wan_i2v),
    "wan_i2v last": Case({"video": "video", "first_frame": "image", "last_frame": "image"}, wan_i2v),
    "wan_vace": Case({"video": "video", "control_video": "video", "control_mask": "video"}, wan_vace),
    "wan_vace reference": Case(
        {"video": "video", "control_video": "video", "control_mask": "video", "reference_image": "images"},
        wan_vace,
        sizes=OWN,
    ),
    "qwen_image": Case({"image": "image"}, qwen_image),
    "flux": Case({"image": "image"}, flux),
    "flux_kontext": Case(
        {"image": "image", "edit_image": "image"}, flux_kontext, sizes={"edit_image": {"kind": "images"}}
    ),
    "flux2_klein": Case({"image": "image", "edit_image": "images"}, flux2, size=(64, 64)),
    "z_image": Case({"image": "image"}, z_image),
    "hunyuan_video": Case({"video": "video"}, hunyuan_video),
    "ltx2": Case({"video": "video"}, ltx2, size=(32, 32), frames=9),
    "ltx2_i2v": Case({"video": "video"}, ltx2_i2v, size=(32, 32), frames=9),
    "ltx2_i2v first": Case({"video": "video", "first_frame": "image"}, ltx2_i2v, size=(32, 32), frames=9),
}


def pictures(media: Mapping[str, Any], number: int, columns: Mapping[str, str]) -> dict[str, Any]:
    """What the files of a row show."""
    from PIL import Image

    folder, found = Path(media["source"]).parent, {}
    for name, kind in columns.items():
        path = folder / f"{name}-{number}"
        files = [path.with_suffix(".png")] if kind == "image" else sorted(path.iterdir())
        shown = [Image.open(file) for file in files]
        found[name] = shown[0] if kind == "image" else shown
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_a_family_is_encoded_as_its_pipeline_does(name: str, tmp_path: Path) -> None:
    case, rows = CASES[name], 5
    if name.startswith(("wan_i2v", "wan_vace")):
        pytest.importorskip("ftfy", reason="diffusers' pipelines of these classes cannot do without it")
    pipeline = make(name.partition(" ")[0], tmp_path / "pipeline")
    media = write_media(tmp_path / "media", case.columns, [case.size] * rows, case.frames)
    media["columns"] = {**dict.fromkeys(case.columns), **(case.sizes or {})}
    media["columns"] = {column: value or column for column, value in media["columns"].items()}
    length = 512 if name.startswith("wan_i2v") else 12 if name.startswith("wan") else 24
    for ranks in (1, 2, 3):
        values = configured(pipeline, media, tmp_path / f"out{ranks}", max_sequence_length=length)
        assert len(set(run_ranks(cached, ranks, values))) == 1
    one = bytes_of(tmp_path / "out1" / "cache")
    assert bytes_of(tmp_path / "out2" / "cache") == one
    assert bytes_of(tmp_path / "out3" / "cache") == one
    pipe = diffusers.DiffusionPipeline.from_pretrained(str(pipeline))
    for number, item in enumerate(CachedItems(tmp_path / "out1" / "cache")):
        expected = case.expected(pipe, PROMPTS[number], pictures(media, number, case.columns), number)
        assert item.keys() == expected.keys()
        different = {
            key: (item[key].shape, value.shape)
            for key, value in expected.items()
            if not torch.equal(item[key], value)
        }
        assert not different


class Processor:
    """What pipelines of editing ask of transformers' processor, which is not there without torchvision."""

    def __init__(self) -> None:
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

        self.tokenizer = tiny.tokenizer(template=True)
        self.images = Qwen2VLImageProcessorPil(min_pixels=28 * 28, max_pixels=28 * 28 * 4)

    def __call__(self, text: list[str], images: Any, padding: bool, return_tensors: str) -> Any:
        from transformers import BatchFeature

        seen = self.images(images=images, return_tensors="pt")
        (words,) = self.tokenizer([text[0].replace("<|image_pad|>", " ")])["input_ids"]
        counts = (seen["image_grid_thw"].prod(1) // self.images.merge_size**2).tolist()
        shown = [token for count in counts for token in (VISION_START, *[IMAGE_PAD] * count)]
        ids = torch.tensor([[*words, *shown]])
        found = {**seen, "input_ids": ids, "attention_mask": torch.ones_like(ids)}
        return BatchFeature(found)


IMAGE_PAD, VISION_START = tiny.VOCABULARY - 1, tiny.VOCABULARY - 2


def edit_pipeline(kind: str) -> Any:
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
    """With the areas to which the pipelines scale what is edited as small as the pictures here."""
    for module in ("edit", "edit_plus"):
        full = importlib.import_module(f"diffusers.pipelines.qwenimage.pipeline_qwenimage_{module}")
        calculate = full.calculate_dimensions
        monkeypatch.setattr(full, "calculate_dimensions", lambda area, ratio, c=calculate: c(32 * 32, ratio))
    pipe = edit_pipeline(kind)
    pictures = [picture(32, 32, seed) for seed in range(count + 1)]
    as_bytes = [torch.from_numpy(np.array(one)).permute(2, 0, 1) for one in pictures]
    encoder = encoder_class(kind)(pipe, CacheConfig())
    example = {"prompt": "a cat", "image": as_bytes[0], "edit_image": as_bytes[1:]}
    encoder.check(example)
    found = encoder.encode(example, drawn(0))
    call = {"prompt": "a cat", "height": 32, "width": 32, "max_sequence_length": 512}
    _, given = fed(pipe, image=pictures[1:] if count > 1 else pictures[1], **call)
    assert torch.equal(found["prompt_embeds"], given["encoder_hidden_states"][0])
    assert found["prompt_embeds_mask"].all()
    sampled = encoder.sample("a cat", pictures[1:])["prompt_embeds"]
    assert torch.equal(sampled, given["encoder_hidden_states"][0])
    latents = [found[f"image_latents.{n}"] for n in range(count)]
    packed = [pipe._pack_latents(one[None], 1, *one.shape) for one in latents]
    tokens = given["hidden_states"].shape[1] - sum(one.shape[1] for one in packed)
    assert torch.equal(given["hidden_states"][:, tokens:], torch.cat(packed, dim=1))
    assert found["latents"].shape == latents[0].shape
