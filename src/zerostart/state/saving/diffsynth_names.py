"""What DiffSynth-Studio calls the modules of diffusers' transformers.

For names in its files, and for lists of LoRA's targets that were written for its scripts. Both libraries have
these models from the same releases; diffusers has renamed the modules of some, and cut others.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

#: What DiffSynth's own names begin with, of the model that its pipelines call ``dit``.
PREFIX = "pipe.dit."


@dataclass(frozen=True)
class DiffSynthNames:
    """Names of one kind of model: ``rules`` of regular expressions and replacements, applied in turn.

    ``fused``: some of its modules are one module there, so that ``rules`` give the name of a whole for each
    of its parts; that is enough to recognise targets, and nothing to write files with. ``targets`` are those
    that its LoRA scripts give.
    """

    targets: str
    rules: tuple[tuple[str, str], ...] = ()
    fused: bool = False

    def of(self, name: str) -> str:
        """The name there of a module, a parameter or a tensor of an adapter."""
        # In turn, each on what the last has made: so names can be exchanged by way of a third one.
        for pattern, replacement in self.rules:
            name = re.sub(pattern, replacement, name)
        return name


def _feed_forward(module: str, there: str) -> tuple[tuple[str, str], ...]:
    """The two linear layers of diffusers' ``FeedForward``, which are entries of a sequence there."""
    return (rf"^{module}\.net\.0\.proj\b", rf"{there}.0"), (rf"^{module}\.net\.2\b", rf"{there}.2")


_WAN = (
    (r"^condition_embedder\.time_embedder\.linear_1\b", "time_embedding.0"),
    (r"^condition_embedder\.time_embedder\.linear_2\b", "time_embedding.2"),
    (r"^condition_embedder\.text_embedder\.linear_1\b", "text_embedding.0"),
    (r"^condition_embedder\.text_embedder\.linear_2\b", "text_embedding.2"),
    (r"^condition_embedder\.time_proj\b", "time_projection.1"),
    (r"^condition_embedder\.image_embedder\.pos_embed$", "img_emb.emb_pos"),
    (r"^condition_embedder\.image_embedder\.norm1\b", "img_emb.proj.0"),
    (r"^condition_embedder\.image_embedder\.ff\.net\.0\.proj\b", "img_emb.proj.1"),
    (r"^condition_embedder\.image_embedder\.ff\.net\.2\b", "img_emb.proj.3"),
    (r"^condition_embedder\.image_embedder\.norm2\b", "img_emb.proj.4"),
    (r"^scale_shift_table$", "head.modulation"),
    (r"^proj_out\b", "head.head"),
    (r"^(blocks\.\d+)\.scale_shift_table$", r"\1.modulation"),
    # norm2 and norm3 change places: the one goes by way of a name that neither has.
    (r"^(blocks\.\d+)\.norm2\b", r"\1.norm_crossed"),
    (r"^(blocks\.\d+)\.norm3\b", r"\1.norm2"),
    (r"^(blocks\.\d+)\.norm_crossed\b", r"\1.norm3"),
    (r"^(blocks\.\d+)\.attn1\b", r"\1.self_attn"),
    (r"^(blocks\.\d+)\.attn2\b", r"\1.cross_attn"),
    (r"_attn\.to_out\.0\b", "_attn.o"),
    (r"_attn\.to_([qkv])\b", r"_attn.\1"),
    (r"_attn\.add_([kv])_proj\b", r"_attn.\1_img"),
    (r"_attn\.norm_added_k\b", "_attn.norm_k_img"),
    *_feed_forward(r"(blocks\.\d+\.ffn)", r"\1"),
)
_FLUX = (
    (r"^proj_out\b", "final_proj_out"),
    (r"^norm_out\b", "final_norm_out"),
    (r"^single_transformer_blocks\.(\d+)\.attn\.to_[qkv]\b", r"single_blocks.\1.to_qkv_mlp"),
    (r"^single_transformer_blocks\.(\d+)\.proj_mlp\b", r"single_blocks.\1.to_qkv_mlp"),
    (r"^single_transformer_blocks\b", "single_blocks"),
    (r"^transformer_blocks\.(\d+)\.norm1_context\b", r"blocks.\1.norm1_b"),
    (r"^transformer_blocks\.(\d+)\.norm1\b", r"blocks.\1.norm1_a"),
    (r"^transformer_blocks\.(\d+)\.attn\.to_[qkv]\b", r"blocks.\1.attn.a_to_qkv"),
    (r"^transformer_blocks\.(\d+)\.attn\.add_[qkv]_proj\b", r"blocks.\1.attn.b_to_qkv"),
    (r"^transformer_blocks\.(\d+)\.attn\.to_out\.0\b", r"blocks.\1.attn.a_to_out"),
    (r"^transformer_blocks\.(\d+)\.attn\.to_add_out\b", r"blocks.\1.attn.b_to_out"),
    *_feed_forward(r"transformer_blocks\.(\d+)\.ff_context", r"blocks.\1.ff_b"),
    *_feed_forward(r"transformer_blocks\.(\d+)\.ff", r"blocks.\1.ff_a"),
)
_FLUX2 = (
    "to_q,to_k,to_v,add_q_proj,add_k_proj,add_v_proj,to_qkv_mlp_proj,to_out.0,to_add_out,linear_in,linear_out"
)
#: By classes of diffusers, with the targets of the scripts in DiffSynth's ``examples/*/model_training/lora``.
#: The FLUX.2 scripts name the last projection of each single block by its number, which is that of the model.
_KNOWN = {
    "WanTransformer3DModel": DiffSynthNames("q,k,v,o,ffn.0,ffn.2", _WAN),
    "QwenImageTransformer2DModel": DiffSynthNames(
        "to_q,to_k,to_v,add_q_proj,add_k_proj,add_v_proj,to_out.0,to_add_out,img_mlp.net.2,img_mod.1,"
        "txt_mlp.net.2,txt_mod.1"
    ),
    "FluxTransformer2DModel": DiffSynthNames(
        "a_to_qkv,b_to_qkv,ff_a.0,ff_a.2,ff_b.0,ff_b.2,a_to_out,b_to_out,proj_out,norm.linear,"
        "norm1_a.linear,norm1_b.linear,to_qkv_mlp",
        _FLUX,
        fused=True,
    ),
    "Flux2Transformer2DModel": DiffSynthNames(f"{_FLUX2},single_transformer_blocks.*.attn.to_out"),
    "ZImageTransformer2DModel": DiffSynthNames("to_q,to_k,to_v,to_out.0,w1,w2,w3"),
}


def names_for(model: nn.Module) -> DiffSynthNames | None:
    """The names of the kind of ``model``; None for one that DiffSynth does not have, or has otherwise."""
    return _known([kind.__name__ for kind in type(model).__mro__])  # FSDP2 gives modules a class of their own


def _known(kinds: Sequence[str]) -> DiffSynthNames | None:
    return next((_KNOWN[kind] for kind in kinds if kind in _KNOWN), None)
