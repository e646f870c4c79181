"""Layouts of further original releases, whose converters diffusers has: Stable Diffusion's UNet, Sana, ..."""

import re

import torch

from tests.conformance.diffusion_layouts import State, fused, renamed, swapped


def ltx(state: State) -> State:
    """LTX-Video."""
    return renamed(
        state,
        [
            (r"^proj_in", "patchify_proj"),
            (r"^time_embed", "adaln_single"),
            (r"norm_([qk])\.", r"\1_norm."),
        ],
    )


def flux3(state: State) -> State:
    """FLUX.3; its training heads are no part of the model."""
    state["norm_out.linear.weight"] = swapped(state["norm_out.linear.weight"])
    state["repa_projectors.0.weight"] = torch.ones(3)
    return renamed(
        state,
        [
            (r"^norm_out\.linear\.", "final_layer.image.adaLN_modulation.1."),
            (r"^proj_out\.", "final_layer.image.linear."),
            (r"^timestep_embedder\.linear_1\.", "time_in.in_layer."),
            (r"^timestep_embedder\.linear_2\.", "time_in.out_layer."),
            (r"^x_embedders\.", "emb_in."),
            (r"^context_embedder\.", "txt_in."),
            (r"^mode_blocks\.", "content_mode_blocks."),
            (r"^single_transformer_blocks\.", "single_blocks."),
            (r"(?<!image)\.linear\.weight", ".lin.weight"),
            (r"attn\.to_([qkv])\.", r"\1_proj."),
            (r"attn\.to_out\.0\.", "attn_out."),
            (r"attn\.norm_q\.weight", "norm.query_norm.scale"),
            (r"attn\.norm_k\.weight", "norm.key_norm.scale"),
            (r"ff\.linear_in\.", "mlp_in."),
            (r"ff\.linear_out\.", "mlp_out."),
        ],
    )


def sana(state: State) -> State:
    """Sana, whose releases have an embedding of positions and of no caption that the model has not."""
    state = fused(state, [f".attn1.to_{part}.weight" for part in "qkv"], ".attn.qkv.weight")
    for kind in ("weight", "bias"):
        parts = [f".attn2.to_{part}.{kind}" for part in "kv"]
        state = fused(state, parts, f".cross_attn.kv_linear.{kind}")
    state["pos_embed"] = torch.ones(3)
    state["y_embedder.y_embedding"] = torch.ones(3)
    return renamed(
        state,
        [
            (r"^patch_embed\.proj", "x_embedder.proj"),
            (r"^time_embed\.emb\.timestep_embedder\.linear_1", "t_embedder.mlp.0"),
            (r"^time_embed\.emb\.timestep_embedder\.linear_2", "t_embedder.mlp.2"),
            (r"^time_embed\.linear", "t_block.1"),
            (r"^caption_projection\.linear_1", "y_embedder.y_proj.fc1"),
            (r"^caption_projection\.linear_2", "y_embedder.y_proj.fc2"),
            (r"^caption_norm", "attention_y_norm"),
            (r"^proj_out", "final_layer.linear"),
            (r"^scale_shift_table", "final_layer.scale_shift_table"),
            (r"^transformer_blocks", "blocks"),
            (r"attn1\.to_out\.0", "attn.proj"),
            (r"attn2\.to_q", "cross_attn.q_linear"),
            (r"attn2\.to_out\.0", "cross_attn.proj"),
            (r"ff\.conv_inverted", "mlp.inverted_conv.conv"),
            (r"ff\.conv_depth", "mlp.depth_conv.conv"),
            (r"ff\.conv_point", "mlp.point_conv.conv"),
        ],
    )


def ldm_unet(state: State) -> State:
    """The UNet of latent diffusion, for two blocks of one layer: its blocks are counted through."""

    def down(match: re.Match[str]) -> str:
        block, part, layer = int(match[1]), match[2], int(match[3])
        if part == "downsamplers":
            return f"input_blocks.{2 * block + 2}.0."
        return f"input_blocks.{2 * block + layer + 1}.{int(part == 'attentions')}."

    def up(match: re.Match[str]) -> str:
        block, part, layer = int(match[1]), match[2], int(match[3])
        if part == "upsamplers":
            return f"output_blocks.{2 * block + 1}.{1 if block == 0 else 2}."
        return f"output_blocks.{2 * block + layer}.{int(part == 'attentions')}."

    made = {}
    for name, tensor in state.items():
        name = re.sub(r"^down_blocks\.(\d)\.(\w+)\.(\d)\.", down, name)
        name = re.sub(r"^up_blocks\.(\d)\.(\w+)\.(\d)\.", up, name)
        if re.match(r"input_blocks\.\d\.0\.conv\.", name):
            name = name.replace("conv.", "op.")
        if "blocks.0.norm" in name or "attn" in name or ".1.norm." in name:  # inside a transformer
            made[name] = tensor
            continue
        for new, old in (
            (".norm1.", ".in_layers.0."),
            (".conv1.", ".in_layers.2."),
            (".norm2.", ".out_layers.0."),
            (".conv2.", ".out_layers.3."),
            (".time_emb_proj.", ".emb_layers.1."),
            (".conv_shortcut.", ".skip_connection."),
        ):
            name = name.replace(new, old)
        made[name] = tensor
    return renamed(
        made,
        [
            (r"^mid_block\.resnets\.0", "middle_block.0"),
            (r"^mid_block\.attentions\.0", "middle_block.1"),
            (r"^mid_block\.resnets\.1", "middle_block.2"),
            (r"^time_embedding\.linear_1", "time_embed.0"),
            (r"^time_embedding\.linear_2", "time_embed.2"),
            (r"^conv_in", "input_blocks.0.0"),
            (r"^conv_norm_out", "out.0"),
            (r"^conv_out", "out.2"),
        ],
    )
