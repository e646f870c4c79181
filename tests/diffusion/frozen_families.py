"""Autoencoders and encoders of DiffSynth-Studio's own classes."""

import functools
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import nn

from tests.diffusion.family import Family, add_prefix, noise, remove_prefix
from tests.diffusion.shrink import lazy_class

TEXT: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 24,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 12,
    "max_position_embeddings": 64,
}
_FLUX_VAE = {512: 64, 256: 32, 128: 32}


def make_video(frames: int, size: int = 32) -> torch.Tensor:
    return noise(3, frames, size, size, seed=frames)


def make_wan_vae_call(depth: int, latent: int) -> Callable[[Any], Any]:
    """Return a call that encodes 9 and 33 frames and decodes 3 and 9."""

    def call(model: Any) -> Any:
        encoded = [model.encode([make_video(frames)], "cpu") for frames in (9, 33)]
        return [*encoded, *(model.decode([noise(depth, t, latent, latent)], "cpu") for t in (3, 9))]

    return call


def shrink_wan_vae(name: str, inner: str, **config: Any) -> Callable[[], type[nn.Module]]:
    """Return a small variant: only the inner model of the class has a width."""

    def make_class() -> type[nn.Module]:
        module = import_module("diffsynth.models.wan_video_vae")
        kind = getattr(module, name)

        class Small(kind):  # type: ignore[misc, valid-type]
            def __init__(self) -> None:
                nn.Module.__init__(self)
                self.mean, self.std = torch.linspace(-0.5, 0.5, 4), torch.linspace(1.0, 2.0, 4)
                self.scale = [self.mean, 1.0 / self.std]
                self.model = getattr(module, inner)(z_dim=4, **config).eval().requires_grad_(False)
                self.upsampling_factor = 16 if inner.endswith("38_") else 8
                self.z_dim = 4

        Small.__module__ = kind.__module__
        return Small

    return functools.cache(make_class)


def call_qwen_vae(model: Any) -> Any:
    encoded = [model.encode(noise(1, 3, 16, 16, seed=s)) for s in (1, 2)]
    return [*encoded, *(model.decode(noise(1, 16, 2, 2, seed=s)) for s in (1, 2))]


def make_vae_call(shape: tuple[int, ...], latent: tuple[int, ...]) -> Callable[[Any], Any]:
    def call(model: Any) -> Any:
        return [*(model.encode(noise(*shape, seed=s)) for s in (1, 2)), model.decode(noise(*latent))]

    return call


def call_text_encoder(model: Any) -> Any:
    return model(torch.tensor([[3, 7, 11, 2, 1]]))


def call_with_mask(model: Any) -> Any:
    ids = torch.tensor([[3, 7, 11, 2, 1]])
    return model(input_ids=ids, attention_mask=torch.ones_like(ids), output_hidden_states=True)


def wrap_small_model(path: str, inner: Callable[[], nn.Module]) -> Callable[[], type[nn.Module]]:
    """Return a subclass of a wrapper class whose ``self.model`` is small."""

    def make_class() -> type[nn.Module]:
        kind = lazy_class(path)()

        class Small(kind):  # type: ignore[misc, valid-type]
            def __init__(self) -> None:
                nn.Module.__init__(self)
                self.model = inner()
                text = getattr(self.model.config, "text_config", None)
                if text is not None:
                    self.lm_head = nn.Linear(text.hidden_size, text.vocab_size, bias=False)

        Small.__module__ = kind.__module__
        return Small

    return functools.cache(make_class)


def build_qwen3(**changes: Any) -> nn.Module:
    from transformers import Qwen3Config, Qwen3Model

    return Qwen3Model(Qwen3Config(**{**TEXT, **changes}))


def build_qwen25vl(**changes: Any) -> nn.Module:
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLModel

    rope = {"type": "default", "rope_type": "default", "mrope_section": [2, 2, 2], "rope_theta": 10000.0}
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "out_hidden_size": 24}
    return Qwen2_5_VLModel(
        Qwen2_5_VLConfig(text_config={**TEXT, "rope_scaling": rope, **changes}, vision_config=vision)
    )


def shrink_t5(vocabulary: int = 61) -> type[nn.Module]:
    from transformers import T5Config, T5EncoderModel

    kind = lazy_class("flux_text_encoder_t5:FluxTextEncoderT5")()

    class Small(kind):  # type: ignore[misc, valid-type]
        def __init__(self) -> None:
            T5EncoderModel.__init__(
                self,
                T5Config(
                    vocab_size=vocabulary,
                    d_model=24,
                    d_kv=12,
                    d_ff=32,
                    num_layers=2,
                    num_heads=2,
                    feed_forward_proj="gated-gelu",
                ),
            )

    Small.__module__ = kind.__module__
    return Small


FROZEN: dict[str, Family] = {
    "wan2.1 vae": Family(
        shrink_wan_vae("WanVideoVAE", "VideoVAE_", dim=8),
        make_wan_vae_call(4, 2),
        {},
        lambda state: {"model_state": remove_prefix("model.")(state)},
        "wan_video_vae:WanVideoVAEStateDictConverter",
        pth=True,
    ),
    "wan umt5": Family(
        lazy_class("wan_video_text_encoder:WanTextEncoder"),
        call_text_encoder,
        {"vocab": 61, "dim": 24, "dim_attn": 24, "dim_ffn": 32, "num_heads": 2, "num_layers": 2},
        pth=True,
    ),
    "qwen-image vae": Family(
        lazy_class("qwen_image_vae:QwenImageVAE"), call_qwen_vae, {"base_dim": 8, "num_res_blocks": 1}
    ),
    "qwen2.5-vl": Family(
        wrap_small_model("qwen_image_text_encoder:QwenImageTextEncoder", build_qwen25vl),
        call_with_mask,
        {},
        lambda state: {
            n.replace("model.visual", "visual").replace("model.language_model", "model"): t
            for n, t in state.items()
        },
        "qwen_image_text_encoder:QwenImageTextEncoderStateDictConverter",
    ),
    "flux.1 vae encoder": Family(
        lazy_class("flux_vae:FluxVAEEncoder", _FLUX_VAE), lambda m: m(noise(1, 3, 16, 16))
    ),
    "flux.1 clip": Family(
        lazy_class("flux_text_encoder_clip:FluxTextEncoderClip"),
        call_text_encoder,
        {
            "embed_dim": 24,
            "vocab_size": 61,
            "max_position_embeddings": 5,
            "num_encoder_layers": 2,
            "encoder_intermediate_size": 32,
        },
    ),
    "flux.1 t5": Family(
        shrink_t5,
        call_text_encoder,
        {},
        lambda state: {n: t for n, t in state.items() if "embed_tokens" not in n},
        "flux_text_encoder_t5:FluxTextEncoderT5StateDictConverter",
    ),
    "flux.2 vae": Family(
        lazy_class("flux2_vae:Flux2VAE"),
        make_vae_call((1, 3, 16, 16), (1, 16, 2, 2)),
        {"latent_channels": 4, "block_out_channels": (8, 8), "layers_per_block": 1, "num_groups": 4},
    ),
    "qwen3": Family(
        wrap_small_model("z_image_text_encoder:ZImageTextEncoder", build_qwen3),
        call_with_mask,
        {},
        add_prefix("", ("lm_head.weight",)),
        "z_image_text_encoder:ZImageTextEncoderStateDictConverter",
    ),
}
