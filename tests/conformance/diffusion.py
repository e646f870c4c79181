"""Small diffusers models of each family, with functions to the original layout."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.conformance import diffusion_layouts as layouts
from tests.conformance import diffusion_more as more
from tests.conformance.diffusion_layouts import State

UNET = "model.diffusion_model."


@dataclass(frozen=True)
class Family:
    """A class with a small configuration, and a function to the original state dict.

    ``explicit`` names the converter that users have to pass if diffusers registers none.
    """

    key: str
    kind: str
    config: Mapping[str, Any]
    original: Callable[[State], State]
    does: str
    prefix: str = ""
    explicit: str = ""
    note: str = ""
    quick: bool = field(default=False)


_WAN: Mapping[str, Any] = {
    "patch_size": [1, 2, 2],
    "num_attention_heads": 2,
    "attention_head_dim": 12,
    "in_channels": 4,
    "out_channels": 5,
    "text_dim": 15,
    "freq_dim": 26,
    "ffn_dim": 33,
    "num_layers": 2,
    "cross_attn_norm": True,
    "qk_norm": "rms_norm_across_heads",
    "rope_max_seq_len": 32,
}
_WAN_VAE: Mapping[str, Any] = {
    "base_dim": 3,
    "z_dim": 3,
    "dim_mult": [1, 2, 4, 4],
    "num_res_blocks": 2,
    "temperal_downsample": [False, True, True],
    "latents_mean": [0.5, 0.25, 0.125],
    "latents_std": [1.5, 1.25, 1.125],
}
_LDM_VAE: Mapping[str, Any] = {
    "down_block_types": ["DownEncoderBlock2D"] * 3,
    "up_block_types": ["UpDecoderBlock2D"] * 3,
    "block_out_channels": [6, 9, 15],
    "layers_per_block": 1,
    "latent_channels": 5,
    "norm_num_groups": 3,
}
_FLUX: Mapping[str, Any] = {
    "patch_size": 1,
    "in_channels": 5,
    "num_layers": 2,
    "num_single_layers": 2,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "joint_attention_dim": 21,
}
_SPLIT = "chunk, cat, renames"

FAMILIES: Sequence[Family] = (
    Family("wan", "WanTransformer3DModel", _WAN, layouts.wan, "renames", UNET, quick=True),
    Family(
        "wan_i2v",
        "WanTransformer3DModel",
        {**_WAN, "image_dim": 13, "added_kv_proj_dim": 24},
        layouts.wan,
        "renames",
    ),
    Family(
        "wan_vace",
        "WanVACETransformer3DModel",
        {**_WAN, "vace_layers": [0, 1], "vace_in_channels": 7},
        layouts.wan,
        "renames",
    ),
    Family("wan_vae", "AutoencoderKLWan", _WAN_VAE, layouts.wan_vae, "renames"),
    Family(
        "flux",
        "FluxTransformer2DModel",
        {**_FLUX, "pooled_projection_dim": 19, "axes_dims_rope": [4, 4, 8], "guidance_embeds": True},
        layouts.flux,
        "chunk, split, cat, renames",
        UNET,
        note="the width 3072 that the converter has in its code is 32 here",
        quick=True,
    ),
    Family(
        "flux_vae",
        "AutoencoderKL",
        _LDM_VAE,
        layouts.ldm_vae,
        "select, renames",
        "first_stage_model.",
        quick=True,
    ),
    Family(
        "flux2",
        "Flux2Transformer2DModel",
        {**_FLUX, "timestep_guidance_channels": 22, "axes_dims_rope": [4, 4, 4, 4]},
        layouts.flux2,
        _SPLIT,
        quick=True,
    ),
    Family(
        "flux2_vae",
        "AutoencoderKLFlux2",
        _LDM_VAE,
        layouts.ldm_vae,
        "select, renames",
        explicit="convert_ldm_vae_checkpoint",
        note="that converter leaves out the statistics `bn`, which stay as constructed",
    ),
    Family(
        "z_image",
        "ZImageTransformer2DModel",
        {
            "all_patch_size": [2],
            "all_f_patch_size": [1],
            "in_channels": 5,
            "dim": 32,
            "n_layers": 2,
            "n_refiner_layers": 1,
            "n_heads": 2,
            "n_kv_heads": 2,
            "qk_norm": True,
            "cap_feat_dim": 13,
            "rope_theta": 256.0,
            "t_scale": 1000.0,
            "axes_dims": [8, 4, 4],
            "axes_lens": [256, 32, 32],
        },
        layouts.z_image,
        "chunk, renames",
        UNET,
        quick=True,
    ),
    Family(
        "ltx2",
        "LTX2VideoTransformer3DModel",
        {
            "in_channels": 7,
            "out_channels": 7,
            "num_attention_heads": 2,
            "attention_head_dim": 12,
            "cross_attention_dim": 24,
            "audio_in_channels": 5,
            "audio_out_channels": 5,
            "audio_num_attention_heads": 2,
            "audio_attention_head_dim": 6,
            "audio_cross_attention_dim": 12,
            "num_layers": 2,
            "caption_channels": 11,
        },
        layouts.ltx2,
        "renames",
        UNET,
        quick=True,
    ),
    Family(
        "ltx2_vae",
        "AutoencoderKLLTX2Video",
        {
            "latent_channels": 7,
            "block_out_channels": [8, 16, 16, 24],
            "decoder_block_out_channels": [8, 8, 16],
            "layers_per_block": [1, 1, 1, 1, 1],
            "decoder_layers_per_block": [1, 1, 1, 1],
        },
        layouts.ltx2_vae,
        "renames",
        "vae.",
    ),
    Family(
        "ltx2_audio_vae",
        "AutoencoderKLLTX2Audio",
        {"base_channels": 6, "ch_mult": [1, 2], "num_res_blocks": 1, "resolution": 16, "latent_channels": 3},
        layouts.ltx2_audio,
        "renames",
        "audio_vae.",
    ),
    Family(
        "qwen_image",
        "QwenImageTransformer2DModel",
        {
            "patch_size": 2,
            "in_channels": 16,
            "out_channels": 4,
            "num_layers": 2,
            "attention_head_dim": 16,
            "num_attention_heads": 3,
            "joint_attention_dim": 13,
            "axes_dims_rope": [8, 4, 4],
        },
        dict,
        "none",
        quick=True,
    ),
    Family(
        "qwen_image_vae",
        "AutoencoderKLQwenImage",
        _WAN_VAE,
        layouts.wan_vae,
        "renames",
        explicit="convert_wan_vae_to_diffusers",
    ),
    Family(
        "sd_unet",
        "UNet2DConditionModel",
        {
            "down_block_types": ["CrossAttnDownBlock2D", "DownBlock2D"],
            "up_block_types": ["UpBlock2D", "CrossAttnUpBlock2D"],
            "block_out_channels": [6, 9],
            "layers_per_block": 1,
            "norm_num_groups": 3,
            "cross_attention_dim": 13,
            "attention_head_dim": 3,
        },
        more.ldm_unet,
        "renames",
        UNET,
    ),
)
