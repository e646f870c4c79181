"""LTX-2: text to video, and a first frame to video. Its sound is not trained."""

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

#: Frames a second where nothing is said of them, as the pipeline has it.
_FRAME_RATE = 24.0
_TERMINAL = 0.1  # the last time of the scheduler of the released pipelines


class Ltx2Encoder(VideoEncoder):
    """``latents`` [C, F, H, W], ``frame_rate`` [], ``prompt_embeds`` and their ``prompt_attention_mask``.

    The embeddings are what the pipeline's connectors make of the text for the transformer: those for the
    video and those for the sound, side by side ([L, D + D']). What the text model gives is 49 layers wide.
    A column ``first_frame`` adds ``condition`` [C, 1, H, W], its latents.
    """

    takes: ClassVar[frozenset[str]] = frozenset({"video", "image", "first_frame"})

    @property
    def factors(self) -> tuple[int, int]:
        """Frames, and pixels each way, that are one of the latents."""
        pipe = self.pipe
        return int(pipe.vae_temporal_compression_ratio), int(pipe.vae_spatial_compression_ratio)

    def check(self, example: Example) -> None:
        """Raise ConfigError for a first frame of another size than the video's, too."""
        super().check(example)
        frame = self.first_frame(example)
        if frame is not None and frame.shape[-2:] != example.get("video", frame).shape[-2:]:
            raise ConfigError(
                "first_frame has another size than its video: set its size to `item` in media.columns"
            )

    def first_frame(self, example: Example) -> torch.Tensor | None:
        """What a video starts from, uint8 [3, H, W]; None: from its text alone."""
        return example.get("first_frame")

    def encode(self, example: Example, generator: torch.Generator) -> Encoded:
        rate = example.get(FRAME_RATE, _FRAME_RATE)
        found = super().encode(example, generator)
        if (frame := self.first_frame(example)) is not None:
            # The mode, and no draw, as the pipeline has it.
            found["condition"] = self.normalised(self.condition_latents(self.clip(frame[:, None])))[0]
        # A tensor without axes, float64, so that 23.976 is the same number in the cache and in the batch.
        found["frame_rate"] = torch.tensor(rate, dtype=torch.float64, device="cpu")
        return found

    def prompt(self, text: str) -> Encoded:
        layers, given, _, _ = self.pipe.encode_prompt(text, do_classifier_free_guidance=False, **self.text)
        # The connectors need to know on which side the mask's padding is, as the pipeline tells them.
        side = getattr(self.pipe.tokenizer, "padding_side", "left")
        video, audio, mask = self.pipe.connectors(layers, given, padding_side=side)
        return {
            "prompt_embeds": torch.cat([video, audio], dim=-1)[0],
            "prompt_attention_mask": mask[0],
        }

    def normalised(self, latents: torch.Tensor) -> torch.Tensor:
        vae = self.pipe.vae
        mean, deviation = (
            known.view(1, -1, 1, 1, 1).to(latents.device, latents.dtype)
            for known in (vae.latents_mean, vae.latents_std)
        )
        found: torch.Tensor = (latents - mean) * vae.config.scaling_factor / deviation
        return found


class Ltx2ImageEncoder(Ltx2Encoder):
    """The same of videos that all start from a frame: from ``first_frame``, else from their own first."""

    takes: ClassVar[frozenset[str]] = frozenset({"video", "first_frame"})
    needs: ClassVar[tuple[str, ...]] = ("video",)

    def first_frame(self, example: Example) -> torch.Tensor | None:
        """The column, or the first of the video."""
        found: torch.Tensor = example.get("first_frame", example["video"][:, 0])
        return found


