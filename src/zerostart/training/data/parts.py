"""What of a row is decoded: in which size, and which frames. Headers tell; pixels are read in the end."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar

import torch

from zerostart.training.data.clips import Clip, clip_of
from zerostart.training.data.columns import Column
from zerostart.training.data.files import MediaFile, needed
from zerostart.training.data.images import image_size, rgb_image
from zerostart.training.data.media_config import MediaConfig
from zerostart.training.data.sizes import Size, fitted, frames_needed, picked_frames, target_size

T = TypeVar("T")


class Told(Protocol):
    """Calls a function; what it raises is to name the column."""

    def __call__(self, column: Column, act: Callable[[], T]) -> T:
        """What ``act`` gives."""


class Part(ABC):
    """What one column gives an item."""

    @property
    @abstractmethod
    def shape(self) -> Hashable:
        """Of its tensors."""

    @abstractmethod
    def tensors(self) -> Any:
        """The pixels. Raises :class:`ConfigError` where they cannot be read."""


class _Pictures(Part):
    def __init__(self, files: Sequence[MediaFile], targets: Sequence[Size], config: MediaConfig) -> None:
        self._files = files
        self._targets = targets
        self._config = config

    @property
    def shape(self) -> Hashable:
        return tuple((3, *target) for target in self._targets)

    def tensors(self) -> list[torch.Tensor]:
        pictures = [rgb_image(file, self._config.background) for file in self._files]
        return [
            _pixels(fitted(picture, target)) for picture, target in zip(pictures, self._targets, strict=True)
        ]


class _Picture(_Pictures):
    @property
    def shape(self) -> Hashable:
        return (3, *self._targets[0])

    def tensors(self) -> Any:
        return super().tensors()[0]


class _Video(Part):
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
        return frames.transpose(0, 1).contiguous()


def _pixels(picture: Any) -> torch.Tensor:
    """Of a Pillow image of mode RGB, uint8 [3, H, W]."""
    return torch.from_numpy(needed("numpy").array(picture)).permute(2, 0, 1).contiguous()


def parts_of(
    columns: Sequence[Column], files: Mapping[str, Sequence[MediaFile]], config: MediaConfig, told: Told
) -> dict[str, Part]:
    """By name what the ``files`` of a row give; nothing for a picture or a video that the row lacks.

    The first of ``columns`` with files that has no size of its own gives the item its size. All videos of
    that size have equally many frames. Raises :class:`ConfigError`, by ``told``.
    """
    present = [column for column in columns if files[column.name] or column.kind == "images"]
    clips = {
        column.name: told(column, partial(clip_of, files[column.name], config.background))
        for column in present
        if column.kind == "video"
    }

    def sizes(column: Column) -> list[Size]:
        if column.kind == "video":
            return [clips[column.name].size]
        return [image_size(file) for file in files[column.name]]

    leading = next((column for column in present if not column.own and files[column.name]), None)
    size = None
    if leading is not None:
        size = told(leading, lambda: target_size(sizes(leading)[0], config))
    most = min(
        [told(c, partial(_frames, clips[c.name], config)) for c in present if c.name in clips and not c.own],
        default=config.num_frames,
    )

    def part(column: Column) -> Part:
        if column.own or size is None:
            targets = [target_size(own, config) for own in sizes(column)]
        else:
            targets = [size] * max(1, len(files[column.name]))
        if column.kind == "video":
            clip = clips[column.name]
            return _Video(clip, targets[0], _picked(clip, config, config.num_frames if column.own else most))
        if column.kind == "image":
            return _Picture(files[column.name], targets, config)
        return _Pictures(files[column.name], targets[: len(files[column.name])], config)

    return {column.name: told(column, partial(part, column)) for column in present}


def _picked(clip: Clip, config: MediaConfig, most: int) -> list[int]:
    return picked_frames(config, clip.count(frames_needed(config, clip.rate)), clip.rate, most)


def _frames(clip: Clip, config: MediaConfig) -> int:
    return len(_picked(clip, config, config.num_frames))
