"""Wan 2.1 and 2.2: text, picture, first and last frame to video; control by VACE."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from math import prod
from types import SimpleNamespace
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import nn

from zerostart.errors import ConfigError
from zerostart.training.config.configuration import CacheConfig
from zerostart.training.data.media import as_picture
from zerostart.training.diffusion.encoder import Encoded, Encoder, Example, VideoEncoder, frames_of
from zerostart.training.diffusion.family import Conditions, Family, Tensors

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline
    from PIL.Image import Image

#: Pixels of the latents in a patch of the transformer, each way.
_PATCH = 2
#: The last tokens, which the attention of diffusers' Wan takes for the text, the others being of pictures.
_TEXT = 512


class TextToVideo(VideoEncoder):
    """``latents`` [C, F, H, W] and ``prompt_embeds``; a picture is a video of one frame."""

    patch: ClassVar[int] = _PATCH

    def prompt(self, text: str) -> Encoded:
        embeds, _ = self.pipe.encode_prompt(text, do_classifier_free_guidance=False, **self.text)
        return {"prompt_embeds": embeds[0]}

    def normalised(self, latents: torch.Tensor) -> torch.Tensor:
        """Latents as the transformer sees them, in float32 as in the pipelines."""
        config, shape = self.pipe.vae.config, (1, -1, 1, 1, 1)
        mean = torch.tensor(config.latents_mean, device=latents.device).view(shape)
        scale = 1.0 / torch.tensor(config.latents_std, device=latents.device).view(shape)
        # By the reciprocal, as the pipeline: its `latents_std` holds 1 over the deviation under that name.
        return (latents.float() - mean) * scale


def _check_texts(kind: str) -> None:
    """Raise ConfigError where diffusers' pipelines of these classes could not clean their texts.

    Unlike that of text to video they do not ask whether ftfy is there.
    """
    if importlib.util.find_spec("ftfy") is None:
        raise ConfigError(f"diffusers' {kind} needs ftfy for its texts: pip install ftfy")


class ImageToVideo(TextToVideo):
    """Adds ``condition`` [C', F, H, W], masks and latents of the frames that are given.

    Where there is an image encoder it adds ``image_embeds`` [L, D] of these frames.

    Where the pipeline puts the first frame among the latents (``expand_timesteps``), ``condition`` is that
    one latent frame, [C, 1, H, W]. Without a column ``first_frame`` it is the first of the video.
    """

    takes: ClassVar[frozenset[str]] = frozenset({"video", "first_frame", "last_frame"})
    needs: ClassVar[tuple[str, ...]] = ("video",)

    def __init__(self, pipe: DiffusionPipeline, settings: CacheConfig) -> None:
        super().__init__(pipe, settings)
        _check_texts(self.kind)
        # Wan 2.1 starts from pictures with an image encoder; Wan 2.2 has none, and any length of text will
        # do.
        if pipe.image_encoder is not None and (length := self.text["max_sequence_length"]) != _TEXT:
            raise ConfigError(
                f"cache.max_sequence_length is {length}, but diffusers' {self.kind} with an image "
                f"encoder uses the last {_TEXT} embeddings for the text and the others for pictures: "
                "leave it out"
            )

    def check(self, example: Example) -> None:
        """Raise ConfigError for frames of another size than the video's, too."""
        super().check(example)
        first, last = self._given(example)
        for name, frame in (("first_frame", first), ("last_frame", last)):
            if frame is not None and frame.shape[-2:] != example["video"].shape[-2:]:
                raise ConfigError(
                    f"{name} has another size than its video: set its size to `item` in media.columns"
                )
        if last is not None and self.pipe.config.expand_timesteps:
            raise ConfigError(
                f"this {self.kind} takes no last frame (expand_timesteps): leave cache.last_frame out"
            )

    def encode(self, example: Example, generator: torch.Generator) -> Encoded:
        found = super().encode(example, generator)
        first, last = self._given(example)
        height, width = first.shape[-2:]
        # Of the noise that it makes nothing is wanted: none is drawn where there are latents.
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
            # The latents, in the place of the generator's noise.
            torch.zeros(1, device=self.device),
            None if last is None else self._frame(last),
        )
        found["condition"] = condition[0]
        if self.pipe.image_encoder is not None:
            pictures = [as_picture(frame) for frame in (first, last) if frame is not None]
            # One frame after the other in one axis of positions: an example has no axis of frames.
            found["image_embeds"] = self.pipe.encode_image(pictures, self.device).flatten(0, 1)
        return found

    def sample(self, text: str, pictures: Sequence[Image]) -> Encoded:
        """Adds ``image_embeds`` [frames, L, D] of the frames, where there is an image encoder."""
        found = self.prompt(text)
        if self.pipe.image_encoder is not None:
            found["image_embeds"] = self.pipe.encode_image(list(pictures), self.device)
        return found

    def _frame(self, frame: torch.Tensor) -> torch.Tensor:
        """A frame as the pipeline takes it, [1, 3, H, W]."""
        found: torch.Tensor = self.pipe.video_processor.preprocess(as_picture(frame))
        return found.to(self.device, torch.float32)

    def _given(self, example: Example) -> tuple[torch.Tensor, torch.Tensor | None]:
        video = example["video"]
        first, last = example.get("first_frame", video[:, 0]), example.get("last_frame")
        # None: the model is given no last frame; a column of its own counts before the setting.
        return first, video[:, -1] if last is None and self.settings.last_frame else last


