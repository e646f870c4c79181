"""Pictures, by Pillow: whatever is in a file becomes upright red, green and blue of 8 bits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from zerostart.errors import ConfigError
from zerostart.training.data.files import MediaFile, needed

#: The tag of EXIF that says how a camera was held; these values lay a picture on its side.
_ORIENTATION, _ON_ITS_SIDE = 0x0112, (5, 6, 7, 8)


@contextmanager
def readable(file: MediaFile, what: str) -> Iterator[None]:
    """Inside a library reads ``file``; raises :class:`ConfigError`, which names it, where that fails."""
    try:
        yield
    except (ConfigError, MemoryError):
        raise
    except Exception as error:  # of many types, which differ between versions
        told = " ".join(str(error).split()) or type(error).__name__
        raise ConfigError(
            f"{file.name} cannot be read as {what} ({told}): the file is damaged, or of a kind that the "
            "library does not know; replace it, or take its row out of the table"
        ) from error


@contextmanager
def opened_image(file: MediaFile) -> Iterator[Any]:
    """The file as a Pillow image whose pixels are not read yet. Raises :class:`ConfigError`."""
    pillow = needed("PIL.Image")
    with readable(file, "a picture"), file.opened() as content, pillow.open(content) as image:
        yield image


def image_size(file: MediaFile) -> tuple[int, int]:
    """Height and width of a picture that stands upright, by its header. Raises :class:`ConfigError`."""
    with opened_image(file) as image:
        if image.getexif().get(_ORIENTATION) not in _ON_ITS_SIDE:
            return image.height, image.width
        if image.format == "TIFF":  # whose own reader turns it, in the versions that do
            upright = needed("PIL.ImageOps").exif_transpose(image)
            return upright.height, upright.width
        return image.width, image.height


def rgb_image(file: MediaFile, background: tuple[int, int, int]) -> Any:
    """The (first) picture of a file, upright, as a Pillow image of mode RGB. Raises :class:`ConfigError`."""
    with opened_image(file) as image:
        return rgb(needed("PIL.ImageOps").exif_transpose(image), background)


def rgb(image: Any, background: tuple[int, int, int]) -> Any:
    """A Pillow image in mode RGB, what is transparent over ``background``.

    Raises ValueError for a mode whose values have no range that is known.
    """
    if image.mode.startswith("I"):
        image = _eight_bits(image)
    if image.mode == "F":
        raise ValueError("its pixels are floating-point numbers, whose range is not told")
    if not image.has_transparency_data:
        return image.convert("RGB")
    pillow = needed("PIL.Image")
    layer = image.convert("RGBA")
    return pillow.alpha_composite(pillow.new("RGBA", layer.size, (*background, 255)), layer).convert("RGB")


def _eight_bits(image: Any) -> Any:
    """Of grey values of 16 bits, which Pillow's ``convert`` would cut off at 255."""
    values = needed("numpy").asarray(image).astype("int64")
    if values.min() < 0 or values.max() > 65535:
        raise ValueError("its pixels have 32 bits, whose range is not told")
    return needed("PIL.Image").fromarray(((values * 255 + 32767) // 65535).astype("uint8"))
