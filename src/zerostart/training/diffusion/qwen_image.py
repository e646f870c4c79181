"""Qwen-Image: pictures of texts, and its editions that start from pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import exp
from typing import TYPE_CHECKING, ClassVar

import torch

from zerostart.training.data.media import to_picture
from zerostart.training.diffusion.encoder import Encoded, Encoder, Example
from zerostart.training.diffusion.family import Conditions, Packed, Tensors, linear_shift

if TYPE_CHECKING:
    from PIL.Image import Image


class QwenImageEncoder(Encoder):
    """Encodes ``latents`` [C, H, W], and ``prompt_embeds`` of the text's length with their mask."""

    def encode(self, example: Example, generator: torch.Generator) -> Encoded:
        latents = self.normalise(self.target_latents(self.frame(example["image"]), generator))
        # Frame 0: the autoencoder is one of videos.
        return {**self.embed(example), "latents": latents[0, :, 0]}

    def embed(self, example: Example) -> Encoded:
        """Return the tensors of an example's text."""
        return self.prompt(example["prompt"])

    def prompt(self, text: str) -> Encoded:
        return _texts(*self.pipe.encode_prompt(text, **self.text))

    def frame(self, picture: torch.Tensor) -> torch.Tensor:
        """Convert a picture to [1, 3, 1, H, W] for the autoencoder of videos."""
        return self.pixels(picture).unsqueeze(2)

    def normalise(self, latents: torch.Tensor) -> torch.Tensor:
        """Normalise latents for the transformer."""
        mean, deviation = self.statistics(latents)
        # The reciprocal, as in diffusers' image-to-image pipeline: a division may differ in the last bit.
        return (latents - mean) * (1.0 / deviation)

    def statistics(self, latents: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return mean and standard deviation of the autoencoder's latents, like ``latents``."""
        config, shape = self.pipe.vae.config, (1, -1, 1, 1, 1)
        mean = torch.tensor(config.latents_mean, device="cpu").view(shape)
        deviation = torch.tensor(config.latents_std, device="cpu").view(shape)
        # The pipelines round to the dtype of the latents first.
        return mean.to(latents), deviation.to(latents)


class QwenImageEditEncoder(QwenImageEncoder):
    """Adds ``image_latents.0`` [C, H', W'] of the picture to edit.

    The text encoder sees the picture, too.
    """

    takes: ClassVar[frozenset[str]] = frozenset({"image", "edit_image"})
    needs: ClassVar[tuple[str, ...]] = ("image", "edit_image")
    single: ClassVar[frozenset[str]] = frozenset({"edit_image"})
    encodes_texts: ClassVar[bool] = False

    def encode(self, example: Example, generator: torch.Generator) -> Encoded:
        encoded = super().encode(example, generator)
        for place, picture in enumerate(example["edit_image"]):
            latents = self.condition_latents(self.frame(picture))
            mean, deviation = self.statistics(latents)
            # Editing pipelines divide; the last bit may differ from the multiplication of the others.
            encoded[f"image_latents.{place}"] = ((latents - mean) / deviation)[0, :, 0]
        return encoded

    def embed(self, example: Example) -> Encoded:
        """Return the tensors of an example's text with its pictures."""
        text_encoder_pictures = self.text_encoder_pictures(example["edit_image"])
        return _texts(*self.pipe.encode_prompt(example["prompt"], image=text_encoder_pictures, **self.text))

    def sample(self, text: str, pictures: Sequence[Image]) -> Encoded:
        """Return the tensors of a text with pictures in the pipeline's size."""
        text_encoder_pictures = [self.scale(picture) for picture in pictures]
        # Only the pipeline of several pictures takes a list.
        image = text_encoder_pictures[0] if "edit_image" in self.single else text_encoder_pictures
        return _texts(*self.pipe.encode_prompt(text, image=image, **self.text))

    def scale(self, picture: Image) -> Image:
        """Scale a picture for the text encoder, as the pipeline does."""
        from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit as edit

        width, height, _ = edit.calculate_dimensions(1024 * 1024, picture.size[0] / picture.size[1])
        resized: Image = self.pipe.image_processor.resize(picture, height, width)
        return resized

    def text_encoder_pictures(self, pictures: Sequence[torch.Tensor]) -> Image | list[Image]:
        """Return the pictures for the text encoder: the one, unscaled."""
        return to_picture(pictures[0])


class QwenImageEditPlusEncoder(QwenImageEditEncoder):
    """Adds ``image_latents.0``, ``image_latents.1`` and so on of any number of pictures."""

    single: ClassVar[frozenset[str]] = frozenset()

    def text_encoder_pictures(self, pictures: Sequence[torch.Tensor]) -> Image | list[Image]:
        """Return the pictures for the text encoder, scaled."""
        return [self.scale(picture) for picture in map(to_picture, pictures)]

    def scale(self, picture: Image) -> Image:
        """Scale a picture to the pipeline's area for the text encoder."""
        from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit_plus as plus

        ratio = picture.size[0] / picture.size[1]
        width, height = plus.calculate_dimensions(plus.CONDITION_IMAGE_SIZE, ratio)
        resized: Image = self.pipe.image_processor.resize(picture, height, width)
        return resized


def _texts(embeds: torch.Tensor, mask: torch.Tensor | None) -> Encoded:
    """Return embeddings and mask; the pipeline leaves out a mask of ones."""
    whole = torch.ones(embeds.shape[:2], dtype=torch.long, device=embeds.device) if mask is None else mask
    return {"prompt_embeds": embeds[0], "prompt_embeds_mask": whole[0]}


class QwenImage(Packed):
    """Qwen-Image: latents [C, H, W], masked texts; time from 0 to 1."""

    name: ClassVar[str] = "qwen-image"
    classes: ClassVar[frozenset[str]] = frozenset({"QwenImageTransformer2DModel"})
    encoders: ClassVar[Mapping[str, type[Encoder]]] = {
        "QwenImagePipeline": QwenImageEncoder,
        "QwenImageEditPipeline": QwenImageEditEncoder,
        "QwenImageEditPlusPipeline": QwenImageEditPlusEncoder,
    }
    shift: ClassVar[float] = exp(0.8)
    last_time: ClassVar[float | None] = 0.02
    keys: ClassVar[frozenset[str]] = frozenset({"prompt_embeds", "prompt_embeds_mask"})
    most_images: ClassVar[int] = 16
    masked: ClassVar[bool] = True

    def shift_at(self, tokens: int) -> float:
        """Return the shift of the released pipelines' scheduler."""
        return linear_shift(tokens, 256, 8192, 0.5, 0.9)

    def conditions(self, items: Sequence[Tensors]) -> Conditions:
        """Return the inputs, with a mask if texts are padded or one has a mask."""
        lengths = {len(item["prompt_embeds"]) for item in items if "prompt_embeds" in item}
        if len(lengths) > 1 or any("prompt_embeds_mask" in item for item in items):
            # An example's own mask comes later, and so replaces the new one.
            items = [{"prompt_embeds_mask": _whole(item), **item} for item in items]
        return super().conditions(items)

    def model_inputs(self, pictures: Sequence[torch.Tensor], conditions: Conditions) -> dict[str, object]:
        sides = [(1, one.shape[-2] // 2, one.shape[-1] // 2) for one in pictures]
        return {
            "encoder_hidden_states_mask": conditions.get("prompt_embeds_mask"),
            # (frames, rows, columns) in tokens of each picture, one such list for every example of the batch.
            "img_shapes": [sides] * len(pictures[0]),
        }


def _whole(item: Tensors) -> torch.Tensor:
    return torch.ones(len(item["prompt_embeds"]), dtype=torch.int64, device=item["prompt_embeds"].device)
