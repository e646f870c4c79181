"""Tiny pipelines with encoders, and tables of media to encode."""

import csv
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.conformance.checkpoints import randomise
from tests.integrations.pipelines import tiny_pipelines as tiny

PROMPTS = ("a cat sees the sea", "a cat", "the sea", "and a cat sleeps", "the cat and the sea sleeps")


def make_config(pipeline: Path, media: Mapping[str, Any] | None, out: Path, **cache: Any) -> dict[str, Any]:
    """Return the configuration of a run on ``media``, encoded by ``pipeline``."""
    values: dict[str, Any] = {
        "model": {"source": str(pipeline)},
        "task": {"name": "flow-matching"},
        "engine": {"name": "fsdp2"},
        "train": {"steps": 1},
        "output": {"directory": str(out)},
        "cache": cache,
    }
    return values if media is None else {**values, "media": media}


def make_picture(height: int, width: int, seed: int) -> Any:
    """Draw a smooth random picture."""
    from PIL import Image

    generator = np.random.default_rng(seed)
    small = Image.fromarray(generator.integers(0, 256, (4, 4, 3), dtype=np.uint8))
    return small.resize((width, height), Image.Resampling.BICUBIC)


def write_media(
    folder: Path, columns: Mapping[str, str], sizes: Sequence[tuple[int, int]], frames: int = 5
) -> dict[str, Any]:
    """Write a table with a row per size; ``columns`` maps names to kinds."""
    folder.mkdir(parents=True)
    rows = []
    for number, (height, width) in enumerate(sizes):
        row: dict[str, Any] = {"prompt": PROMPTS[number % len(PROMPTS)]}
        for position, (name, kind) in enumerate(columns.items()):
            seed = 100 * number + 10 * position
            row[name] = f"{name}-{number}" + (".png" if kind == "image" else "")
            if kind == "image":
                make_picture(height, width, seed).save(folder / row[name])
                continue
            count = frames if kind == "video" else 2
            names = [f"{row[name]}/{frame}.png" for frame in range(count)]
            (folder / row[name]).mkdir()
            for frame, file in enumerate(names):
                make_picture(height, width, seed + frame).save(folder / file)
            if kind == "images":
                row[name] = names
        rows.append(row)
    table = folder / "metadata.csv"
    if "images" in columns.values():
        table = folder / "metadata.json"
        table.write_text(json.dumps(rows))
    else:
        with table.open("w", newline="") as lines:
            writer = csv.DictWriter(lines, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    return {"source": str(table), "multiple_of": 16, "num_frames": frames}


def read_cache(directory: Path) -> dict[str, bytes]:
    """Read the files of a cache, without the time and id of the save."""
    files = {file.name: file.read_bytes() for file in sorted(directory.iterdir())}
    document = json.loads(files.get("zerostart.json", b"{}"))
    stable = {key: value for key, value in document.items() if key not in ("save", "saved_at_ns")}
    return files | {"zerostart.json": json.dumps(stable).encode()} if document else files


def save_pipeline(key: str, path: Path) -> Path:
    """Save a tiny pipeline with random weights at ``path``."""
    if key in tiny.FAMILIES:
        return tiny.make_pipeline(key, path)
    torch.manual_seed(5)
    pipeline = PIPELINES[key]()
    for part in pipeline.components.values():
        if isinstance(part, torch.nn.Module):
            randomise(part)
            for name, buffer in part.named_buffers():
                if name.endswith(("running_var", "latents_std")):
                    buffer.abs_()
    pipeline.save_pretrained(path)
    return path


def build_wan_vae() -> Any:
    return tiny.component(
        "wan_vae", z_dim=4, latents_mean=[0.5, 0.25, 0.1, 0], latents_std=[1.5, 1.25, 1.1, 1]
    )


def build_wan_i2v() -> Any:
    import diffusers
    from transformers import CLIPVisionConfig, CLIPVisionModel
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    return diffusers.WanImageToVideoPipeline(
        tokenizer=tiny.tokenizer(),
        text_encoder=tiny.umt5(),
        vae=build_wan_vae(),
        scheduler=tiny.scheduler(shift=3.0),
        image_processor=CLIPImageProcessorPil(size={"shortest_edge": 8}, crop_size={"height": 8, "width": 8}),
        image_encoder=CLIPVisionModel(CLIPVisionConfig(image_size=8, patch_size=4, **sizes)),
        transformer=tiny.component("wan_i2v", in_channels=12, out_channels=4, text_dim=16, image_dim=16),
    )


def build_ltx2_i2v() -> Any:
    import diffusers

    return diffusers.LTX2ImageToVideoPipeline(**tiny.ltx2().components)


def build_wan_vace() -> Any:
    import diffusers

    return diffusers.WanVACEPipeline(
        tokenizer=tiny.tokenizer(),
        text_encoder=tiny.umt5(),
        vae=build_wan_vae(),
        scheduler=tiny.scheduler(shift=3.0),
        transformer=tiny.component(
            "wan_vace", in_channels=4, out_channels=4, text_dim=16, vace_in_channels=72
        ),
    )


def build_flux_kontext() -> Any:
    import diffusers

    return diffusers.FluxKontextPipeline(
        **{
            name: part
            for name, part in tiny.flux().components.items()
            if name not in ("image_encoder", "feature_extractor")
        }
    )


def build_flux2_klein() -> Any:
    import diffusers
    from transformers import Qwen3Config, Qwen3ForCausalLM

    encoder = Qwen3Config(
        vocab_size=tiny.VOCABULARY,
        hidden_size=8,
        intermediate_size=12,
        num_hidden_layers=28,  # the pipeline takes the outputs of the 9th, the 18th and the 27th
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=4,
    )
    vae = tiny.component("flux2_vae", use_quant_conv=False, use_post_quant_conv=False)
    return diffusers.Flux2KleinPipeline(
        tokenizer=tiny.tokenizer(template=True),
        text_encoder=Qwen3ForCausalLM(encoder),
        vae=vae,
        scheduler=tiny.scheduler(use_dynamic_shifting=True),
        transformer=tiny.component(
            "flux2", in_channels=4 * vae.config.latent_channels, joint_attention_dim=24, guidance_embeds=False
        ),
    )


PIPELINES = {
    "wan_i2v": build_wan_i2v,
    "ltx2_i2v": build_ltx2_i2v,
    "wan_vace": build_wan_vace,
    "flux_kontext": build_flux_kontext,
    "flux2_klein": build_flux2_klein,
}
