"""Layouts of further original releases with converters in diffusers."""

import re

from tests.conformance.diffusion_layouts import State, renamed


def ldm_unet(state: State) -> State:
    """Convert the UNet of latent diffusion with two blocks of one layer, counted through."""

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

    result = {}
    for name, tensor in state.items():
        name = re.sub(r"^down_blocks\.(\d)\.(\w+)\.(\d)\.", down, name)
        name = re.sub(r"^up_blocks\.(\d)\.(\w+)\.(\d)\.", up, name)
        if re.match(r"input_blocks\.\d\.0\.conv\.", name):
            name = name.replace("conv.", "op.")
        if "blocks.0.norm" in name or "attn" in name or ".1.norm." in name:  # inside a transformer
            result[name] = tensor
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
        result[name] = tensor
    return renamed(
        result,
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