class _Connected:
    """In the place of the connectors, for texts that have gone through them: takes the two halves apart."""

    def __init__(self, width: int) -> None:
        self._width = width

    def __call__(
        self, embeds: torch.Tensor, mask: torch.Tensor, **_: object
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        # The video's half first, as `Ltx2Encoder.prompt` joins them.
        return embeds[..., : self._width], embeds[..., self._width :], mask


class _Silent:
    """In the place of the vocoder: a sample has no sound."""

    def __call__(self, spectrograms: torch.Tensor) -> torch.Tensor:
        return spectrograms


class Ltx2(Family):
    """Latents are [C, F, H, W], one token each; a timestep goes from 0 to 1000.

    The transformer has a stream for the video and one for the sound that goes with it, which look at each
    other. The video is trained by itself, as in the maker's trainer for videos without sound: neither looks
    at the other, as in the pipeline's own call for its guidance by modality, and the stream of sound, which
    has to be called, gets one token.

    ``condition`` are the latents of a first frame that is given: it stands in the place of the noisy one, at
    time 0, and is no part of the loss.
    """

    name: ClassVar[str] = "ltx2"
    unit: ClassVar[float] = 1000.0
    classes: ClassVar[frozenset[str]] = frozenset({"LTX2VideoTransformer3DModel"})
    encoders: ClassVar[Mapping[str, type[Encoder]]] = {
        "LTX2Pipeline": Ltx2Encoder,
        "LTX2ImageToVideoPipeline": Ltx2ImageEncoder,
    }
    shift: ClassVar[float] = exp(2.05)
    keys: ClassVar[frozenset[str]] = frozenset(
        {"prompt_embeds", "prompt_attention_mask", "frame_rate", "condition"}
    )
    required: ClassVar[frozenset[str]] = frozenset({"prompt_embeds", "prompt_attention_mask"})
    # By the names of diffusers' modules: the stream of sound and both attentions between the streams.
    untrained: ClassVar[tuple[str, ...]] = ("*audio*", "av_cross_attn_*", "*a2v*")
    decoders: ClassVar[tuple[str, ...]] = ("vae", "audio_vae")

    def tokens(self, shape: Sequence[int]) -> int:
        """One latent each."""
        _, frames, height, width = shape
        return frames * height * width

    def shift_at(self, tokens: int) -> float:
        """As the scheduler of the released pipelines has it."""
        return linear_shift(tokens, 1024, 4096, 0.95, 2.05)

    def schedule(self, shift: float) -> torch.Tensor:
        """Stretched to its last time."""
        times = super().schedule(shift)
        # Linear in `1 - t`, so that 1 stays 1 and the last time becomes the terminal one.
        return 1 - (1 - times) * (1 - _TERMINAL) / (1 - times[-1])

    def check(self, item: Tensors) -> None:
        """As wide as the transformer takes it. Raises ConfigError."""
        config = self.config
        if config.get("patch_size", 1) != 1 or config.get("patch_size_t", 1) != 1:
            raise ConfigError(f"{self.name} takes transformers with one token for each latent (patch_size 1)")
        if (channels := len(item["latents"])) != (wanted := config.get("in_channels", 128)):
            raise ConfigError(
                f"examples have latents of {channels} channels, but the transformer takes {wanted}: they "
                "were encoded for another model"
            )
        width, most = item["prompt_embeds"].shape[-1], sum(self._widths)
        if width != most:
            raise ConfigError(
                f"examples have prompt_embeds of width {width}, but the transformer takes {most} (for video "
                "and sound, side by side): they were encoded for another model"
            )

    def conditions(self, items: Sequence[Tensors]) -> Conditions:
        """With one number for the frame rate, which is told to the transformer for a whole batch."""
        found = super().conditions(items)
        # Without a rate in any example the pipeline's default holds for the batch.
        rates = set(found.pop("frame_rate", torch.tensor([_FRAME_RATE], device="cpu")).tolist())
        if len(rates) > 1:
            listed = " and ".join(map(str, sorted(rates)))
            raise ConfigError(
                f"examples of one batch have {listed} frames a second, which {self.name} cannot have in one; "
                "set media.frame_rate, or train.batch_size=1"
            )
        return {**found, "frame_rate": rates.pop()}

    @property
    def _widths(self) -> tuple[int, int]:
        config = self.config
        if config.get("use_prompt_embeddings", True):
            return (config.get("caption_channels", 3840),) * 2
        return config.get("cross_attention_dim", 4096), config.get("audio_cross_attention_dim", 2048)

    def stand_ins(self) -> Mapping[str, Callable[..., object]]:
        return {"connectors": _Connected(self._widths[0]), "vocoder": _Silent()}

    def velocity(
        self, model: nn.Module, latents: torch.Tensor, t: torch.Tensor, conditions: Conditions
    ) -> torch.Tensor:
        video, audio = conditions["prompt_embeds"].split(self._widths, dim=-1)
        mask, timestep = conditions["prompt_attention_mask"], t * self.unit
        frames, height, width = latents.shape[2:]
        given, of_video = latents, timestep
        if (condition := conditions.get("condition")) is not None:
            given = torch.cat([condition, latents[:, :, condition.shape[2] :]], dim=2)
            # One time a token, [batch, tokens]: those of the frame that is given have none.
            noisy = torch.ones_like(latents[:, 0])
            noisy[:, : condition.shape[2]] = 0
            of_video = timestep[:, None] * noisy.flatten(1)
        # [batch, one token, channels]: rotary positions and attention of the sound need at least one token.
        silence = latents.new_zeros(len(latents), 1, self.config.get("audio_in_channels", 128))
        predicted: torch.Tensor = model(
            # Tokens in the order frames, rows, columns; with patches of one latent nothing else has to be
            # packed.
            hidden_states=given.flatten(2).transpose(1, 2),
            audio_hidden_states=silence,
            encoder_hidden_states=video,
            audio_encoder_hidden_states=audio,
            timestep=of_video,
            audio_timestep=timestep,
            # For LTX-2.3, which modulates the embeddings of texts by it; the pipeline gives the same value
            # twice.
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

    def trained(self, values: torch.Tensor, conditions: Conditions) -> torch.Tensor:
        """All frames but the one that is given."""
        condition = conditions.get("condition")
        return values if condition is None else values[:, :, condition.shape[2] :]
