"""What an encoder of examples is: one class for each kind of pipeline, beside the family of its transformer.

An encoder calls what its pipeline itself calls before its transformer (``encode_prompt``, ``encode_image``,
the autoencoder, image processors), for one example at a time, so that what is kept is what the pipeline
would feed. Pictures are taken in the size that the section ``media`` gives them.
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
from zerostart.training.data.media import as_picture
from zerostart.training.data.media_config import KNOWN_COLUMNS, Kind
from zerostart.training.diffusion.text_lengths import TextLengths

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline
    from PIL.Image import Image

#: A decoded example, as ``zerostart.training.data.items`` makes it.
Example = Mapping[str, Any]
#: By the names of diffusers' pipelines, without a dimension of batches.
Encoded = dict[str, torch.Tensor]


class Encoder(ABC):
    """Makes of an example what the transformer of its pipeline takes."""

    #: The columns of media that it has a use for.
    takes: ClassVar[frozenset[str]] = frozenset({"image"})
    #: What every example must have: of each entry (names with ``or`` between them) one column.
    needs: ClassVar[tuple[str, ...]] = ("image",)
    #: The columns of ``images`` of which it takes one picture.
    single: ClassVar[frozenset[str]] = frozenset()
    #: Whether a text means something without the pictures of its example.
    texts_alone: ClassVar[bool] = True

    def __init__(self, pipe: DiffusionPipeline, settings: CacheConfig) -> None:
        """``pipe`` is the pipeline without its transformers."""
        self.pipe = pipe
        self.settings = settings
        self.device = default_device()
        # Pipelines cut by this argument of their call, whose default differs from one to the next.
        own = inspect.signature(type(pipe).__call__).parameters["max_sequence_length"].default
        self.most_tokens = int(settings.max_sequence_length or own)
        self.text = {"max_sequence_length": self.most_tokens, "device": self.device}
        self.lengths = TextLengths(pipe)

    @abstractmethod
    def encode(self, example: Example, generator: torch.Generator) -> Encoded:
        """The tensors of an example; calls each text and image encoder equally often for every one.

        ``generator`` (of the CPU) is for the latents that are drawn.
        """

    @abstractmethod
    def prompt(self, text: str) -> Encoded:
        """What becomes of a text alone."""

    def sample(self, text: str, pictures: Sequence[Image]) -> Encoded:
        """What its pipeline makes of a text and the ``pictures`` that a drawing starts from, but latents."""
        return self.prompt(text)

    def cut(self) -> str | None:
        """In words by how much the texts since ``lengths.begin`` were too long, and what can be done."""
        told = self.lengths.cut(self.most_tokens)
        return told and f"{told}: shorten it, or raise cache.max_sequence_length where the model allows more"

    def check(self, example: Example) -> None:
        """Raise ConfigError for an example that this pipeline cannot take."""
        # Other columns of the table come along as they are (numbers, texts) and are no business of an
        # encoder.
        given = {name for name, value in example.items() if _is_media(value)}
        # Sorted, for the order of a set differs between runs, and so would the message.
        if unknown := sorted(given - self.takes):
            raise ConfigError(
                f"{self.kind} does not use the column {unknown[0]}; it uses "
                f"{', '.join(sorted(self.takes))}: remove it from media.columns"
            )
        for name in sorted(given & KNOWN_COLUMNS.keys()):
            if KNOWN_COLUMNS[name][0] != (kind := _kind(example[name])):
                raise ConfigError(
                    f"{self.kind} needs {name} as {KNOWN_COLUMNS[name][0]}, but media.columns makes it "
                    f"{kind}: leave kind out there"
                )
        for entry in self.needs:
            # An empty list of pictures is not among the given ones: it counts as missing.
            if not given & set(entry.split(" or ")):
                raise ConfigError(f"{self.kind} needs the column {entry}, which is empty or missing")
        for name in sorted(given & self.single):
            if len(example[name]) > 1:
                raise ConfigError(f"{name} lists {len(example[name])} pictures; {self.kind} takes one")
        for name in sorted(given):
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
        """The class of the pipeline, for messages."""
        return type(self.pipe).__name__

    @property
    def multiple(self) -> int:
        """What heights and widths have to be multiples of."""
        return int(self.pipe.image_processor.config.vae_scale_factor)

    def pixels(self, value: torch.Tensor) -> torch.Tensor:
        """A picture (uint8 [3, H, W]) as the autoencoder takes it, [1, 3, H, W], by the pipeline's processor.

        Its values alone are not enough: bits of what comes out depend on how they lie in memory, too.
        """
        found: torch.Tensor = self.pipe.image_processor.preprocess(as_picture(value))
        return found.to(self.device, self.pipe.vae.dtype)

    def target_latents(self, pixels: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        """Latents of ``pixels`` for the model to learn, [1, C, ...], as the autoencoder gives them."""
        posterior = self.pipe.vae.encode(pixels).latent_dist
        found: torch.Tensor = (
            # The one random draw of an encoding; its generator follows from the cache's seed and the item's
            # number.
            posterior.sample(generator) if self.settings.posterior == "sample" else posterior.mode()
        )
        return found

    def condition_latents(self, pixels: torch.Tensor) -> torch.Tensor:
        """Latents of ``pixels`` for the model to start from, [1, C, ...]: the mode, as pipelines take it."""
        found: torch.Tensor = self.pipe.vae.encode(pixels).latent_dist.mode()
        return found


class VideoEncoder(Encoder):
    """``latents`` [C, F, H, W] and what becomes of the text; a picture is a video of one frame."""

    takes: ClassVar[frozenset[str]] = frozenset({"video", "image"})
    needs: ClassVar[tuple[str, ...]] = ("video or image",)
    #: Latents, each way of a frame, in a patch of the transformer.
    patch: ClassVar[int] = 1

    @property
    def factors(self) -> tuple[int, int]:
        """Frames, and pixels each way, that are one of the latents."""
        return int(self.pipe.vae_scale_factor_temporal), int(self.pipe.vae_scale_factor_spatial)

    @property
    def multiple(self) -> int:
        """What heights and widths have to be multiples of."""
        return self.factors[1] * self.patch

    def check(self, example: Example) -> None:
        """Raise ConfigError for a number of frames that makes no whole latent ones, too."""
        super().check(example)
        frames, step = self.frames(example), self.factors[0]
        # The first frame is a latent one by itself, and each further `step` frames make one more.
        if frames % step != 1:
            raise ConfigError(
                f"a video has {frames} frames, but {self.kind} takes {step}k + 1: set "
                f"media.num_frames, media.time_division_factor {step} and "
                "media.time_division_remainder 1"
            )

    def frames(self, example: Example) -> int:
        """How many frames an example has."""
        return int(example["video"].shape[1]) if "video" in example else 1

    def encode(self, example: Example, generator: torch.Generator) -> Encoded:
        """See ``Encoder``."""
        clip = self.clip(example["video"] if "video" in example else example["image"][:, None])
        # The normalisation acts on [1, C, F, H, W]; the axis of the batch goes last.
        latents = self.normalised(self.target_latents(clip, generator))[0]
        return {**self.prompt(example["prompt"]), "latents": latents}

    def clip(self, video: torch.Tensor) -> torch.Tensor:
        """A video (uint8 [3, F, H, W]) as the autoencoder takes it, [1, 3, F, H, W]."""
        found: torch.Tensor = self.pipe.video_processor.preprocess_video(frames_of(video))
        return found.to(self.device, self.pipe.vae.dtype)

    @abstractmethod
    def normalised(self, latents: torch.Tensor) -> torch.Tensor:
        """Latents as the transformer sees them."""


def frames_of(video: torch.Tensor) -> list[Image]:
    """The pictures of a video, uint8 [3, F, H, W]."""
    return [as_picture(frame) for frame in video.unbind(1)]


def _kind(value: torch.Tensor | list[torch.Tensor]) -> Kind:
    if isinstance(value, list):
        return "images"
    # [3, F, H, W] is a video, [3, H, W] a picture.
    return "video" if value.ndim == 4 else "image"


def _is_media(value: object) -> bool:
    if isinstance(value, list):
        return bool(value) and all(isinstance(one, torch.Tensor) for one in value)
    return isinstance(value, torch.Tensor)
