"""Formats of adapters' files: PEFT's, diffusers' and DiffSynth's, with DiffSynth's names of modules."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from zerostart.errors import ConfigError
from zerostart.state.saving.adapters import PEFT_FORMAT, AdapterFormat

ADAPTER_FORMATS = ("peft", "diffusers", "diffsynth")
#: diffusers' LoRA files: the name, the start of all names, and the key of PEFT's configuration in the header.
_LORA_WEIGHTS, _COMPONENT, _METADATA = "pytorch_lora_weights", "transformer.", "lora_adapter_metadata"


def find_adapter_format(
    kind: str, model: nn.Module, *, key: str = "adapter_format", stem: str = _LORA_WEIGHTS, prefix: str = ""
) -> AdapterFormat:
    """Return the format ``kind`` of ``ADAPTER_FORMATS`` for adapters of ``model``, which nothing wraps.

    ``stem`` names DiffSynth's file. ``prefix`` is removed from names that start with it. Raises ConfigError,
    which calls the format's argument ``key``, for an unknown format and for a model without names in it.
    """
    if kind not in ADAPTER_FORMATS:
        raise ConfigError(f"{key} {kind!r} is unknown: it is one of {', '.join(ADAPTER_FORMATS)}")
    if kind == "peft":
        return replace(PEFT_FORMAT, renamed=drop_prefix(prefix, lambda name: name))
    component = drop_prefix(prefix, lambda name: _COMPONENT + name)
    if kind != "diffsynth":
        described = functools.partial(_lora_header, component)
        return AdapterFormat(_LORA_WEIGHTS, component, False, described, configured=False)
    names = find_known_names(model)
    # DiffSynth's loader fuses the factors of diffusers' single modules itself.
    if names is None or not names.fused:
        of = find_diffsynth_names(model, key)
        component = drop_prefix(prefix, lambda name: PREFIX + _add_adapter_name(of(name)))
    # DiffSynth reads no alpha: the scale is multiplied into the factors.
    return AdapterFormat(stem, component, False, configured=False, folded=True)


def find_diffsynth_names(model: nn.Module, key: str) -> Callable[[str], str]:
    """Return the function from names of tensors of ``model`` to DiffSynth's names.

    Raises ConfigError, which names the option ``key``, for a model with other modules in DiffSynth.
    """
    names = find_known_names(model)
    if names is None or names.fused:
        raise ConfigError(
            f"{key} diffsynth: DiffSynth has no {type(model).__name__} with the same "
            f"modules; leave {key} out to save in the format of the model's own library"
        )
    return names.of


def drop_prefix(prefix: str, named: Callable[[str], str]) -> Callable[[str], str]:
    """Return ``named`` with ``prefix`` removed from its results."""
    return lambda name: named(name).removeprefix(prefix)


def _add_adapter_name(name: str) -> str:
    return name.replace(".lora_A.", ".lora_A.default.").replace(".lora_B.", ".lora_B.default.")


def _lora_header(named: Callable[[str], str], config: Any) -> dict[str, str]:
    """Return PEFT's configuration in the form of a diffusers LoRA header."""
    values = {
        # PEFT's sets of modules are sorted lists in JSON, so that equal runs write equal files.
        named(key): sorted(value) if isinstance(value, set) else value
        for key, value in config.to_dict().items()
    }
    return {"format": "pt", _METADATA: json.dumps(values, indent=2, sort_keys=True)}


#: Start of DiffSynth's names: its pipelines call the model ``dit``.
PREFIX = "pipe.dit."


@dataclass(frozen=True)
class DiffSynthNames:
    """DiffSynth's names of one kind of model: regular expressions with replacements, applied in turn.

    ``fused``: DiffSynth fuses some modules, so that ``rules`` map several modules to one. That suffices to
    recognise targets, but not to write files. ``targets`` are those of DiffSynth's LoRA scripts.
    """

    targets: str
    rules: tuple[tuple[str, str], ...] = ()
    fused: bool = False

    def of(self, name: str) -> str:
        """Return DiffSynth's name of a module, a parameter or a tensor of an adapter."""
        # Each rule sees the result of the rules before it, so that two names can be swapped.
        for pattern, replacement in self.rules:
            name = re.sub(pattern, replacement, name)
        return name


def _map_feed_forward(module: str, sequence: str) -> tuple[tuple[str, str], ...]:
    """Map the two linear layers of diffusers' ``FeedForward`` to entries of a sequence."""
    return (rf"^{module}\.net\.0\.proj\b", rf"{sequence}.0"), (rf"^{module}\.net\.2\b", rf"{sequence}.2")


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
    # Swap norm2 and norm3 through a third name.
    (r"^(blocks\.\d+)\.norm2\b", r"\1.norm_crossed"),
    (r"^(blocks\.\d+)\.norm3\b", r"\1.norm2"),
    (r"^(blocks\.\d+)\.norm_crossed\b", r"\1.norm3"),
    (r"^(blocks\.\d+)\.attn1\b", r"\1.self_attn"),
    (r"^(blocks\.\d+)\.attn2\b", r"\1.cross_attn"),
    (r"_attn\.to_out\.0\b", "_attn.o"),
    (r"_attn\.to_([qkv])\b", r"_attn.\1"),
    (r"_attn\.add_([kv])_proj\b", r"_attn.\1_img"),
    (r"_attn\.norm_added_k\b", "_attn.norm_k_img"),
    *_map_feed_forward(r"(blocks\.\d+\.ffn)", r"\1"),
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
    *_map_feed_forward(r"transformer_blocks\.(\d+)\.ff_context", r"blocks.\1.ff_b"),
    *_map_feed_forward(r"transformer_blocks\.(\d+)\.ff", r"blocks.\1.ff_a"),
)
_FLUX2 = (
    "to_q,to_k,to_v,add_q_proj,add_k_proj,add_v_proj,to_qkv_mlp_proj,to_out.0,to_add_out,linear_in,linear_out"
)
#: Names by diffusers' classes, with the targets of DiffSynth's ``examples/*/model_training/lora``.
#: The FLUX.2 scripts name the last projection of each single block by the block's number.
_NAMES_BY_CLASS = {
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


def find_known_names(model: nn.Module) -> DiffSynthNames | None:
    """Return DiffSynth's names for ``model``, or None for an unknown model."""
    kinds = [kind.__name__ for kind in type(model).__mro__]  # FSDP2 subclasses the module's class
    return next((_NAMES_BY_CLASS[kind] for kind in kinds if kind in _NAMES_BY_CLASS), None)
