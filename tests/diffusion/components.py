"""Small components of diffusers and transformers, by pipeline family."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True)
class Component:
    """Class of a small model in ``library``, its configuration, and a forward call."""

    kind: str
    config: Mapping[str, Any]
    call: Callable[[Any], Any]
    trained: bool = False
    library: str = "diffusers"

    def build(self) -> nn.Module:
        kind = self.find_class()
        if self.library == "diffusers":
            model: nn.Module = kind(**self.config)
        else:
            model = kind(kind.config_class(**self.config))
        return model

    def find_class(self) -> Any:
        import importlib

        return getattr(importlib.import_module(self.library), self.kind)


def noise(*shape: int, seed: int = 5) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def call_wan(model: Any, **options: Any) -> Any:
    image_embeds = {"encoder_hidden_states_image": noise(1, 5, 13)} if model.config.image_dim else {}
    latents = noise(1, model.config.in_channels, 3, 4, 4)
    return model(latents, torch.tensor([500]), noise(1, 6, 16), **image_embeds, **options, return_dict=False)


def call_wan_with_token_times(model: Any) -> Any:
    """Call with one timestep per token, as Wan2.2 5B does for image-to-video."""
    times = torch.arange(12).mul(80)[None]
    return model(noise(1, 4, 3, 4, 4), times, noise(1, 6, 16), return_dict=False)


def call_vace(model: Any) -> Any:
    return call_wan(
        model, control_hidden_states=noise(1, 6, 3, 4, 4), control_hidden_states_scale=torch.ones(2)
    )


def call_qwen(model: Any) -> Any:
    return model(
        noise(1, 16, 16),
        timestep=torch.tensor([0.5]),
        encoder_hidden_states=noise(1, 8, 16),
        encoder_hidden_states_mask=torch.ones(1, 8),
        img_shapes=[(1, 4, 4)],
        return_dict=False,
    )


def call_qwen_edit(model: Any) -> Any:
    """Call with two edit images, as Qwen-Image-Edit-2509."""
    return model(
        noise(1, 40, 16),
        timestep=torch.tensor([0.5]),
        encoder_hidden_states=noise(1, 8, 16),
        encoder_hidden_states_mask=torch.ones(1, 8),
        img_shapes=[[(1, 4, 4), (1, 4, 4), (1, 2, 4)]],
        return_dict=False,
    )


def call_flux(model: Any) -> Any:
    return model(
        noise(1, 16, 4),
        encoder_hidden_states=noise(1, 8, 32),
        pooled_projections=noise(1, 32),
        timestep=torch.tensor([0.5]),
        img_ids=torch.zeros(16, 3),
        txt_ids=torch.zeros(8, 3),
        guidance=torch.ones(1),
        return_dict=False,
    )


def call_flux2(model: Any) -> Any:
    guidance = torch.ones(1) if model.config.guidance_embeds else None
    return model(
        noise(1, 16, 4),
        encoder_hidden_states=noise(1, 8, 32),
        timestep=torch.tensor([0.5]),
        img_ids=torch.zeros(1, 16, 4),
        txt_ids=torch.zeros(1, 8, 4),
        guidance=guidance,
        return_dict=False,
    )


def call_z_image(model: Any) -> Any:
    return model([noise(16, 1, 8, 8)], torch.tensor([0.4]), [noise(6, 16)], return_dict=False)


def call_hunyuan_video(model: Any) -> Any:
    return model(
        noise(1, 4, 3, 4, 4),
        timestep=torch.tensor([500.0]),
        encoder_hidden_states=noise(1, 6, 16),
        encoder_attention_mask=torch.tensor([[1, 1, 1, 1, 0, 0]]),
        pooled_projections=noise(1, 20),
        guidance=torch.tensor([6000.0]),
        return_dict=False,
    )


def call_ltx2(model: Any) -> Any:
    """Call with video and audio latents, which attend to each other."""
    mask = torch.tensor([[1, 1, 1, 1, 1, 0]])
    return model(
        noise(1, 12, 4),
        noise(1, 5, 4),
        encoder_hidden_states=noise(1, 6, 16),
        audio_encoder_hidden_states=noise(1, 6, 16, seed=6),
        timestep=torch.tensor([500.0]),
        sigma=torch.tensor([500.0]),
        encoder_attention_mask=mask,
        audio_encoder_attention_mask=mask,
        num_frames=3,
        height=2,
        width=2,
        audio_num_frames=5,
        return_dict=False,
    )


def make_video_call(depth: int, latent: int, channels: int = 3) -> Callable[[Any], Any]:
    """Return a call that encodes 9 and 33 frames and decodes 3 and 9."""

    def call(vae: Any) -> Any:
        encoded = [vae.encode(noise(1, channels, t, 16, 16, seed=t)).latent_dist.mode() for t in (9, 33)]
        decoded = [vae.decode(noise(1, depth, t, latent, latent, seed=t)).sample for t in (3, 9)]
        return [*encoded, *decoded]

    return call


def make_image_call(depth: int, latent: int) -> Callable[[Any], Any]:
    def call(vae: Any) -> Any:
        encoded = [vae.encode(noise(1, 3, 16, 16, seed=s)).latent_dist.mode() for s in (1, 2)]
        return [*encoded, vae.decode(noise(1, depth, latent, latent)).sample]

    return call


def call_text_encoder(model: Any) -> Any:
    ids = torch.tensor([[3, 7, 11, 2, 1]])
    result = model(input_ids=ids, attention_mask=torch.ones_like(ids), output_hidden_states=True)
    return list(result.hidden_states)


def call_clip(model: Any) -> Any:
    """Return the last hidden state and the pooled output, which FLUX.1 uses."""
    ids = torch.tensor([[3, 7, 11, 2, 1]])
    result = model(input_ids=ids, attention_mask=torch.ones_like(ids))
    return [result.last_hidden_state, result.pooler_output]


_WAN: dict[str, Any] = {
    "patch_size": (1, 2, 2),
    "num_attention_heads": 2,
    "attention_head_dim": 12,
    "in_channels": 4,
    "out_channels": 4,
    "text_dim": 16,
    "freq_dim": 64,
    "ffn_dim": 32,
    "num_layers": 2,
    "cross_attn_norm": True,
    "qk_norm": "rms_norm_across_heads",
    "rope_max_seq_len": 32,
}
_FLUX: dict[str, Any] = {
    "patch_size": 1,
    "in_channels": 4,
    "num_layers": 1,
    "num_single_layers": 1,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "joint_attention_dim": 32,
}
_FLUX2: dict[str, Any] = {**_FLUX, "axes_dims_rope": (4, 4, 4, 4)}
_QWEN: dict[str, Any] = {
    "patch_size": 2,
    "in_channels": 16,
    "out_channels": 4,
    "num_layers": 2,
    "attention_head_dim": 16,
    "num_attention_heads": 4,
    "joint_attention_dim": 16,
    "axes_dims_rope": (8, 4, 4),
}
_VAE: dict[str, Any] = {
    "base_dim": 8,
    "z_dim": 4,
    "dim_mult": [1, 2, 4, 4],
    "num_res_blocks": 1,
    "temperal_downsample": [False, True, True],
    "latents_mean": [0.0] * 4,
    "latents_std": [1.0] * 4,
}
_IMAGE_VAE: dict[str, Any] = {
    "down_block_types": ("DownEncoderBlock2D",) * 2,
    "up_block_types": ("UpDecoderBlock2D",) * 2,
    "block_out_channels": (8, 8),
    "latent_channels": 4,
    "norm_num_groups": 4,
    "layers_per_block": 1,
}
_TEXT: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 24,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 12,
    "max_position_embeddings": 64,
}
_ROPE = {"type": "default", "rope_type": "default", "mrope_section": [2, 2, 2], "rope_theta": 10000.0}
_T5: dict[str, Any] = {
    "vocab_size": 61,
    "d_model": 24,
    "d_kv": 12,
    "d_ff": 32,
    "num_layers": 2,
    "num_heads": 2,
    "feed_forward_proj": "gated-gelu",
}


def _text(kind: str, config: Mapping[str, Any], call: Callable[[Any], Any] = call_text_encoder) -> Component:
    return Component(kind, config, call, library="transformers")


COMPONENTS: dict[str, Component] = {
    "wan2.1 t2v": Component("WanTransformer3DModel", _WAN, call_wan, trained=True),
    "wan2.1 i2v": Component(
        "WanTransformer3DModel",
        {**_WAN, "in_channels": 8, "image_dim": 13, "added_kv_proj_dim": 24},
        call_wan,
        trained=True,
    ),
    "wan2.1 vace": Component(
        "WanVACETransformer3DModel",
        {**_WAN, "vace_layers": [0, 1], "vace_in_channels": 6},
        call_vace,
        trained=True,
    ),
    "wan2.2 5b": Component("WanTransformer3DModel", _WAN, call_wan_with_token_times, trained=True),
    "wan2.1 vae": Component("AutoencoderKLWan", _VAE, make_video_call(4, 2)),
    "wan2.2 vae": Component(
        "AutoencoderKLWan",
        {
            **_VAE,
            "is_residual": True,
            "decoder_base_dim": 8,
            "in_channels": 12,
            "out_channels": 12,
            "patch_size": 2,
            "scale_factor_spatial": 16,
        },
        make_video_call(4, 1),
    ),
    "umt5": _text("UMT5EncoderModel", _T5),
    "qwen-image": Component("QwenImageTransformer2DModel", _QWEN, call_qwen, trained=True),
    "qwen-image-edit": Component("QwenImageTransformer2DModel", _QWEN, call_qwen_edit, trained=True),
    "qwen-image vae": Component("AutoencoderKLQwenImage", _VAE, make_video_call(4, 2)),
    "qwen2.5-vl": _text(
        "Qwen2_5_VLForConditionalGeneration",
        {
            "text_config": {**_TEXT, "rope_scaling": _ROPE},
            "vision_config": {
                "depth": 1,
                "hidden_size": 16,
                "intermediate_size": 24,
                "num_heads": 2,
                "out_hidden_size": 24,
            },
        },
    ),
    "flux.1": Component(
        "FluxTransformer2DModel",
        {**_FLUX, "pooled_projection_dim": 32, "axes_dims_rope": (4, 4, 8), "guidance_embeds": True},
        call_flux,
        trained=True,
    ),
    "flux.1 vae": Component("AutoencoderKL", _IMAGE_VAE, make_image_call(4, 8)),
    "clip": _text(
        "CLIPTextModel",
        {
            "vocab_size": 61,
            "hidden_size": 24,
            "intermediate_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "max_position_embeddings": 16,
        },
        call_clip,
    ),
    "t5": _text("T5EncoderModel", _T5),
    "flux.2 dev": Component("Flux2Transformer2DModel", _FLUX2, call_flux2, trained=True),
    "flux.2 klein": Component(
        "Flux2Transformer2DModel", {**_FLUX2, "guidance_embeds": False}, call_flux2, trained=True
    ),
    "flux.2 vae": Component("AutoencoderKLFlux2", _IMAGE_VAE, make_image_call(4, 8)),
    "mistral3": _text(
        "Mistral3ForConditionalGeneration",
        {
            "text_config": {**_TEXT, "model_type": "mistral"},
            "vision_config": {
                "model_type": "pixtral",
                "hidden_size": 16,
                "intermediate_size": 24,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "image_size": 28,
            },
        },
    ),
    "z-image": Component(
        "ZImageTransformer2DModel",
        {
            "all_patch_size": (2,),
            "all_f_patch_size": (1,),
            "in_channels": 16,
            "dim": 32,
            "n_layers": 1,
            "n_refiner_layers": 1,
            "n_heads": 2,
            "n_kv_heads": 2,
            "cap_feat_dim": 16,
            "axes_dims": [8, 4, 4],
            "axes_lens": [256, 32, 32],
        },
        call_z_image,
        trained=True,
    ),
    "qwen3": _text("Qwen3ForCausalLM", _TEXT),
    "hunyuan-video": Component(
        "HunyuanVideoTransformer3DModel",
        {
            "in_channels": 4,
            "out_channels": 4,
            "num_attention_heads": 2,
            "attention_head_dim": 12,
            "num_layers": 1,
            "num_single_layers": 1,
            "num_refiner_layers": 1,
            "text_embed_dim": 16,
            "pooled_projection_dim": 20,
            "rope_axes_dim": (4, 4, 4),
        },
        call_hunyuan_video,
        trained=True,
    ),
    "hunyuan-video vae": Component(
        "AutoencoderKLHunyuanVideo",
        {
            "latent_channels": 4,
            "block_out_channels": (4, 4, 8, 8),
            "layers_per_block": 1,
            "norm_num_groups": 2,
        },
        make_video_call(4, 2),
    ),
    "ltx-2": Component(
        "LTX2VideoTransformer3DModel",
        {
            "in_channels": 4,
            "out_channels": 4,
            "num_attention_heads": 2,
            "attention_head_dim": 12,
            "cross_attention_dim": 24,
            "audio_in_channels": 4,
            "audio_out_channels": 4,
            "audio_num_attention_heads": 2,
            "audio_attention_head_dim": 8,
            "audio_cross_attention_dim": 16,
            "num_layers": 2,
            "caption_channels": 16,
        },
        call_ltx2,
        trained=True,
    ),
    "ltx-2 vae": Component(
        "AutoencoderKLLTX2Video",
        {
            "latent_channels": 4,
            "block_out_channels": (8, 8, 8, 8),
            "decoder_block_out_channels": (8, 16, 32),
            "layers_per_block": (1,) * 5,
            "decoder_layers_per_block": (1,) * 4,
            "decoder_causal": False,
            "patch_size": 2,
            "spatial_compression_ratio": 16,
            "temporal_compression_ratio": 8,
        },
        make_video_call(4, 1),
    ),
}
