"""Small models of DiffSynth-Studio's five pipelines, with widths that fit together.

DiffSynth looks up the class of a file in a table, by the file's hash. `write_pipelines` makes rows of that
table; the classes that they name are attributes of this module, in processes that have imported DiffSynth.
"""

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.diffusion.engine_results import fill
from tests.diffusion.families import FAMILIES
from tests.diffusion.family import Family
from tests.diffusion.frozen_families import build_qwen3, build_qwen25vl, shrink_t5, wrap_small_model
from tests.diffusion.oracle import import_diffsynth
from tests.diffusion.shrink import lazy_class
from tests.diffusion.small_tokenizers import VOCABULARY, write_tokenizers
from tests.diffusion.transformers_families import FLUX, FLUX2, WAN, Z_IMAGE


@dataclass(frozen=True)
class Part:
    """One model of a pipeline: its DiffSynth name, and its class with a configuration."""

    name: str
    family: Family


def _part(name: str, key: str, **changes: Any) -> Part:
    return Part(name, replace(FAMILIES[key], **changes))


_TOKENS = {"vocab_size": VOCABULARY, "max_position_embeddings": 1024}
_FLUX_VAE = _part("flux_vae_encoder", "flux.1 vae encoder")

#: Models by folder of the pipeline's script and by class name in this module; the trained model comes first.
PIPELINES: Mapping[str, Mapping[str, Part]] = {
    "wanvideo": {
        "wan_dit": _part("wan_video_dit", "wan2.1 t2v", config={**WAN, "text_dim": 24}),
        "wan_text": _part(
            "wan_video_text_encoder", "wan umt5", config={**FAMILIES["wan umt5"].config, "vocab": VOCABULARY}
        ),
        "wan_vae": _part("wan_video_vae", "wan2.1 vae"),
    },
    "qwen_image": {
        "qwen_dit": _part("qwen_image_dit", "qwen-image", config={"num_layers": 2}),
        "qwen_text": _part(
            "qwen_image_text_encoder",
            "qwen2.5-vl",
            model=wrap_small_model(
                "qwen_image_text_encoder:QwenImageTextEncoder", functools.partial(build_qwen25vl, **_TOKENS)
            ),
        ),
        "qwen_vae": _part("qwen_image_vae", "qwen-image vae"),
    },
    "flux": {
        "flux_dit": _part(
            "flux_dit",
            "flux.1",
            model=lazy_class("flux_dit:FluxDiT", {**FLUX, 768: 24}),
            config={"num_blocks": 2},
        ),
        "flux_clip": _part(
            "flux_text_encoder_clip",
            "flux.1 clip",
            config={
                **FAMILIES["flux.1 clip"].config,
                "vocab_size": VOCABULARY,
                "max_position_embeddings": 77,
            },
        ),
        "flux_t5": _part("flux_text_encoder_t5", "flux.1 t5", model=functools.partial(shrink_t5, VOCABULARY)),
        "flux_vae": _FLUX_VAE,
    },
    "flux2": {
        "flux2_dit": _part(
            "flux2_dit",
            "flux.2 klein",
            config={**FLUX2, "in_channels": 128, "joint_attention_dim": 72, "guidance_embeds": False},
        ),
        # The transformer takes the outputs of layers 9, 18 and 27.
        "flux2_text": _part(
            "z_image_text_encoder",
            "qwen3",
            model=wrap_small_model(
                "z_image_text_encoder:ZImageTextEncoder",
                functools.partial(build_qwen3, **_TOKENS, num_hidden_layers=28),
            ),
        ),
        "flux2_vae": _part(
            "flux2_vae",
            "flux.2 vae",
            config={
                "latent_channels": 32,
                "block_out_channels": (8, 8, 8, 8),
                "layers_per_block": 1,
                "num_groups": 4,
            },
        ),
    },
    "z_image": {
        "z_image_dit": _part(
            "z_image_dit",
            "z-image",
            config={**Z_IMAGE, "in_channels": 16, "cap_feat_dim": 24, "axes_lens": [1024, 64, 64]},
        ),
        "z_image_text": _part(
            "z_image_text_encoder",
            "qwen3",
            model=wrap_small_model(
                "z_image_text_encoder:ZImageTextEncoder", functools.partial(build_qwen3, **_TOKENS)
            ),
        ),
        "z_image_vae": _FLUX_VAE,
    },
}


def __getattr__(name: str) -> type[nn.Module]:
    """Return the class that a row of the table names."""
    for parts in PIPELINES.values():
        if name in parts:
            return parts[name].family.model()
    raise AttributeError(name)


def get_model_paths(pipeline: str, folder: Path) -> dict[str, Path]:
    """Return the model files of a pipeline in ``folder``."""
    return {
        name: folder / pipeline / f"{name}.{'pth' if part.family.pth else 'safetensors'}"
        for name, part in PIPELINES[pipeline].items()
    }


def write_pipelines(folder: str, pipelines: Mapping[str, Mapping[str, Part]] = PIPELINES) -> None:
    """Write model files, tokenizers, and ``rows.json`` for DiffSynth's table."""
    import_diffsynth()
    from diffsynth.core.loader.file import hash_model_file
    from safetensors.torch import save_file

    rows, root = [], Path(folder)
    for pipeline, parts in pipelines.items():
        (root / pipeline).mkdir(parents=True)
        for seed, (name, path) in enumerate(get_model_paths(pipeline, root).items()):
            family = parts[name].family
            model = fill(family.model()(**family.config), seed).to(torch.bfloat16)
            for n, tensor in model.state_dict().items():
                if n.endswith("running_var"):
                    tensor.abs_()
            stored = family.to_file({n: t.contiguous().clone() for n, t in model.state_dict().items()})
            if family.pth:
                torch.save(stored, path)
            else:
                save_file(stored, path)
            row = {"model_hash": hash_model_file(str(path)), "model_name": parts[name].name}
            row |= {"model_class": f"{__name__}.{name}", "extra_kwargs": dict(family.config)}
            original = next(kind for kind in type(model).__mro__ if kind.__module__.startswith("diffsynth."))
            row["like"] = f"{original.__module__}.{original.__qualname__}"
            if family.converter:
                module, _, converter = family.converter.partition(":")
                row["state_dict_converter"] = f"diffsynth.utils.state_dict_converters.{module}.{converter}"
            rows.append(row)
    (root / "rows.json").write_text(json.dumps(rows))
    write_tokenizers(root)
