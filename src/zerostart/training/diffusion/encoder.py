"""Encoders of examples, one class for each kind of pipeline.

An encoder calls the same functions as its pipeline (``encode_prompt``, ``encode_image``, the autoencoder,
image processors), for one example at a time, so its results are the inputs that the pipeline would pass to
its transformer. Pictures have the size of the section ``media``.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from zerostart.distributed.world import default_device
from zerostart.errors import ConfigError
from zerostart.training.config.configuration import CacheConfig
from zerostart.training.data.media import to_picture
from zerostart.training.data.media_config import KNOWN_COLUMNS, Kind

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline
    from PIL.Image import Image

#: A decoded example, see ``zerostart.training.data.items``.
Example = Mapping[str, Any]
#: Tensors under the names of diffusers' pipelines, without a batch dimension.
Encoded = dict[str, torch.Tensor]


class Encoder(ABC):
    """Converts an example to inputs of a pipeline's transformer."""

    #: Media columns that the pipeline uses.
    takes: ClassVar[frozenset[str]] = frozenset({"image"})
    #: Required columns; an entry may name alternatives with ``or``.
    needs: ClassVar[tuple[str, ...]] = ("image",)
    #: Columns of kind ``images`` that may have only one picture.
    single: ClassVar[frozenset[str]] = frozenset()
    #: True if texts can be encoded without pictures.
    encodes_texts: ClassVar[bool] = True

    def __init__(self, pipe: DiffusionPipeline, settings: CacheConfig) -> None:
        """Use the encoders of ``pipe``, a pipeline without its transformers."""
        from transformers import PreTrainedTokenizerBase

        self.pipe = pipe
        self.settings = settings
        self.device = default_device()
        # The default limit of a text's length is an argument of the pipeline's call.
        own = inspect.signature(type(pipe).__call__).parameters["max_sequence_length"].default
        self.max_tokens = int(settings.max_sequence_length or own)
        self.text = {"max_sequence_length": self.max_tokens, "device": self.device}
        parts = [getattr(part, "tokenizer", part) for part in pipe.components.values()]
        # Ignore CLIP, which always reads only 77 tokens, in addition to another encoder.
        self._tokenizers = [
            one
            for one in parts
            if isinstance(one, PreTrainedTokenizerBase) and not type(one).__name__.startswith("CLIP")
        ]

    @abstractmethod
    def encode(self, example: Example, generator: torch.Generator) -> Encoded:
        """Return the tensors of an example; ``generator`` (of the CPU) draws its latents.

        Each text and image encoder is called equally often for every example.
        """

    @abstractmethod
    def prompt(self, text: str) -> Encoded:
        """Return the tensors of a text."""

    def sample(self, text: str, pictures: Sequence[Image]) -> Encoded:
        """Return the tensors, except latents, of a text and pictures to start from."""
        return self.prompt(text)

    def truncation_warning(self, text: str) -> str | None:
        """Return a warning if the pipeline drops the end of ``text``."""
        counts = [len(one(text, verbose=False)["input_ids"]) for one in self._tokenizers]
        if (count := max(counts, default=0)) <= self.max_tokens:
            return None
        return (
            f"its text has {count} tokens, but only the first {self.max_tokens} are used: shorten it, or "
            "raise cache.max_sequence_length if the model allows more"
        )

    def check(self, example: Example) -> None:
        """Raise ConfigError for an example that this pipeline cannot take."""
        # Other columns of the table, such as numbers, are ignored.
        media = {name for name, value in example.items() if _is_media(value)}
        # Sort for the same message in every run.
        if unknown := sorted(media - self.takes):
            raise ConfigError(
                f"{self.kind} does not use the column {unknown[0]}; it uses "
                f"{', '.join(sorted(self.takes))}: remove it from media.columns"
            )
        for name in sorted(media & KNOWN_COLUMNS.keys()):
            if KNOWN_COLUMNS[name][0] != (kind := _kind(example[name])):
                raise ConfigError(
                    f"{self.kind} needs {name} as {KNOWN_COLUMNS[name][0]}, but media.columns makes it "
                    f"{kind}: leave kind out there"
                )
        for entry in self.needs:
            # An empty list of pictures counts as missing.
            if not media & set(entry.split(" or ")):
                raise ConfigError(f"{self.kind} needs the column {entry}, which is empty or missing")
        for name in sorted(media & self.single):
            if len(example[name]) > 1:
                raise ConfigError(f"{name} lists {len(example[name])} pictures; {self.kind} takes one")
        for name in sorted(media):
            values = example[name] if isinstance(example[name], list) else [example[name]]
            for value in values:
                height, width = value.shape[-2:]
                if height % self.multiple or width % self.multiple:
                    raise ConfigError(
                        f"{name} is {height} x {width} (height x width), but {self.kind} takes multiples of "
                        f"{self.multiple}: set media.multiple_of to that, and height and width to multiples"
                    )

    @property
    def kind(self) -> str:
        """Class name of the pipeline, for messages."""
        return type(self.pipe).__name__

    @property
    def multiple(self) -> int:
        """Divisor of heights and widths."""
        return int(self.pipe.image_processor.config.vae_scale_factor)

    def pixels(self, value: torch.Tensor) -> torch.Tensor:
        """Preprocess a uint8 picture [3, H, W] for the autoencoder."""
        tensor: torch.Tensor = self.pipe.image_processor.preprocess(to_picture(value))
        return tensor.to(self.device, self.pipe.vae.dtype)

    def target_latents(self, pixels: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        """Return the latents of ``pixels`` as a training target, [1, C, ...], not normalised."""
        posterior = self.pipe.vae.encode(pixels).latent_dist
        latents: torch.Tensor = (
            posterior.sample(generator) if self.settings.posterior == "sample" else posterior.mode()
        )
        return latents

    def condition_latents(self, pixels: torch.Tensor) -> torch.Tensor:
        """Return the latents (mode) of ``pixels`` as a condition, [1, C, ...], not normalised."""
        latents: torch.Tensor = self.pipe.vae.encode(pixels).latent_dist.mode()
        return latents


class VideoEncoder(Encoder):
    """Encoder of a video (or a picture as one frame) and its text."""

    takes: ClassVar[frozenset[str]] = frozenset({"video", "image"})
    needs: ClassVar[tuple[str, ...]] = ("video or image",)
    #: Height and width of the transformer's patches, in latents.
    patch: ClassVar[int] = 1

    @property
    def factors(self) -> tuple[int, int]:
        """Frames of one latent, and its height and width in pixels."""
        return int(self.pipe.vae_scale_factor_temporal), int(self.pipe.vae_scale_factor_spatial)

    @property
    def multiple(self) -> int:
        """Divisor of heights and widths."""
        return self.factors[1] * self.patch

    def check(self, example: Example) -> None:
        """Raise ConfigError also if the frames do not fill whole latents."""
        super().check(example)
        frames, step = self.frames(example), self.factors[0]
        # The first frame is one latent, and each further `step` frames are another.
        if frames % step != 1:
            raise ConfigError(
                f"a video has {frames} frames, but {self.kind} takes {step}k + 1: set "
                f"media.num_frames, media.time_division_factor {step} and "
                "media.time_division_remainder 1"
            )

    def check_size(self, example: Example, *names: str) -> None:
        """Raise ConfigError if a picture ``names`` differs in size from the video."""
        for name in names:
            frame, video = example.get(name), example.get("video")
            if frame is not None and video is not None and frame.shape[-2:] != video.shape[-2:]:
                raise ConfigError(
                    f"{name} differs in size from its video: set its size to `item` in media.columns"
                )

    def frames(self, example: Example) -> int:
        """Return the number of frames of an example."""
        return int(example["video"].shape[1]) if "video" in example else 1

    def encode(self, example: Example, generator: torch.Generator) -> Encoded:
        """Return ``latents`` and the tensors of the text."""
        clip = self.clip(example["video"] if "video" in example else example["image"][:, None])
        latents = self.normalise(self.target_latents(clip, generator))[0]
        return {**self.prompt(example["prompt"]), "latents": latents}

    def clip(self, video: torch.Tensor) -> torch.Tensor:
        """Preprocess a uint8 video [3, F, H, W] for the autoencoder."""
        pixels: torch.Tensor = self.pipe.video_processor.preprocess_video(split_frames(video))
        return pixels.to(self.device, self.pipe.vae.dtype)

    @abstractmethod
    def normalise(self, latents: torch.Tensor) -> torch.Tensor:
        """Normalise latents for the transformer."""


def split_frames(video: torch.Tensor) -> list[Image]:
    """Return the frames of a video, uint8 [3, F, H, W], as pictures."""
    return [to_picture(frame) for frame in video.unbind(1)]


def _kind(value: torch.Tensor | list[torch.Tensor]) -> Kind:
    if isinstance(value, list):
        return "images"
    # [3, F, H, W] is a video, [3, H, W] a picture.
    return "video" if value.ndim == 4 else "image"


def _is_media(value: object) -> bool:
    if isinstance(value, list):
        return bool(value) and all(isinstance(one, torch.Tensor) for one in value)
    return isinstance(value, torch.Tensor)
