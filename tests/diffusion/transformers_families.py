"""Trainable models of DiffSynth-Studio's own classes."""

from typing import Any

import torch

from tests.diffusion.family import Family, add_prefix, noise
from tests.diffusion.shrink import lazy_class

WAN: dict[str, Any] = {
    "dim": 24,
    "in_dim": 4,
    "ffn_dim": 32,
    "out_dim": 4,
    "text_dim": 16,
    "freq_dim": 64,
    "eps": 1e-6,
    "patch_size": (1, 2, 2),
    "num_heads": 2,
    "num_layers": 2,
    "has_image_input": False,
}


def call_wan(model: Any, **changes: Any) -> Any:
    """Call the model part by part, as the pipeline's function does."""
    from diffsynth.pipelines.wan_video import model_fn_wan_video

    inputs = {"latents": noise(1, 4, 3, 4, 4), "timestep": torch.tensor([500.0]), "context": noise(1, 6, 16)}
    return model_fn_wan_video(model, **{**inputs, **changes})


def call_vace(model: Any) -> Any:
    from diffsynth.models.wan_video_dit import precompute_freqs_cis_3d

    f, h, w = (part[:2] for part in precompute_freqs_cis_3d(12))
    shapes = ((2, 1, 1), (1, 2, 1), (1, 1, 2))
    parts = [p.view(*s, -1).expand(2, 2, 2, -1) for p, s in zip((f, h, w), shapes, strict=True)]
    freqs = torch.cat(parts, dim=-1).reshape(8, 1, -1)
    return model(noise(1, 8, 24), [noise(6, 2, 4, 4)], noise(1, 6, 24), noise(1, 6, 24), freqs)


def call_qwen_dit(model: Any) -> Any:
    from diffsynth.pipelines.qwen_image import model_fn_qwen_image

    return model_fn_qwen_image(
        dit=model,
        latents=noise(1, 16, 4, 4),
        timestep=torch.tensor([500.0]),
        prompt_emb=noise(1, 5, 24),
        prompt_emb_mask=torch.ones(1, 5, dtype=torch.long),
        height=32,
        width=32,
        edit_latents=[noise(1, 16, 4, 4, seed=6), noise(1, 16, 2, 4, seed=7)],
    )


def call_flux_dit(model: Any) -> Any:
    from diffsynth.pipelines.flux_image import model_fn_flux_image

    return model_fn_flux_image(
        dit=model,
        latents=noise(1, 16, 4, 4),
        timestep=torch.tensor([500.0]),
        prompt_emb=noise(1, 5, 24),
        pooled_prompt_emb=noise(1, 12),
        guidance=torch.tensor([3.5]),
        text_ids=torch.zeros(1, 5, 3),
        image_ids=torch.zeros(1, 4, 3),
    )


def call_flux2_dit(model: Any) -> Any:
    guidance = torch.tensor([3.0]) if model.time_guidance_embed.guidance_embedder is not None else None
    return model(
        noise(1, 4, 8),
        encoder_hidden_states=noise(1, 5, 24),
        timestep=torch.tensor([0.5]),
        img_ids=torch.zeros(1, 4, 4),
        txt_ids=torch.zeros(1, 5, 4),
        guidance=guidance,
    )


def call_z_image(model: Any) -> Any:
    from diffsynth.pipelines.z_image import model_fn_z_image

    half = torch.bfloat16  # the dtype of its timesteps, whatever that of the weights is
    return model_fn_z_image(
        model,
        latents=noise(1, 4, 4, 4).to(half),
        timestep=torch.tensor([400.0]).to(half),
        prompt_embeds=noise(5, 16).to(half),
    )


FLUX = {3072: 256, 24: 2, 768: 12, 4096: 24, 38: 1, 19: 1}
Z_IMAGE = {
    "in_channels": 4,
    "dim": 32,
    "n_layers": 1,
    "n_refiner_layers": 1,
    "n_heads": 2,
    "n_kv_heads": 2,
    "cap_feat_dim": 16,
    "axes_dims": [8, 4, 4],
    "axes_lens": [64, 32, 32],
}
FLUX2 = {
    "in_channels": 8,
    "num_layers": 1,
    "num_single_layers": 1,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "joint_attention_dim": 24,
    "axes_dims_rope": (4, 4, 4, 4),
}
_DIT = lazy_class("wan_video_dit:WanModel")
_TI2V: dict[str, Any] = {
    **WAN,
    "seperated_timestep": True,
    "require_clip_embedding": False,
    "require_vae_embedding": False,
    "fuse_vae_embedding_in_latents": True,
}
_WAN_CONVERTER = "wan_video_dit:WanVideoDiTStateDictConverter"

TRANSFORMERS: dict[str, Family] = {
    "wan2.1 t2v": Family(_DIT, call_wan, WAN, add_prefix("model."), _WAN_CONVERTER, trained=True),
    "wan2.1 vace": Family(
        lazy_class("wan_video_vace:VaceWanModel"),
        call_vace,
        {"vace_layers": (0, 1), "vace_in_dim": 6, "dim": 24, "num_heads": 2, "ffn_dim": 32},
        add_prefix("", ("blocks.0.of.the.transformer",)),
        "wan_video_vace:VaceWanModelDictConverter",
        trained=True,
    ),
    "wan2.2 5b": Family(_DIT, lambda m: call_wan(m, fuse_vae_embedding_in_latents=True), _TI2V, trained=True),
    "qwen-image": Family(
        lazy_class("qwen_image_dit:QwenImageDiT", {3072: 256, 24: 2, 3584: 24}),
        call_qwen_dit,
        {"num_layers": 1},
        trained=True,
    ),
    "flux.1": Family(lazy_class("flux_dit:FluxDiT", FLUX), call_flux_dit, {"num_blocks": 1}, trained=True),
    "flux.2 klein": Family(
        lazy_class("flux2_dit:Flux2DiT"), call_flux2_dit, {**FLUX2, "guidance_embeds": False}, trained=True
    ),
    "z-image": Family(
        lazy_class("z_image_dit:ZImageDiT"),
        call_z_image,
        Z_IMAGE,
        add_prefix("model.diffusion_model."),
        "z_image_dit:ZImageDiTStateDictConverter",
        dtype=torch.bfloat16,
        trained=True,
    ),
}
