"""LoRA files for ComfyUI, and for kohya's scripts and what reads them: what they call the modules of a model.

Both go by the names of the original release, and have an ``alpha`` beside the factors of each module.
ComfyUI reads ``diffusion_model.blocks.0.self_attn.q.lora_A.weight`` (its function ``model_lora_keys_unet``).
Of a release that has several projections in one, where it knows diffusers' parts of them, it reads
diffusers' names. kohya's scripts (sd-scripts, musubi-tuner) write
``lora_unet_blocks_0_self_attn_q.lora_down.weight``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import nn

from zerostart.errors import ConfigError
from zerostart.state.saving.diffsynth_names import names_for

#: What ComfyUI reads before a module's name, by diffusers' class.
_COMFYUI: Mapping[str, str] = {
    "WanTransformer3DModel": "diffusion_model.",
    "QwenImageTransformer2DModel": "diffusion_model.",
    "ZImageTransformer2DModel": "diffusion_model.",
    "FluxTransformer2DModel": "transformer.",
}
#: Of which of these each module is one of the release's, too, as kohya's names need it.
_KOHYA: Sequence[str] = ("WanTransformer3DModel", "QwenImageTransformer2DModel", "ZImageTransformer2DModel")
_KOHYA_FACTORS = {"lora_A": "lora_down", "lora_B": "lora_up"}


def comfyui_names(model: nn.Module, key: str) -> Callable[[str], str]:
    """From PEFT's name of a factor to ComfyUI's. Raises ConfigError for a model whose names are not known.

    ``key`` is what the error calls the argument that asks for the format.
    """
    kind = _known(model, f"{key} comfyui", _COMFYUI)
    return lambda name: _COMFYUI[kind] + _released(model, name)


def kohya_names(model: nn.Module, key: str) -> Callable[[str], str]:
    """From PEFT's name of a factor to that of kohya's scripts. Raises ConfigError as ``comfyui_names``."""
    _known(model, f"{key} kohya", _KOHYA)

    def named(name: str) -> str:
        # `MODULE.lora_A.weight`: the factor is cut off before the dots become underscores, which it keeps.
        module, _, factor = _released(model, name).rpartition(".lora_")
        kind, _, rest = f"lora_{factor}".partition(".")
        return f"lora_unet_{module.replace('.', '_')}.{_KOHYA_FACTORS[kind]}.{rest}"

    return named


def _known(model: nn.Module, asked: str, names: Mapping[str, str] | Sequence[str]) -> str:
    """The class of ``model`` among ``names``; FSDP2 gives modules a class of their own."""
    found = next((kind.__name__ for kind in type(model).__mro__ if kind.__name__ in names), None)
    if found is None:
        raise ConfigError(
            f"{asked}: the names of {type(model).__name__} there are not known; they are for "
            f"{', '.join(names)}. Leave it out, for the model's own library"
        )
    return found


def _released(model: nn.Module, name: str) -> str:
    """The name in the original release, whose names DiffSynth has kept; of fused modules as it is."""
    names = names_for(model)
    return name if names is None or names.fused else names.of(name)
