"""State dicts of original releases from those of diffusers models, by family.

Converters are not reversible, so each family has its own function. diffusers' converter checks it: its result
has to be the model.
"""

import re
from collections.abc import Sequence

import torch

State = dict[str, torch.Tensor]
Renames = Sequence[tuple[str, str]]


def renamed(state: State, renames: Renames) -> State:
    """Apply regular expressions in turn to every name."""
    result = {}
    for name, tensor in state.items():
        for pattern, to in renames:
            name = re.sub(pattern, to, name)
        result[name] = tensor
    return result


def fused(state: State, parts: Sequence[str], into: str) -> State:
    """Concatenate tensors whose names differ only in ``parts``, under ``into``."""
    result = dict(state)
    for name in state:
        if name.endswith(parts[0]):
            stem = name.removesuffix(parts[0])
            result[stem + into] = torch.cat([result.pop(stem + part) for part in parts])
    return result


def swapped(tensor: torch.Tensor) -> torch.Tensor:
    """Swap the two halves."""
    return torch.cat([*reversed(tensor.chunk(2))])


_SINGLE = r"^single_transformer_blocks\.(\d+)"
_EMBEDDERS = ((r"linear_1\.", "in_layer."), (r"linear_2\.", "out_layer."))
_FINAL = (
    (r"^proj_out\.", "final_layer.linear."),
    (r"^norm_out\.linear\.", "final_layer.adaLN_modulation.1."),
)


def wan(state: State) -> State:
    """Convert Wan 2.1, 2.2 and VACE."""
    return renamed(
        state,
        [
            (r"condition_embedder\.time_embedder\.linear_1", "time_embedding.0"),
            (r"condition_embedder\.time_embedder\.linear_2", "time_embedding.2"),
            (r"condition_embedder\.text_embedder\.linear_1", "text_embedding.0"),
            (r"condition_embedder\.text_embedder\.linear_2", "text_embedding.2"),
            (r"condition_embedder\.time_proj", "time_projection.1"),
            (r"condition_embedder\.image_embedder\.norm1", "img_emb.proj.0"),
            (r"condition_embedder\.image_embedder\.ff\.net\.0\.proj", "img_emb.proj.1"),
            (r"condition_embedder\.image_embedder\.ff\.net\.2", "img_emb.proj.3"),
            (r"condition_embedder\.image_embedder\.norm2", "img_emb.proj.4"),
            (r"blocks\.(\d+)\.norm2", r"blocks.\1.norm3"),
            (r"attn2", "cross_attn"),
            (r"attn1", "self_attn"),
            (r"\.to_out\.0\.", ".o."),
            (r"\.to_([qkv])\.", r".\1."),
            (r"\.add_([kv])_proj\.", r".\1_img."),
            (r"\.norm_added_k\.", ".norm_k_img."),
            (r"ffn\.net\.0\.proj", "ffn.0"),
            (r"ffn\.net\.2", "ffn.2"),
            (r"^scale_shift_table", "head.modulation"),
            (r"scale_shift_table", "modulation"),
            (r"^proj_out", "head.head"),
            (r"(vace_blocks\.\d+\.)proj_in", r"\1before_proj"),
            (r"(vace_blocks\.\d+\.)proj_out", r"\1after_proj"),
        ],
    )


def wan_vae(state: State) -> State:
    """Convert the VAE of Wan 2.1 and Qwen-Image."""

    def block(match: re.Match[str]) -> str:
        number = 4 * int(match[1]) + (3 if match[2] == "upsamplers" else int(match[3]))
        return f"decoder.upsamples.{number}."

    result = {
        re.sub(r"decoder\.up_blocks\.(\d)\.(resnets|upsamplers)\.(\d)\.", block, name): tensor
        for name, tensor in state.items()
    }
    parts = [
        (r"norm1\.gamma", "residual.0.gamma"),
        (r"conv1\.(weight|bias)", r"residual.2.\1"),
        (r"norm2\.gamma", "residual.3.gamma"),
        (r"conv2\.(weight|bias)", r"residual.6.\1"),
        (r"conv_shortcut", "shortcut"),
        (r"mid_block\.resnets\.0", "middle.0"),
        (r"mid_block\.resnets\.1", "middle.2"),
        (r"mid_block\.attentions\.0", "middle.1"),
        (r"encoder\.down_blocks", "encoder.downsamples"),
        (r"norm_out\.gamma", "head.0.gamma"),
        (r"coder\.conv_out", "coder.head.2"),
        (r"coder\.conv_in", "coder.conv1"),
        (r"^quant_conv", "conv1"),
        (r"^post_quant_conv", "conv2"),
    ]
    return renamed(result, parts)


