"""What of a row is decoded: in which size, and which frames, and the scaling and cropping that gets there.

Sizes and frames follow from the headers of the files; pixels are read in the end.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from fractions import Fraction
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Protocol, TypeVar

import torch

from zerostart.errors import ConfigError
from zerostart.training.data.files import Clip, MediaFile, clip_of, image_size, needed, rgb_image
from zerostart.training.data.media_config import DatasetConfig
from zerostart.training.data.table import Column

if TYPE_CHECKING:
    from PIL.Image import Image

T = TypeVar("T")


class InColumn(Protocol):
    """Calls a function for a column, and names row and column in what it raises."""

    def __call__(self, column: Column, act: Callable[[], T]) -> T:
        """What ``act`` gives."""


class ColumnMedia(ABC):
    """What one column gives an item."""

    @property
    @abstractmethod
    def shape(self) -> Hashable:
        """Of its tensors."""

    @abstractmethod
    def tensors(self) -> torch.Tensor | list[torch.Tensor]:
        """The pixels. Raises :class:`ConfigError` where they cannot be read."""


class _Pictures(ColumnMedia):
    def __init__(self, files: Sequence[MediaFile], targets: Sequence[Size], config: DatasetConfig) -> None:
        self._files = files
        self._targets = targets
        self._config = config

    @property
    def shape(self) -> Hashable:
        return tuple((3, *target) for target in self._targets)

    def tensors(self) -> torch.Tensor | list[torch.Tensor]:
        pictures = [rgb_image(file, self._config.background) for file in self._files]
        return [
            _pixels(fitted(picture, target)) for picture, target in zip(pictures, self._targets, strict=True)
        ]


class _Picture(_Pictures):
    @property
    def shape(self) -> Hashable:
        return (3, *self._targets[0])

    def tensors(self) -> torch.Tensor | list[torch.Tensor]:
        return super().tensors()[0]


class _Video(ColumnMedia):
    def __init__(self, clip: Clip, target: Size, indices: Sequence[int]) -> None:
        self._clip = clip
        self._target = target
        self._indices = indices

    @property
    def shape(self) -> Hashable:
        return (3, len(self._indices), *self._target)

    def tensors(self) -> torch.Tensor:
        frames = torch.empty((len(self._indices), 3, *self._target), dtype=torch.uint8, device="cpu")
        for place, picture in enumerate(self._clip.pictures(self._indices)):
            frames[place] = _pixels(fitted(picture, self._target))
        # Filled frame by frame, and turned to [3, F, H, W] at the end, as encoders take it.
        return frames.transpose(0, 1).contiguous()


def _pixels(picture: Image) -> torch.Tensor:
    """Of a Pillow image of mode RGB, uint8 [3, H, W]."""
    # `array` copies; `asarray` would give Pillow's own memory, which is read-only.
    return torch.from_numpy(needed("numpy").array(picture)).permute(2, 0, 1).contiguous()


def media_of_row(
    columns: Sequence[Column],
    files: Mapping[str, Sequence[MediaFile]],
    config: DatasetConfig,
    in_column: InColumn,
) -> dict[str, ColumnMedia]:
    """By name what the ``files`` of a row give; nothing for a picture or a video that the row lacks.

    The first of ``columns`` with files that has no size of its own gives the item its size. All videos of
    that size have equally many frames. Raises :class:`ConfigError`, by ``in_column``.
    """
    # A column of several pictures is there when it is empty, too: as an empty list.
    present = [column for column in columns if files[column.name] or column.kind == "images"]
    clips = {
        column.name: in_column(column, partial(clip_of, files[column.name], config.background))
        for column in present
        if column.kind == "video"
    }
    row = _Row(files, clips, config)
    sharing = [column for column in present if not column.own_size]
    # Sizes and frames of all come before any column is made: each depends on the others' files.
    if (leading := next((column for column in sharing if files[column.name]), None)) is not None:
        row.size = in_column(leading, lambda: target_size(row.sizes(leading)[0], config))
    for column in sharing:
        if column.name in clips:
            row.frames = len(in_column(column, partial(row.picked, column)))  # at most as many as before
    return {column.name: in_column(column, partial(row.media, column)) for column in present}


class _Row:
    """The files of one row, with the size and the number of frames that its columns share."""

    def __init__(
        self, files: Mapping[str, Sequence[MediaFile]], clips: Mapping[str, Clip], config: DatasetConfig
    ) -> None:
        self._files = files
        self._clips = clips
        self._config = config
        self.size: Size | None = None
        # Falls from video to video of a row to the shortest one; `media` is asked for after the last.
        self.frames = config.num_frames

    def sizes(self, column: Column) -> list[Size]:
        if column.kind == "video":
            return [self._clips[column.name].size]
        return [image_size(file) for file in self._files[column.name]]

    def picked(self, column: Column) -> list[int]:
        clip, most = self._clips[column.name], self._config.num_frames if column.own_size else self.frames
        return picked_frames(
            self._config, clip.count(frames_needed(self._config, clip.rate)), clip.rate, most
        )

    def media(self, column: Column) -> ColumnMedia:
        files = self._files[column.name]
        # No size to share where a row has columns with sizes of their own alone.
        if column.own_size or self.size is None:
            targets = [target_size(size, self._config) for size in self.sizes(column)]
        else:
            targets = [self.size] * len(files)
        match column.kind:
            case "video":
                return _Video(self._clips[column.name], targets[0], self.picked(column))
            case "image":
                return _Picture(files, targets, self._config)
            case "images":
                return _Pictures(files, targets, self._config)


Size = tuple[int, int]  # height, width

#: Sides of standard sizes are multiples of this, which leaves a dozen of them.
_STEP = 64
#: Below so many pixels, of `media.multiple_of`.
_SMALL = 512 * 512
#: The longest side of a standard size is at most so many times the shorter.
_LONGEST = 2


def target_size(size: Size, config: DatasetConfig) -> Size:
    """What a picture of ``size`` is made: multiples of ``config.multiple_of``.

    Raises :class:`ConfigError` for one that is too small to have such a size.
    """
    if config.height is not None and config.width is not None:
        # A fixed size is also the target of smaller pictures: these are scaled up.
        return config.height, config.width
    if config.buckets != "own":
        given = config.buckets
        sizes = standard_sizes(config.max_pixels, config.multiple_of) if isinstance(given, str) else given
        return _nearest(size, sizes)
    # To the pixel as DiffSynth-Studio does it, so that its data give the same here.
    height, width = size
    if height * width > config.max_pixels:
        # Areas go by the square of a side.
        scale = (height * width / config.max_pixels) ** 0.5
        height, width = int(height / scale), int(width / scale)
    factor = config.multiple_of
    target = height // factor * factor, width // factor * factor
    if 0 in target:
        raise ConfigError(
            f"{size[0]} x {size[1]} pixels (height x width) are too few for media.multiple_of "
            f"{factor} within media.max_pixels {config.max_pixels}; leave the file out, or set "
            "media.height and media.width, to which it is scaled up"
        )
    return target


@lru_cache(maxsize=8)
def standard_sizes(max_pixels: int, multiple_of: int) -> tuple[Size, ...]:
    """Sizes from 1:2 to 2:1, the widest for each height that has at most ``max_pixels``.

    Raises :class:`ConfigError` if there is none.
    """
    # Both, so that a size suits the model and there are few of them: each is a batch shape of its own.
    step = math.lcm(_STEP, multiple_of) if max_pixels >= _SMALL else multiple_of
    sizes = []
    for height in range(step, math.isqrt(max_pixels * _LONGEST) + 1, step):
        width = max_pixels // height // step * step
        if width and max(height, width) <= _LONGEST * min(height, width):
            sizes.append((height, width))
    if not sizes:
        raise ConfigError(
            f"media.max_pixels {max_pixels} allows no size in multiples of media.multiple_of "
            f"{multiple_of}; raise it"
        )
    return tuple(sizes)


def _nearest(size: Size, sizes: Sequence[Size]) -> Size:
    """The one whose shape is nearest, of equals the largest, then the first."""
    # In logarithms twice as wide and twice as high are equally far from a square.
    shape = math.log(size[0] / size[1])
    # Rounded, or the last bits of a logarithm would decide between sizes of the same shape.
    return min(sizes, key=lambda s: (round(abs(math.log(s[0] / s[1]) - shape), 9), -s[0] * s[1]))


def fitted(picture: Image, target: Size) -> Image:
    """A Pillow image scaled (bilinear, antialiased) until it covers ``target``, cropped around its centre.

    The numbers are those of torchvision's ``resize`` and ``center_crop``, which DiffSynth-Studio uses.
    """
    # Pillow has the width first, targets the height.
    (width, height), (target_height, target_width) = picture.size, target
    # The larger of the two covers the target on both sides; the other side is cropped.
    scale = max(target_width / width, target_height / height)
    scaled = round(width * scale), round(height * scale)
    if scaled != picture.size:
        picture = picture.resize(scaled, needed("PIL.Image").Resampling.BILINEAR)
    left = round((scaled[0] - target_width) / 2.0)
    top = round((scaled[1] - target_height) / 2.0)
    if scaled == (target_width, target_height):
        return picture
    return picture.crop((left, top, left + target_width, top + target_height))


def frames_needed(config: DatasetConfig, rate: Fraction | None) -> int | None:
    """Of how many frames at ``rate`` the picked ones are surely the first ``num_frames``; None: of all."""
    if config.frames == "even":
        return None
    wanted = _wanted_rate(config, rate)
    if wanted is None or rate is None:
        return config.num_frames
    # One more than the last picked one needs, for picking rounds to the nearest frame.
    return math.ceil(config.num_frames * rate / wanted) + 1


def picked_frames(config: DatasetConfig, frames: int, rate: Fraction | None, most: int) -> list[int]:
    """Which of ``frames`` frames, at ``rate`` a second (None: at none), are taken; at most ``most``.

    Raises :class:`ConfigError` where there are too few.
    """
    wanted = _wanted_rate(config, rate)
    # As many as the video lasts at the wanted rate, then down to a number that the model can take.
    available = frames if wanted is None or rate is None else math.floor(frames / rate * wanted)
    factor, remainder = config.time_division_factor, config.time_division_remainder
    count = min(available, most)
    count -= (count - remainder) % factor
    if count < 1:
        raise ConfigError(
            f"{available} frames are too few: a number of frames must leave the remainder "
            f"{remainder} when divided by {factor} (media.time_division_remainder and "
            "media.time_division_factor); leave the video out"
        )
    if config.frames == "even":
        # Exact: a float beside a half could be rounded to the neighbouring frame.
        gap = Fraction(frames - 1, max(count - 1, 1))
        return [round(index * gap) for index in range(count)]
    if wanted is None or rate is None:
        return list(range(count))
    # Fractions as well, for the same reason.
    return [min(round(index / wanted * rate), frames - 1) for index in range(count)]


def _wanted_rate(config: DatasetConfig, rate: Fraction | None) -> Fraction | None:
    """At which rate frames are picked; None: as they follow, as those of a directory, which has none."""
    if config.frame_rate is None or rate is None:
        return None
    # By way of its text: 23.976 means 23976/1000, and not the float next to it.
    return Fraction(str(config.frame_rate))