class Vace(TextToVideo):
    """Adds ``control_latents`` [C', F, H, W]: the control video in two halves by its mask, and the mask.

    Reference pictures come before the frames, in the latents as well.
    """

    takes: ClassVar[frozenset[str]] = frozenset({"video", "control_video", "control_mask", "reference_image"})
    needs: ClassVar[tuple[str, ...]] = ("video", "control_video or reference_image")

    def __init__(self, pipe: DiffusionPipeline, settings: CacheConfig) -> None:
        super().__init__(pipe, settings)
        _check_texts(self.kind)
        # The pipeline asks its transformer, which is not there, for the size of a patch.
        pipe.transformer = SimpleNamespace(config=SimpleNamespace(patch_size=(1, _PATCH, _PATCH)))

    def check(self, example: Example) -> None:
        """Raise ConfigError for controls of another size than the video's, too."""
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
        found = super().encode(example, generator)
        frames, height, width = example["video"].shape[1:]
        control, mask = (
            frames_of(example[n]) if n in example else None for n in ("control_video", "control_mask")
        )
        references = [as_picture(picture) for picture in example.get("reference_image", ())]
        # The pipeline's own functions do all this, so that examples are encoded as it will be called; each is
        # handed what a call of the pipeline would hand it.
        clip, shown, pictures = self.pipe.preprocess_conditions(
            control, mask, references or None, 1, height, width, frames, torch.float32, self.device
        )
        latents = self.pipe.prepare_video_latents(clip, shown, pictures, None, self.device)
        masks = self.pipe.prepare_masks(shown, pictures)
        found["control_latents"] = torch.cat([latents, masks], dim=1)[0]
        for picture in example.get("reference_image", ()):
            # As the pipeline does it: each before what is there, so that the last one is the first.
            # A frame more at the start of the target: VACE reconstructs its references, and the pipeline
            # drops them.
            kept = self.normalised(self.condition_latents(self.clip(picture[:, None])))
            found["latents"] = torch.cat([kept[0], found["latents"]], dim=1)
        return found