def flux(state: State) -> State:
    """Convert FLUX.1."""
    for name in ("norm_out.linear.weight", "norm_out.linear.bias"):
        state[name] = swapped(state[name])
    for kind in ("weight", "bias"):
        double = [f".attn.{part}.{kind}" for part in ("to_q", "to_k", "to_v")]
        added = [f".attn.add_{part}_proj.{kind}" for part in "qkv"]
        single = {name: t for name, t in state.items() if name.startswith("single")}
        second = {name: t for name, t in state.items() if name not in single}
        second = fused(fused(second, double, f".img_attn.qkv.{kind}"), added, f".txt_attn.qkv.{kind}")
        state = {**second, **fused(single, [*double, f".proj_mlp.{kind}"], f".linear1.{kind}")}
    return renamed(
        state,
        [
            (r"time_text_embed\.timestep_embedder", "time_in"),
            (r"time_text_embed\.text_embedder", "vector_in"),
            (r"time_text_embed\.guidance_embedder", "guidance_in"),
            *_EMBEDDERS,
            *_FINAL,
            (r"^context_embedder", "txt_in"),
            (r"^x_embedder", "img_in"),
            (_SINGLE + r"\.norm\.linear", r"single_blocks.\1.modulation.lin"),
            (_SINGLE + r"\.proj_out", r"single_blocks.\1.linear2"),
            (
                _SINGLE + r"\.attn\.norm_q\.weight",
                r"single_blocks.\1.norm.query_norm.scale",
            ),
            (
                _SINGLE + r"\.attn\.norm_k\.weight",
                r"single_blocks.\1.norm.key_norm.scale",
            ),
            (r"^single_transformer_blocks\.", "single_blocks."),
            (r"^transformer_blocks", "double_blocks"),
            (r"norm1\.linear", "img_mod.lin"),
            (r"norm1_context\.linear", "txt_mod.lin"),
            (r"attn\.norm_q\.weight", "img_attn.norm.query_norm.scale"),
            (r"attn\.norm_k\.weight", "img_attn.norm.key_norm.scale"),
            (r"attn\.norm_added_q\.weight", "txt_attn.norm.query_norm.scale"),
            (r"attn\.norm_added_k\.weight", "txt_attn.norm.key_norm.scale"),
            (r"ff\.net\.0\.proj", "img_mlp.0"),
            (r"ff\.net\.2", "img_mlp.2"),
            (r"ff_context\.net\.0\.proj", "txt_mlp.0"),
            (r"ff_context\.net\.2", "txt_mlp.2"),
            (r"attn\.to_out\.0", "img_attn.proj"),
            (r"attn\.to_add_out", "txt_attn.proj"),
        ],
    )


def flux2(state: State) -> State:
    """Convert FLUX.2."""
    state["norm_out.linear.weight"] = swapped(state["norm_out.linear.weight"])
    state = fused(state, [f".attn.to_{part}.weight" for part in "qkv"], ".img_attn.qkv.weight")
    state = fused(state, [f".attn.add_{part}_proj.weight" for part in "qkv"], ".txt_attn.qkv.weight")
    return renamed(
        state,
        [
            (r"time_guidance_embed\.timestep_embedder", "time_in"),
            (r"time_guidance_embed\.guidance_embedder", "guidance_in"),
            *_EMBEDDERS,
            *_FINAL,
            (r"^context_embedder", "txt_in"),
            (r"^x_embedder", "img_in"),
            (r"modulation(_img|_txt)?\.linear", r"modulation\1.lin"),
            (
                _SINGLE + r"\.attn\.norm_q\.weight",
                r"single_blocks.\1.norm.query_norm.scale",
            ),
            (
                _SINGLE + r"\.attn\.norm_k\.weight",
                r"single_blocks.\1.norm.key_norm.scale",
            ),
            (_SINGLE + r"\.attn\.to_qkv_mlp_proj", r"single_blocks.\1.linear1"),
            (_SINGLE + r"\.attn\.to_out", r"single_blocks.\1.linear2"),
            (r"^transformer_blocks", "double_blocks"),
            (r"attn\.norm_q\.weight", "img_attn.norm.query_norm.scale"),
            (r"attn\.norm_k\.weight", "img_attn.norm.key_norm.scale"),
            (r"attn\.norm_added_q\.weight", "txt_attn.norm.query_norm.scale"),
            (r"attn\.norm_added_k\.weight", "txt_attn.norm.key_norm.scale"),
            (r"attn\.to_out\.0", "img_attn.proj"),
            (r"attn\.to_add_out", "txt_attn.proj"),
            (r"ff\.linear_in", "img_mlp.0"),
            (r"ff\.linear_out", "img_mlp.2"),
            (r"ff_context\.linear_in", "txt_mlp.0"),
            (r"ff_context\.linear_out", "txt_mlp.2"),
        ],
    )


