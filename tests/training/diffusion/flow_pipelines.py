"""Tiny pipelines of diffusers: transformer, VAE and scheduler, with texts as embeddings."""

from pathlib import Path
from typing import Any

import torch

from tests.diffusion.components import COMPONENTS
from tests.training.diffusion.flow_items import build_transformer, make_examples, noise

#: Pipeline, VAE with changes of its configuration, scheduler, and picture size of each family.
_EULER = "FlowMatchEulerDiscreteScheduler"
PIPELINES: dict[str, tuple[str, str, dict[str, Any], str, dict[str, Any]]] = {
    "wan": ("WanPipeline", "wan2.1 vae", {}, "UniPCMultistepScheduler", {"height": 32, "num_frames": 9}),
    "qwen-image": ("QwenImagePipeline", "qwen-image vae", {}, _EULER, {"height": 64}),
    "flux": (
        "FluxPipeline",
        "flux.1 vae",
        {"latent_channels": 1, "shift_factor": 0.1},
        _EULER,
        {"height": 16},
    ),
    "flux2": ("Flux2Pipeline", "flux.2 vae", {"latent_channels": 1}, _EULER, {"height": 16}),
    "z-image": (
        "ZImagePipeline",
        "flux.1 vae",
        {"latent_channels": 16, "shift_factor": 0.1},
        _EULER,
        {"height": 16},
    ),
    "hunyuan-video": (
        "HunyuanVideoPipeline",
        "hunyuan-video vae",
        {},
        _EULER,
        {"height": 32, "num_frames": 5},
    ),
}


def save_pipeline(folder: Path, family: str) -> Path:
    import diffusers

    kind, vae, changes, scheduler, _ = PIPELINES[family]
    flow = {"use_flow_sigmas": True, "prediction_type": "flow_prediction"} if family == "wan" else {}
    torch.manual_seed(11)
    component = COMPONENTS[vae]
    parts = {
        "transformer": build_transformer(family),
        "vae": component.find_class()(**{**component.config, **changes}),
        "scheduler": getattr(diffusers, scheduler)(**flow),
    }
    getattr(diffusers, kind)(**parts, **_absent_components(family)).save_pretrained(folder)
    return folder


def _absent_components(family: str) -> dict[str, None]:
    two = family in ("flux", "hunyuan-video")
    names = ["text_encoder", "tokenizer", *(["text_encoder_2", "tokenizer_2"] if two else [])]
    extra = ["image_encoder", "feature_extractor"] if family == "flux" else []
    return dict.fromkeys([*names, *extra])


def draw_with_pipeline(
    folder: Any, family: str, weights: dict[str, torch.Tensor] | None = None
) -> torch.Tensor:
    """Draw with the pipeline in ``folder``, and with other ``weights`` if given."""
    import diffusers

    kind, _, _, _, size = PIPELINES[family]
    pipe = getattr(diffusers, kind).from_pretrained(folder, **_absent_components(family))
    if weights is not None:
        pipe.transformer.load_state_dict(weights)
    pipe.set_progress_bar_config(disable=True)
    item = make_examples(family, 1)[0]
    text = item["prompt_embeds"]
    inputs: dict[str, Any] = {"prompt_embeds": [text] if family == "z-image" else text[None]}
    if family == "hunyuan-video":
        inputs["prompt_attention_mask"] = item["prompt_attention_mask"][None]
    if family in ("flux", "hunyuan-video"):
        inputs["pooled_prompt_embeds"] = item["pooled_prompt_embeds"][None]
    if family == "wan":
        inputs["negative_prompt_embeds"] = noise(*text.shape, seed=77)[None]
    if family == "z-image":
        inputs["negative_prompt_embeds"] = [noise(4, 16, seed=77)]
    result = pipe(
        **inputs,
        **size,
        width=size["height"],
        num_inference_steps=3,
        generator=torch.Generator().manual_seed(5),
        output_type="pt",
    )
    return result.frames if "num_frames" in size else result.images