class Wan(Family):
    """Latents are [C, F, H, W]; a timestep goes from 0 to 1000.

    ``condition`` is what a transformer with more input channels than the latents have gets beside them (the
    given frames and their mask), or, where it has no more (Wan 2.2 5B), the latents of the first frame, which
    is then put in its place, at time 0, and is no part of the loss. ``image_embeds`` (of two frames one after
    the other) are for transformers that look at pictures (``image_dim``) alone, as in the pipelines.
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

    def tokens(self, shape: Sequence[int]) -> int:
        """By the patches of the transformer."""
        return prod(size // patch for size, patch in zip(shape[1:], self._patch, strict=True))

    def check(self, item: Tensors) -> None:
        """As many channels and frames as the transformer takes; of VACE its controls. Raises ConfigError."""
        if "vace_layers" in self.config and "control_latents" not in item:
            raise ConfigError("an example has no control_latents, which the transformer of VACE needs")
        places = self.config.get("pos_embed_seq_len")
        if places is not None and (found := len(item.get("image_embeds", ()))) != places:
            raise ConfigError(
                f"an example has image_embeds of {found} positions, but the transformer takes "
                f"{places}, for a first and a last frame: set cache.last_frame, or name a column "
                "last_frame"
            )
        # Channels are the first axis. A condition adds its own unless it replaces a frame (Wan 2.2 5B).
        count = len(item["latents"])
        if "condition" in item and count != self._channels:
            count += len(item["condition"])
        if count != self._channels:
            raise ConfigError(
                f"examples give {count} channels (latents, and condition where it is), but the transformer "
                f"takes {self._channels}: they were encoded for another model"
            )

    @property
    def _channels(self) -> int:
        channels: int = self.config.get("in_channels", 16)
        return channels

    @property
    def _patch(self) -> tuple[int, ...]:
        return tuple(self.config.get("patch_size", (1, 2, 2)))

    def velocity(
        self, model: nn.Module, latents: torch.Tensor, t: torch.Tensor, conditions: Conditions
    ) -> torch.Tensor:
        given, timestep = latents, t * self.unit
        condition = conditions.get("condition")
        if condition is not None and self._first_frame(latents):
            # The given frames stand in the place of the noisy ones, and their time is 0.
            frames = condition.shape[2]
            given = torch.cat([condition, latents[:, :, frames:]], dim=2)
            timestep = self._after(timestep, latents, frames)
        elif condition is not None:
            # Beside one another in the channels: latents first, then mask and latents of the given frames.
            given = torch.cat([latents, condition], dim=1)
        more: dict[str, object] = {}
        image = conditions.get("image_embeds")
        if image is not None and self.config.get("image_dim") is not None:
            if self.config.get("pos_embed_seq_len") is not None:  # which puts two frames together by itself
                image = image.unflatten(1, (2, -1)).flatten(0, 1)
            more["encoder_hidden_states_image"] = image
        if (control := conditions.get("control_latents")) is not None:
            more["control_hidden_states"] = control
        predicted: torch.Tensor = model(
            hidden_states=given,
            timestep=timestep,
            encoder_hidden_states=conditions["prompt_embeds"],
            **more,
            return_dict=False,
        )[0]
        return predicted

    def trained(self, values: torch.Tensor, conditions: Conditions) -> torch.Tensor:
        """All frames but those that are put in."""
        condition = conditions.get("condition")
        if condition is None or not self._first_frame(values):
            return values
        # Given frames have time 0, where there is no noise to predict.
        return values[:, :, condition.shape[2] :]

    def _first_frame(self, latents: torch.Tensor) -> bool:
        return bool(latents.shape[1] == self._channels)

    def _after(self, timestep: torch.Tensor, latents: torch.Tensor, frames: int) -> torch.Tensor:
        """A timestep for each token, [batch, tokens]: 0 in the first ``frames``."""
        each = [size // patch for size, patch in zip(latents.shape[2:], self._patch, strict=True)]
        # One time a token, as the transformer orders tokens: frames first, then rows and columns.
        whole = timestep[:, None, None].expand(len(timestep), each[0], each[1] * each[2]).clone()
        # In patches, as `each` is: given frames are whole patches (a patch is one latent frame long).
        whole[:, : frames // self._patch[0]] = 0
        return whole.flatten(1)