def z_image(state: State) -> State:
    """Convert Z-Image, whose releases have an unused norm."""
    state = fused(state, [f".attention.to_{part}.weight" for part in "qkv"], ".attention.qkv.weight")
    state["norm_final.weight"] = torch.ones(5)
    return renamed(
        state,
        [
            (r"^all_final_layer\.2-1\.", "final_layer."),
            (r"^all_x_embedder\.2-1\.", "x_embedder."),
            (r"\.attention\.to_out\.0\.", ".attention.out."),
            (r"\.attention\.norm_([qk])\.", r".attention.\1_norm."),
        ],
    )


def ltx2(state: State) -> State:
    """Convert LTX-2; connectors in its releases belong to another model."""
    state["video_embeddings_connector.learnable_registers"] = torch.ones(5, 3)
    state["audio_embeddings_connector.learnable_registers"] = torch.ones(5, 3)
    return renamed(
        state,
        [
            (r"^proj_in", "patchify_proj"),
            (r"^audio_proj_in", "audio_patchify_proj"),
            (r"^time_embed\.", "adaln_single."),
            (r"^audio_time_embed\.", "audio_adaln_single."),
            ("av_cross_attn_video_scale_shift", "av_ca_video_scale_shift_adaln_single"),
            ("av_cross_attn_video_a2v_gate", "av_ca_a2v_gate_adaln_single"),
            ("av_cross_attn_audio_scale_shift", "av_ca_audio_scale_shift_adaln_single"),
            ("av_cross_attn_audio_v2a_gate", "av_ca_v2a_gate_adaln_single"),
            ("video_a2v_cross_attn_scale_shift_table", "scale_shift_table_a2v_ca_video"),
            ("audio_a2v_cross_attn_scale_shift_table", "scale_shift_table_a2v_ca_audio"),
            (r"norm_([qk])\.", r"\1_norm."),
        ],
    )


def ltx2_vae(state: State) -> State:
    """Convert the video VAE of LTX-2."""

    def down(match: re.Match[str]) -> str:
        return f"down_blocks.{2 * int(match[1]) + bool(match[2])}."

    def up(match: re.Match[str]) -> str:
        return f"up_blocks.{2 * int(match[1]) + (1 if match[2] else 2)}."

    result = {}
    for name, tensor in state.items():
        name = re.sub(r"down_blocks\.(\d)\.(downsamplers\.0\.)?", down, name)
        name = re.sub(r"up_blocks\.(\d)\.(upsamplers\.0\.)?", up, name)
        result[name] = tensor
    result["per_channel_statistics.channel"] = torch.ones(3)
    result["per_channel_statistics.mean-of-stds"] = torch.ones(3)
    return renamed(
        result,
        [
            (r"encoder\.mid_block", "encoder.down_blocks.8"),
            (r"decoder\.mid_block", "decoder.up_blocks.0"),
            ("resnets", "res_blocks"),
            *_STATISTICS,
        ],
    )


_STATISTICS = (
    ("^latents_mean", "per_channel_statistics.mean-of-means"),
    ("^latents_std", "per_channel_statistics.std-of-means"),
)


def ltx2_audio(state: State) -> State:
    """Convert the audio VAE of LTX-2."""
    return renamed(state, _STATISTICS)


def ldm_vae(state: State) -> State:
    """Convert the VAE of Stable Diffusion and FLUX.1, with attention made from convolutions."""
    blocks = 1 + max(int(m[1]) for name in state if (m := re.match(r"decoder\.up_blocks\.(\d+)", name)))
    result = {}
    for name, tensor in state.items():
        if re.search(r"attentions\.0\.to_.*weight", name):
            tensor = tensor[:, :, None, None]
        name = re.sub(r"up_blocks\.(\d+)\.", lambda m: f"up.{blocks - 1 - int(m[1])}.", name)
        name = re.sub(r"mid_block\.resnets\.(\d)", lambda m: f"mid.block_{int(m[1]) + 1}", name)
        result[name] = tensor
    return renamed(
        result,
        [
            (r"down_blocks\.", "down."),
            (r"resnets\.", "block."),
            (r"conv_shortcut", "nin_shortcut"),
            (r"downsamplers\.0\.", "downsample."),
            (r"upsamplers\.0\.", "upsample."),
            (r"mid_block\.attentions\.0\.", "mid.attn_1."),
            (r"group_norm", "norm"),
            (r"attn_1\.to_([qkv])", r"attn_1.\1"),
            (r"attn_1\.to_out\.0", "attn_1.proj_out"),
            (r"conv_norm_out", "norm_out"),
        ],
    )
