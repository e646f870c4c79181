"""Flow-matching runs of small pipelines on random examples, for tests of samples."""

import hashlib
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from zerostart.training.diffusion.flow import FlowMatching

TRAINING_TEXTS = ("a cat", "the sea", "a cat sees the sea")
ENCODED_FILE = "encoded.pt"
#: Classes whose ``in_channels`` counts four latents, which are one token.
PACKED = ("FluxTransformer2DModel", "QwenImageTransformer2DModel")


def encode(path: Path, *texts: str) -> Path:
    """Save encoded texts next to the pipeline, so that no rank loads its encoders."""
    from diffusers import DiffusionPipeline

    pipe = DiffusionPipeline.from_pretrained(path, transformer=None, vae=None)
    torch.save({text: _encode(pipe, text) for text in (*TRAINING_TEXTS, *texts, "")}, path / ENCODED_FILE)
    return path


def _encode(pipe: Any, text: str) -> dict[str, torch.Tensor]:
    """Encode one text, without a batch dimension."""
    with torch.no_grad():
        outputs = pipe.encode_prompt(text, max_sequence_length=12, **_OPTIONS.get(type(pipe).__name__, {}))
    match type(pipe).__name__:
        case "FluxPipeline":
            return {"prompt_embeds": outputs[0][0], "pooled_prompt_embeds": outputs[1][0]}
        case "QwenImagePipeline":
            mask = torch.ones(outputs[0].shape[1], dtype=torch.int64) if outputs[1] is None else outputs[1][0]
            return {"prompt_embeds": outputs[0][0], "prompt_embeds_mask": mask}
        case "HunyuanVideoPipeline":
            names = ("prompt_embeds", "pooled_prompt_embeds", "prompt_attention_mask")
            return {name: tensor[0] for name, tensor in zip(names, outputs, strict=True)}
        case "LTX2Pipeline":
            with torch.no_grad():
                video, audio, mask = pipe.connectors(*outputs[:2])
            return {"prompt_embeds": torch.cat([video, audio], -1)[0], "prompt_attention_mask": mask[0]}
    return {"prompt_embeds": outputs[0][0]}


_OPTIONS = {
    name: {"do_classifier_free_guidance": False} for name in ("WanPipeline", "ZImagePipeline", "LTX2Pipeline")
}


class Examples:
    """Random latents of one shape."""

    def __init__(self, path: Path, shape: Sequence[int]) -> None:
        self.encoded: dict[str, dict[str, torch.Tensor]] = torch.load(path / ENCODED_FILE)
        self.shape = tuple(shape)

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        return {
            "latents": torch.randn(self.shape, generator=generator),
            **self.encoded[TRAINING_TEXTS[index % len(TRAINING_TEXTS)]],
        }

    def digest(self) -> str:
        return hashlib.blake2b(repr(self.shape).encode()).hexdigest()

    def shapes(self) -> Sequence[Hashable]:
        return [self.shape] * len(self)

    def prompt(self, text: str) -> Mapping[str, torch.Tensor]:
        return self.encoded[text]


class RandomFlowMatching(FlowMatching):
    """Flow matching on `Examples` with the shape that the model's configuration gives."""

    def items(self, world: Any) -> Any:
        config = self.where.config
        channels = int(config["in_channels"]) // (4 if config["_class_name"] in PACKED else 1)
        frames = (2,) * ("3D" in config["_class_name"])
        return self.numbered(Examples(Path(self.config.model.source), (channels, *frames, 4, 4)))


def run(values: dict[str, Any]) -> Any:
    from zerostart.training.config.load import parse_config
    from zerostart.training.loop.runner import train

    return train(parse_config(values))
