"""What samples are drawn of: texts, alone or with the pictures that a drawing starts from."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from zerostart.checkpoint.paths import expanded
from zerostart.errors import ConfigError
from zerostart.training.data.files import MediaFile, rgb_image

if TYPE_CHECKING:
    from PIL.Image import Image

    from zerostart.training.config.configuration import SamplesConfig

_WHITE = (255, 255, 255)


class PicturedText(str):
    """A text with pictures: as a string it stands for both, by a digest of the pixels, wherever they lie."""

    text: str
    pictures: tuple[Image, ...]

    __slots__ = ("pictures", "text")

    @classmethod
    def of(cls, text: str, pictures: Sequence[Image]) -> PicturedText:
        """The ``text`` with these upright ``pictures`` of mode RGB."""
        hashed = hashlib.blake2b(digest_size=16)
        for picture in pictures:
            # The size as well: the same bytes in other sides are another picture.
            hashed.update(repr(picture.size).encode() + picture.tobytes())
        # The string is the key in the cache and in dicts; encoders take `text` and `pictures`.
        made = cls(f"{text} [pictures {hashed.hexdigest()}]")
        made.text, made.pictures = text, tuple(pictures)
        return made


def sample_texts(settings: SamplesConfig) -> tuple[list[str], list[str]]:
    """Each prompt, and what is guided away from there, with the pictures of the prompt.

    Raises :class:`ConfigError`, naming the file, for a picture that cannot be read.
    """
    if settings.images is None:
        return list(settings.prompts), [settings.negative_prompt] * len(settings.prompts)
    prompts: list[str] = []
    negatives: list[str] = []
    for text, names in zip(settings.prompts, settings.images, strict=True):
        pictures = [_picture(name) for name in ([names] if isinstance(names, str) else names)]
        prompts.append(PicturedText.of(text, pictures))
        # Encoders that see pictures see them with the negative text, too, as their pipelines show them.
        negatives.append(PicturedText.of(settings.negative_prompt, pictures))
    return prompts, negatives


def _picture(name: str) -> Image:
    path = Path(expanded(name))
    if not path.is_file():
        raise ConfigError(f"samples.images: {path}: no such file")
    return rgb_image(MediaFile(str(path), path), _WHITE)
