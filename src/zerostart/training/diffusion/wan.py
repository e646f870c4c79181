"""Wan 2.1 and 2.2: text or frames to video, and control by VACE."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from zerostart.errors import ConfigError
from zerostart.training.config.configuration import CacheConfig
from zerostart.training.data.media import to_picture
from zerostart.training.diffusion.encoder import Encoded, Encoder, Example, VideoEncoder, split_frames
from zerostart.training.diffusion.family import Conditions, Family, Tensors

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline
    from PIL.Image import Image

#: Height and width of the transformer's patches, in latents.
_PATCH = 2
#: Number of last tokens that diffusers' Wan treats as text; those before are of pictures.
_TEXT = 512


class TextToVideo(VideoEncoder):
    """Encodes ``latents`` [C, F, H, W] and ``prompt_embeds``."""

    patch: ClassVar[int] = _PATCH

    def prompt(self, text: str) -> Encoded:
        embeds, _ = self.pipe.encode_prompt(text, do_classifier_free_guidance=False, **self.text)
        return {"prompt_embeds": embeds[0]}

    def normalise(self, latents: torch.Tensor) -> torch.Tensor:
        """Normalise latents for the transformer, in float32 as in the pipelines."""
        config, shape = self.pipe.vae.config, (1, -1, 1, 1, 1)
        mean = torch.tensor(config.latents_mean, device=latents.device).view(shape)
        scale = 1.0 / torch.tensor(config.latents_std, device=latents.device).view(shape)
        # The pipeline multiplies by the reciprocal.
        return (latents.float() - mean) * scale


def _check_texts(kind: str) -> None:
    """Raise ConfigError without ftfy, which these pipelines use for their texts."""
    if importlib.util.find_spec("ftfy") is None:
        raise ConfigError(f"diffusers' {kind} needs ftfy for its texts: pip install ftfy")


class ImageToVideo(TextToVideo):
    """Adds ``condition`` [C', F, H, W], masks and latents of the given frames.

    An image encoder adds their ``image_embeds`` [L, D]. If the pipeline puts the first frame among the
    latents (``expand_timesteps``), ``condition`` is that latent frame, [C, 1, H, W]. Without a column
    ``first_frame`` it is the first frame of the video.
    """

    takes: ClassVar[frozenset[str]] = frozenset({"video", "first_frame", "last_frame"})
    needs: ClassVar[tuple[str, ...]] = ("video",)

    def __init__(self, pipe: DiffusionPipeline, settings: CacheConfig) -> None:
        super().__init__(pipe, settings)
        _check_texts(self.kind)
        # Only Wan 2.1 has an image encoder.
        if pipe.image_encoder is not None and (length := self.text["max_sequence_length"]) != _TEXT:
            raise ConfigError(
                f"cache.max_sequence_length is {length}, but diffusers' {self.kind} with an image "
                f"encoder uses the last {_TEXT} embeddings for the text and the others for pictures: "
                "leave it out"
            )

    def check(self, example: Example) -> None:
        """Raise ConfigError also for frames of another size than the video's."""
        super().check(example)
        self.check_size(example, "first_frame", "last_frame")
        if self._frames_given(example)[1] is not None and self.pipe.config.expand_timesteps:
            raise ConfigError(
                f"this {self.kind} takes no last frame (expand_timesteps): leave cache.last_frame out"
            )

    def encode(self, example: Example, generator: torch.Generator) -> Encoded:
        encoded = super().encode(example, generator)
        first, last = self._frames_given(example)
        height, width = first.shape[-2:]
        _, condition, *_ = self.pipe.prepare_latents(
            self._frame(first),
            1,
            self.pipe.vae.config.z_dim,
            height,
            width,
            self.frames(example),
            torch.float32,
            self.device,
            None,
            # Latents, so that no noise is drawn.
            torch.zeros(1, device=self.device),
            None if last is None else self._frame(last),
        )
        encoded["condition"] = condition[0]
        if self.pipe.image_encoder is not None:
            pictures = [to_picture(frame) for frame in (first, last) if frame is not None]
            # The frames follow one another on the axis of positions.
            encoded["image_embeds"] = self.pipe.encode_image(pictures, self.device).flatten(0, 1)
        return encoded

    def sample(self, text: str, pictures: Sequence[Image]) -> Encoded:
        """Return the tensors of a text, and ``image_embeds`` [frames, L, D] of an image encoder."""
        encoded = self.prompt(text)
        if self.pipe.image_encoder is not None:
            encoded["image_embeds"] = self.pipe.encode_image(list(pictures), self.device)
        return encoded

    def _frame(self, frame: torch.Tensor) -> torch.Tensor:
        """Convert a frame to [1, 3, H, W] for the pipeline."""
        pixels: torch.Tensor = self.pipe.video_processor.preprocess(to_picture(frame))
        return pixels.to(self.device, torch.float32)

    def _frames_given(self, example: Example) -> tuple[torch.Tensor, torch.Tensor | None]:
        video = example["video"]
        first, last = example.get("first_frame", video[:, 0]), example.get("last_frame")
        # The column comes before the setting.
        return first, video[:, -1] if last is None and self.settings.last_frame else last


class Vace(TextToVideo):
    """Adds ``control_latents`` [C', F, H, W] of the control video's halves and its mask.

    Reference pictures come before the frames, also in ``latents``.
    """

    takes: ClassVar[frozenset[str]] = frozenset({"video", "control_video", "control_mask", "reference_image"})
    needs: ClassVar[tuple[str, ...]] = ("video", "control_video or reference_image")

    def __init__(self, pipe: DiffusionPipeline, settings: CacheConfig) -> None:
        super().__init__(pipe, settings)
        _check_texts(self.kind)
        # The pipeline reads the patch size of its transformer, which is not loaded.
        pipe.transformer = SimpleNamespace(config=SimpleNamespace(patch_size=(1, _PATCH, _PATCH)))

    def check(self, example: Example) -> None:
        """Raise ConfigError also for controls of another size than the video's."""
        super().check(example)
        video = example["video"]
        for name in ("control_video", "control_mask"):
            if name in example and example[name].shape[1:] != video.shape[1:]:
                raise ConfigError(
                    f"{name} is {list(example[name].shape[1:])} (frames, height, width), but its video is "
                    f"{list(video.shape[1:])}: they must be equal"
                )
        for picture in example.get("reference_image", ()):
            if picture.shape[-2:] != video.shape[-2:]:
                raise ConfigError(
                    "reference_image has another size than its video; say so in media.columns: "
                    "reference_image: {kind: images, size: item}"
                )

    def encode(self, example: Example, generator: torch.Generator) -> Encoded:
        encoded = super().encode(example, generator)
        frames, height, width = example["video"].shape[1:]
        control, mask = (
            split_frames(example[n]) if n in example else None for n in ("control_video", "control_mask")
        )
        references = [to_picture(picture) for picture in example.get("reference_image", ())]
        # The same functions and arguments as in a call of the pipeline.
        clip, shown, pictures = self.pipe.preprocess_conditions(
            control, mask, references or None, 1, height, width, frames, torch.float32, self.device
        )
        latents = self.pipe.prepare_video_latents(clip, shown, pictures, None, self.device)
        masks = self.pipe.prepare_masks(shown, pictures)
        encoded["control_latents"] = torch.cat([latents, masks], dim=1)[0]
        for picture in example.get("reference_image", ()):
            # Each is prepended, as in the pipeline: VACE reconstructs its references.
            reference = self.normalise(self.condition_latents(self.clip(picture[:, None])))
            encoded["latents"] = torch.cat([reference[0], encoded["latents"]], dim=1)
        return encoded


class Wan(Family):
    """Wan: latents [C, F, H, W]; timestep from 0 to 1000.

    ``condition`` has further input channels of the transformer: the given frames and their mask. Without such
    channels (Wan 2.2 5B) it is the latent first frame, which replaces the noisy one at time 0 and is not part
    of the loss. ``image_embeds`` (of two frames one after the other) are used by transformers with
    ``image_dim``.
    """

    name: ClassVar[str] = "wan"
    unit: ClassVar[float] = 1000.0
    classes: ClassVar[frozenset[str]] = frozenset({"WanTransformer3DModel", "WanVACETransformer3DModel"})
    encoders: ClassVar[Mapping[str, type[Encoder]]] = {
        "WanPipeline": TextToVideo,
        "WanImageToVideoPipeline": ImageToVideo,
        "WanVACEPipeline": Vace,
    }
    shift: ClassVar[float] = 5.0
    keys: ClassVar[frozenset[str]] = frozenset(
        {"prompt_embeds", "image_embeds", "condition", "control_latents"}
    )

    def __init__(self, config: Mapping[str, Any], guidance: float = 1.0) -> None:
        super().__init__(config, guidance)
        self.patch = tuple(config.get("patch_size", (1, 2, 2)))
        self._channels: int = config.get("in_channels", 16)

    def check(self, item: Tensors) -> None:
        """Raise ConfigError for other channels or frames, and for VACE without controls."""
        if "vace_layers" in self.config and "control_latents" not in item:
            raise ConfigError("an example has no control_latents, which the transformer of VACE needs")
        places = self.config.get("pos_embed_seq_len")
        if places is not None and (found := len(item.get("image_embeds", ()))) != places:
            raise ConfigError(
                f"an example has image_embeds of {found} positions, but the transformer takes "
                f"{places}, for a first and a last frame: set cache.last_frame, or name a column "
                "last_frame"
            )
        # A condition adds channels unless it replaces a frame (Wan 2.2 5B).
        count = len(item["latents"])
        if "condition" in item and count != self._channels:
            count += len(item["condition"])
        self._check_channels(count, self._channels)

    def velocity(
        self, model: nn.Module, latents: torch.Tensor, t: torch.Tensor, conditions: Conditions
    ) -> torch.Tensor:
        inputs, timestep = latents, t * self.unit
        condition = conditions.get("condition")
        if condition is not None and self._first_frame(latents):
            # Given frames replace the noisy ones, at time 0.
            frames = condition.shape[2]
            inputs = torch.cat([condition, latents[:, :, frames:]], dim=2)
            timestep = self._after(timestep, latents, frames)
        elif condition is not None:
            # Latents first, then mask and latents of the given frames.
            inputs = torch.cat([latents, condition], dim=1)
        optional: dict[str, object] = {}
        image = conditions.get("image_embeds")
        if image is not None and self.config.get("image_dim") is not None:
            if self.config.get("pos_embed_seq_len") is not None:  # the transformer joins two frames itself
                image = image.unflatten(1, (2, -1)).flatten(0, 1)
            optional["encoder_hidden_states_image"] = image
        if (control := conditions.get("control_latents")) is not None:
            optional["control_hidden_states"] = control
        predicted: torch.Tensor = model(
            hidden_states=inputs,
            timestep=timestep,
            encoder_hidden_states=conditions["prompt_embeds"],
            **optional,
            return_dict=False,
        )[0]
        return predicted

    def loss_values(self, values: torch.Tensor, conditions: Conditions) -> torch.Tensor:
        """Return all frames except the given ones."""
        condition = conditions.get("condition")
        if condition is None or not self._first_frame(values):
            return values
        return values[:, :, condition.shape[2] :]

    def _first_frame(self, latents: torch.Tensor) -> bool:
        return bool(latents.shape[1] == self._channels)

    def _after(self, timestep: torch.Tensor, latents: torch.Tensor, frames: int) -> torch.Tensor:
        """Return a timestep for each token, [batch, tokens]: 0 in the first ``frames``."""
        counts = [size // patch for size, patch in zip(latents.shape[2:], self.patch, strict=True)]
        # Tokens in the order frames, rows, columns.
        whole = timestep[:, None, None].expand(len(timestep), counts[0], counts[1] * counts[2]).clone()
        whole[:, : frames // self.patch[0]] = 0
        return whole.flatten(1)
