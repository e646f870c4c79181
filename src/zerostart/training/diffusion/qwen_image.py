"""Qwen-Image: pictures of texts, and its editions that start from pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import exp
from typing import TYPE_CHECKING, ClassVar

import torch

from zerostart.training.data.media import as_picture
from zerostart.training.diffusion.encoder import Encoded, Encoder, Example
from zerostart.training.diffusion.family import Conditions, Packed, Tensors, linear_shift

if TYPE_CHECKING:
    from PIL.Image import Image


class QwenImageEncoder(Encoder):
    """``latents`` [C, H, W], ``prompt_embeds`` as long as the text is, and their mask, of ones."""

    def encode(self, example: Example, generator: torch.Generator) -> Encoded:
        latents = self.normalised(self.target_latents(self.frame(example["image"]), generator))
        # Example 0 of the batch, frame 0: the autoencoder is one of videos, the model one of pictures.
        return {**self.embedded(example), "latents": latents[0, :, 0]}

    def embedded(self, example: Example) -> Encoded:
        """What becomes of the text of an example."""
        return self.prompt(example["prompt"])

    def prompt(self, text: str) -> Encoded:
        return _texts(*self.pipe.encode_prompt(text, **self.text))

    def frame(self, picture: torch.Tensor) -> torch.Tensor:
        """A picture as the autoencoder of videos takes it, [1, 3, 1, H, W]."""
        return self.pixels(picture).unsqueeze(2)

    def normalised(self, latents: torch.Tensor) -> torch.Tensor:
        """Latents as the transformer sees them."""
        mean, deviation = self.statistics(latents)
        # By the reciprocal, as diffusers' image-to-image pipeline has it: a division may differ in the last
        # bit.
        return (latents - mean) * (1.0 / deviation)

    def statistics(self, latents: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Mean and standard deviation of latents, as they are known for the autoencoder, like ``latents``."""
        config, shape = self.pipe.vae.config, (1, -1, 1, 1, 1)
        mean = torch.tensor(config.latents_mean, device="cpu").view(shape)
        deviation = torch.tensor(config.latents_std, device="cpu").view(shape)
        # Rounded to the dtype of the latents before the arithmetic, as in the pipelines.
        return mean.to(latents), deviation.to(latents)


class QwenImageEditEncoder(QwenImageEncoder):
    """Adds ``image_latents.0`` [C, H', W'] of the picture to edit, which the text encoder sees, too."""

    takes: ClassVar[frozenset[str]] = frozenset({"image", "edit_image"})
    needs: ClassVar[tuple[str, ...]] = ("image", "edit_image")
    single: ClassVar[frozenset[str]] = frozenset({"edit_image"})
    texts_alone: ClassVar[bool] = False

    def encode(self, example: Example, generator: torch.Generator) -> Encoded:
        found = super().encode(example, generator)
        for place, picture in enumerate(example["edit_image"]):
            latents = self.condition_latents(self.frame(picture))
            mean, deviation = self.statistics(latents)
            # The pipelines of editing divide, where the others multiply: the last bit may differ.
            found[f"image_latents.{place}"] = ((latents - mean) / deviation)[0, :, 0]
        return found

    def embedded(self, example: Example) -> Encoded:
        """What becomes of the text of an example and its pictures."""
        shown = self.shown(example["edit_image"])
        return _texts(*self.pipe.encode_prompt(example["prompt"], image=shown, **self.text))

    def sample(self, text: str, pictures: Sequence[Image]) -> Encoded:
        """The text encoder sees the picture in the size that the pipeline gives it."""
        shown = [self.scaled(picture) for picture in pictures]
        # A list stands for several pictures, which only the pipeline of these takes.
        image = shown[0] if "edit_image" in self.single else shown
        return _texts(*self.pipe.encode_prompt(text, image=image, **self.text))

    def scaled(self, picture: Image) -> Image:
        """A picture as the pipeline shows it to its text encoder."""
        from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit as edit

        # `Image.size` is (width, height): the ratio is width to height. The area is the pipeline's.
        width, height, _ = edit.calculate_dimensions(1024 * 1024, picture.size[0] / picture.size[1])
        found: Image = self.pipe.image_processor.resize(picture, height, width)
        return found

    def shown(self, pictures: Sequence[torch.Tensor]) -> Image | list[Image]:
        """What the text encoder sees of the pictures: the one, as it is encoded."""
        return as_picture(pictures[0])


class QwenImageEditPlusEncoder(QwenImageEditEncoder):
    """The same with any number of pictures: ``image_latents.0``, ``image_latents.1`` and so on."""

    single: ClassVar[frozenset[str]] = frozenset()

    def shown(self, pictures: Sequence[torch.Tensor]) -> Image | list[Image]:
        """What the text encoder sees: each of them, scaled down to the area that the pipeline shows it."""
        return [self.scaled(picture) for picture in map(as_picture, pictures)]

    def scaled(self, picture: Image) -> Image:
        """Of another area than the autoencoder sees."""
        from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit_plus as plus

        ratio = picture.size[0] / picture.size[1]
        width, height = plus.calculate_dimensions(plus.CONDITION_IMAGE_SIZE, ratio)
        found: Image = self.pipe.image_processor.resize(picture, height, width)
        return found


def _texts(embeds: torch.Tensor, mask: torch.Tensor | None) -> Encoded:
    """The pipeline leaves a mask out that hides nothing."""
    whole = torch.ones(embeds.shape[:2], dtype=torch.long, device=embeds.device) if mask is None else mask
    return {"prompt_embeds": embeds[0], "prompt_embeds_mask": whole[0]}


_TERMINAL = 0.02  # the last time of DiffSynth's schedule


class QwenImage(Packed):
    """Latents are [C, H, W], tokens of 2 by 2; time goes from 0 to 1. Texts are masked."""

    name: ClassVar[str] = "qwen-image"
    classes: ClassVar[frozenset[str]] = frozenset({"QwenImageTransformer2DModel"})
    encoders: ClassVar[Mapping[str, type[Encoder]]] = {
        "QwenImagePipeline": QwenImageEncoder,
        "QwenImageEditPipeline": QwenImageEditEncoder,
        "QwenImageEditPlusPipeline": QwenImageEditPlusEncoder,
    }
    shift: ClassVar[float] = exp(0.8)
    keys: ClassVar[frozenset[str]] = frozenset({"prompt_embeds", "prompt_embeds_mask"})
    most_images: ClassVar[int] = 16
    masked: ClassVar[bool] = True

    def shift_at(self, tokens: int) -> float:
        """As the scheduler of the released pipelines has it."""
        return linear_shift(tokens, 256, 8192, 0.5, 0.9)

    def schedule(self, shift: float) -> torch.Tensor:
        """Stretched to its last time."""
        times = super().schedule(shift)
        # Linear in `1 - t`, so that 1 stays 1 and the last time becomes the terminal one.
        return 1 - (1 - times) * (1 - _TERMINAL) / (1 - times[-1])

    def conditions(self, items: Sequence[Tensors]) -> Conditions:
        """With a mask wherever texts are padded, or one of them has one."""
        lengths = {len(item["prompt_embeds"]) for item in items if "prompt_embeds" in item}
        if len(lengths) > 1 or any("prompt_embeds_mask" in item for item in items):
            # An example's own mask stands after the made one in the dict, and so replaces it.
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
