"""Autoencoders and encoders of DiffSynth-Studio's own classes."""

import functools
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import nn

from tests.diffusion.family import Family, noise, prefixed, without
from tests.diffusion.shrunk import of

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


def video(frames: int, size: int = 32) -> torch.Tensor:
    return noise(3, frames, size, size, seed=frames)


def wan_vae(depth: int, latent: int) -> Callable[[Any], Any]:
    """9 and 33 frames, in turn, there and back."""

    def call(model: Any) -> Any:
        there = [model.encode([video(frames)], "cpu") for frames in (9, 33)]
        return [*there, *(model.decode([noise(depth, t, latent, latent)], "cpu") for t in (3, 9))]

    return call


def small_wan_vae(name: str, inner: str, **config: Any) -> Callable[[], type[nn.Module]]:
    """Only the inner model of the class has a width."""

    def found() -> type[nn.Module]:
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

    return functools.cache(found)


def qwen_vae(model: Any) -> Any:
    """Images, as frames of one."""
    there = [model.encode(noise(1, 3, 16, 16, seed=s)) for s in (1, 2)]
    return [*there, *(model.decode(noise(1, 16, 2, 2, seed=s)) for s in (1, 2))]


def both(shape: tuple[int, ...], latent: tuple[int, ...]) -> Callable[[Any], Any]:
    def call(model: Any) -> Any:
        return [*(model.encode(noise(*shape, seed=s)) for s in (1, 2)), model.decode(noise(*latent))]

    return call


def tokens(model: Any) -> Any:
    return model(torch.tensor([[3, 7, 11, 2, 1]]))


def masked_tokens(model: Any) -> Any:
    ids = torch.tensor([[3, 7, 11, 2, 1]])
    return model(input_ids=ids, attention_mask=torch.ones_like(ids), output_hidden_states=True)


def wrapping(path: str, inner: Callable[[], nn.Module]) -> Callable[[], type[nn.Module]]:
    """A class that is a wrapper of ``self.model``, with a small one."""

    def found() -> type[nn.Module]:
        kind = of(path)()

        class Small(kind):  # type: ignore[misc, valid-type]
            def __init__(self) -> None:
                nn.Module.__init__(self)
                self.model = inner()
                text = getattr(self.model.config, "text_config", None)
                if text is not None:
                    self.lm_head = nn.Linear(text.hidden_size, text.vocab_size, bias=False)

        Small.__module__ = kind.__module__
        return Small

    return functools.cache(found)


def qwen3(**more: Any) -> nn.Module:
    from transformers import Qwen3Config, Qwen3Model

    return Qwen3Model(Qwen3Config(**{**TEXT, **more}))


def qwen25vl(**more: Any) -> nn.Module:
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLModel

    rope = {"type": "default", "rope_type": "default", "mrope_section": [2, 2, 2], "rope_theta": 10000.0}
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "out_hidden_size": 24}
    return Qwen2_5_VLModel(
        Qwen2_5_VLConfig(text_config={**TEXT, "rope_scaling": rope, **more}, vision_config=vision)
    )


def small_t5(vocabulary: int = 61) -> type[nn.Module]:
    from transformers import T5Config, T5EncoderModel

    kind = of("flux_text_encoder_t5:FluxTextEncoderT5")()

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
        small_wan_vae("WanVideoVAE", "VideoVAE_", dim=8),
        wan_vae(4, 2),
        {},
        lambda state: {"model_state": without("model.")(state)},
        "wan_video_vae:WanVideoVAEStateDictConverter",
        pth=True,
    ),
    "wan umt5": Family(
        of("wan_video_text_encoder:WanTextEncoder"),
        tokens,
        {"vocab": 61, "dim": 24, "dim_attn": 24, "dim_ffn": 32, "num_heads": 2, "num_layers": 2},
        pth=True,
    ),
    "qwen-image vae": Family(
        of("qwen_image_vae:QwenImageVAE"), qwen_vae, {"base_dim": 8, "num_res_blocks": 1}
    ),
    "qwen2.5-vl": Family(
        wrapping("qwen_image_text_encoder:QwenImageTextEncoder", qwen25vl),
        masked_tokens,
        {},
        lambda state: {
            n.replace("model.visual", "visual").replace("model.language_model", "model"): t
            for n, t in state.items()
        },
        "qwen_image_text_encoder:QwenImageTextEncoderStateDictConverter",
    ),
    "flux.1 vae encoder": Family(of("flux_vae:FluxVAEEncoder", _FLUX_VAE), lambda m: m(noise(1, 3, 16, 16))),
    "flux.1 clip": Family(
        of("flux_text_encoder_clip:FluxTextEncoderClip"),
        tokens,
        {
            "embed_dim": 24,
            "vocab_size": 61,
            "max_position_embeddings": 5,
            "num_encoder_layers": 2,
            "encoder_intermediate_size": 32,
        },
    ),
    "flux.1 t5": Family(
        small_t5,
        tokens,
        {},
        lambda state: {n: t for n, t in state.items() if "embed_tokens" not in n},
        "flux_text_encoder_t5:FluxTextEncoderT5StateDictConverter",
    ),
    "flux.2 vae": Family(
        of("flux2_vae:Flux2VAE"),
        both((1, 3, 16, 16), (1, 16, 2, 2)),
        {"latent_channels": 4, "block_out_channels": (8, 8), "layers_per_block": 1, "num_groups": 4},
    ),
    "qwen3": Family(
        wrapping("z_image_text_encoder:ZImageTextEncoder", qwen3),
        masked_tokens,
        {},
        prefixed("", ("lm_head.weight",)),
        "z_image_text_encoder:ZImageTextEncoderStateDictConverter",
    ),
}
