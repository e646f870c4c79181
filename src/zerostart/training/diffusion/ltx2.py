"""LTX-2: text or a first frame to video, without training its sound."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import exp
from typing import ClassVar

import torch
from torch import nn

from zerostart.errors import ConfigError
from zerostart.training.data.items import FRAME_RATE
from zerostart.training.diffusion.encoder import Encoded, Encoder, Example, VideoEncoder
from zerostart.training.diffusion.family import Conditions, Family, Tensors, linear_shift

#: Default frames a second of the pipeline.
_FRAME_RATE = 24.0


class Ltx2Encoder(VideoEncoder):
    """Encodes ``latents`` [C, F, H, W], ``frame_rate`` [] and the text.

    ``prompt_embeds`` [L, D + D'] are the outputs of the pipeline's connectors for video and sound, with
    ``prompt_attention_mask``. A column ``first_frame`` adds its latents, ``condition`` [C, 1, H, W].
    """

    takes: ClassVar[frozenset[str]] = frozenset({"video", "image", "first_frame"})

    @property
    def factors(self) -> tuple[int, int]:
        """Frames, and pixels of height and width, of one latent."""
        pipe = self.pipe
        return int(pipe.vae_temporal_compression_ratio), int(pipe.vae_spatial_compression_ratio)

    def check(self, example: Example) -> None:
        """Raise ConfigError also for a first frame of another size than the video's."""
        super().check(example)
        self.check_size(example, "first_frame")

    def first_frame(self, example: Example) -> torch.Tensor | None:
        """Return the frame to start from, uint8 [3, H, W]; None for text to video."""
        return example.get("first_frame")

    def encode(self, example: Example, generator: torch.Generator) -> Encoded:
        rate = example.get(FRAME_RATE, _FRAME_RATE)
        encoded = super().encode(example, generator)
        if (frame := self.first_frame(example)) is not None:
            encoded["condition"] = self.normalise(self.condition_latents(self.clip(frame[:, None])))[0]
        # float64, so that 23.976 stays the same number.
        encoded["frame_rate"] = torch.tensor(rate, dtype=torch.float64, device="cpu")
        return encoded

    def prompt(self, text: str) -> Encoded:
        layers, mask, _, _ = self.pipe.encode_prompt(text, do_classifier_free_guidance=False, **self.text)
        # The connectors need the side of the mask's padding.
        side = getattr(self.pipe.tokenizer, "padding_side", "left")
        video, audio, mask = self.pipe.connectors(layers, mask, padding_side=side)
        return {
            "prompt_embeds": torch.cat([video, audio], dim=-1)[0],
            "prompt_attention_mask": mask[0],
        }

    def normalise(self, latents: torch.Tensor) -> torch.Tensor:
        vae = self.pipe.vae
        mean, deviation = (
            known.view(1, -1, 1, 1, 1).to(latents.device, latents.dtype)
            for known in (vae.latents_mean, vae.latents_std)
        )
        scaled: torch.Tensor = (latents - mean) * vae.config.scaling_factor / deviation
        return scaled


class Ltx2ImageEncoder(Ltx2Encoder):
    """Encodes videos that start from ``first_frame``, or from their first frame."""

    takes: ClassVar[frozenset[str]] = frozenset({"video", "first_frame"})
    needs: ClassVar[tuple[str, ...]] = ("video",)

    def first_frame(self, example: Example) -> torch.Tensor | None:
        """Return the column, or the first frame of the video."""
        frame: torch.Tensor = example.get("first_frame", example["video"][:, 0])
        return frame


class _SplitEmbeds:
    """Replaces the connectors for encoded texts: splits embeddings of video and sound."""

    def __init__(self, width: int) -> None:
        self._width = width

    def __call__(
        self, embeds: torch.Tensor, mask: torch.Tensor, **_: object
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return embeds[..., : self._width], embeds[..., self._width :], mask


class _NoVocoder:
    """Replaces the vocoder: a sample has no sound."""

    def __call__(self, spectrograms: torch.Tensor) -> torch.Tensor:
        return spectrograms


class Ltx2(Family):
    """LTX-2: latents [C, F, H, W], one token each; timestep from 0 to 1000.

    The transformer has streams for video and sound, which attend to each other. As in the maker's trainer for
    videos without sound, the video is trained without the sound: attention between them is off, as in the
    pipeline's guidance by modality, and the stream of sound gets one token.

    ``condition`` are the latents of a first frame, which replaces the noisy one at time 0 and is not part of
    the loss.
    """

    name: ClassVar[str] = "ltx2"
    unit: ClassVar[float] = 1000.0
    classes: ClassVar[frozenset[str]] = frozenset({"LTX2VideoTransformer3DModel"})
    encoders: ClassVar[Mapping[str, type[Encoder]]] = {
        "LTX2Pipeline": Ltx2Encoder,
        "LTX2ImageToVideoPipeline": Ltx2ImageEncoder,
    }
    shift: ClassVar[float] = exp(2.05)
    last_time: ClassVar[float | None] = 0.1  # of the scheduler of the released pipelines
    keys: ClassVar[frozenset[str]] = frozenset(
        {"prompt_embeds", "prompt_attention_mask", "frame_rate", "condition"}
    )
    required: ClassVar[frozenset[str]] = frozenset({"prompt_embeds", "prompt_attention_mask"})
    # The stream of sound and both attentions between the streams, in diffusers' module names.
    untrained: ClassVar[tuple[str, ...]] = ("*audio*", "av_cross_attn_*", "*a2v*")
    decoders: ClassVar[tuple[str, ...]] = ("vae", "audio_vae")

    def shift_at(self, tokens: int) -> float:
        """Return the shift of the released pipelines' scheduler."""
        return linear_shift(tokens, 1024, 4096, 0.95, 2.05)

    def check(self, item: Tensors) -> None:
        """Raise ConfigError for latents or embeddings of another width."""
        config = self.config
        if config.get("patch_size", 1) != 1 or config.get("patch_size_t", 1) != 1:
            raise ConfigError(f"{self.name} takes transformers with one token for each latent (patch_size 1)")
        self._check_channels(len(item["latents"]), config.get("in_channels", 128))
        width, expected = item["prompt_embeds"].shape[-1], sum(self._widths)
        if width != expected:
            raise ConfigError(
                f"examples have prompt_embeds of width {width}, but the transformer takes {expected} (for "
                "video and sound, side by side): they were encoded for another model"
            )

    def conditions(self, items: Sequence[Tensors]) -> Conditions:
        """Return the inputs, with one frame rate for the batch."""
        inputs = super().conditions(items)
        rates = set(inputs.pop("frame_rate", torch.tensor([_FRAME_RATE], device="cpu")).tolist())
        if len(rates) > 1:
            listed = " and ".join(map(str, sorted(rates)))
            raise ConfigError(
                f"examples of one batch have {listed} frames a second, which {self.name} cannot have in one; "
                "set media.frame_rate, or train.batch_size=1"
            )
        return {**inputs, "frame_rate": rates.pop()}

    @property
    def _widths(self) -> tuple[int, int]:
        config = self.config
        if config.get("use_prompt_embeddings", True):
            return (config.get("caption_channels", 3840),) * 2
        return config.get("cross_attention_dim", 4096), config.get("audio_cross_attention_dim", 2048)

    def stand_ins(self) -> Mapping[str, Callable[..., object]]:
        return {"connectors": _SplitEmbeds(self._widths[0]), "vocoder": _NoVocoder()}

    def velocity(
        self, model: nn.Module, latents: torch.Tensor, t: torch.Tensor, conditions: Conditions
    ) -> torch.Tensor:
        video, audio = conditions["prompt_embeds"].split(self._widths, dim=-1)
        mask, timestep = conditions["prompt_attention_mask"], t * self.unit
        frames, height, width = latents.shape[2:]
        video_latents, video_timestep = latents, timestep
        if (condition := conditions.get("condition")) is not None:
            video_latents = torch.cat([condition, latents[:, :, condition.shape[2] :]], dim=2)
            # One time a token, [batch, tokens]: 0 in the given frame.
            noisy = torch.ones_like(latents[:, 0])
            noisy[:, : condition.shape[2]] = 0
            video_timestep = timestep[:, None] * noisy.flatten(1)
        # [batch, one token, channels]: the stream of sound needs at least one token.
        silence = latents.new_zeros(len(latents), 1, self.config.get("audio_in_channels", 128))
        predicted: torch.Tensor = model(
            # Tokens in the order frames, rows, columns.
            hidden_states=video_latents.flatten(2).transpose(1, 2),
            audio_hidden_states=silence,
            encoder_hidden_states=video,
            audio_encoder_hidden_states=audio,
            timestep=video_timestep,
            audio_timestep=timestep,
            # LTX-2.3 modulates the embeddings of texts by it.
            sigma=timestep,
            encoder_attention_mask=mask,
            audio_encoder_attention_mask=mask,
            num_frames=frames,
            height=height,
            width=width,
            fps=conditions["frame_rate"],
            audio_num_frames=1,
            isolate_modalities=True,
            use_cross_timestep=True,
            return_dict=False,
        )[0]
        return predicted.transpose(1, 2).reshape(latents.shape)

    def loss_values(self, values: torch.Tensor, conditions: Conditions) -> torch.Tensor:
        """Return all frames except the given one."""
        condition = conditions.get("condition")
        return values if condition is None else values[:, :, condition.shape[2] :]
