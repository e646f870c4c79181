"""Pictures and videos: files, decoding, target sizes, and the choice of frames.

Pillow decodes pictures to upright red, green and blue of 8 bits. A video is a file that PyAV decodes, an
animation that Pillow decodes, or a list or directory of frames. Sizes and frame numbers come from headers and
packets, before pixels are decoded.
"""

from __future__ import annotations

import hashlib
import importlib
import io
import math
import os
import re
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, BinaryIO

import torch

from zerostart.checkpoint.paths import expanded
from zerostart.errors import ConfigError
from zerostart.training.data.media_config import Column, DatasetConfig

if TYPE_CHECKING:
    from av import VideoFrame
    from PIL.Image import Image

    from zerostart.training.config.configuration import SamplesConfig

Color = tuple[int, int, int]  # red, green, blue
Size = tuple[int, int]  # height, width

#: Suffixes of the files that a directory is searched for. A table may name any picture that Pillow opens.
IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff")
VIDEO_SUFFIXES = (".mp4", ".mov", ".mkv", ".webm", ".avi", ".flv", ".wmv", ".m4v", ".mpg", ".mpeg")

#: Step of the sides of standard sizes from `_SMALL_PIXELS` on, in pixels; below it is `multiple_of`.
_STEP, _SMALL_PIXELS = 64, 512 * 512
#: Largest ratio of the sides of a standard size.
_MAX_RATIO = 2
#: EXIF tag of the camera's orientation, and its values for a picture turned by 90 degrees.
_ORIENTATION, _ON_ITS_SIDE = 0x0112, (5, 6, 7, 8)
_WHITE = (255, 255, 255)


@dataclass(frozen=True)
class MediaFile:
    """A file or a directory of frames at ``path``, or its ``data``."""

    name: str  # for messages
    path: Path | None
    data: bytes | None = None

    def open(self) -> BinaryIO:
        """Open the file for reading; raises OSError."""
        return io.BytesIO(self.data or b"") if self.path is None else self.path.open("rb")

    def frames(self) -> list[MediaFile]:
        """Return the frames of a directory, in the order of the numbers in their names.

        A file has none. Raises ConfigError for a directory without frames.
        """
        if self.path is None or not self.path.is_dir():
            return []
        paths = [path for path in self.path.iterdir() if path.suffix.lower() in IMAGE_SUFFIXES]
        if not paths:
            raise ConfigError(
                f"{self.name}: no frames in this directory; frames are pictures ({' '.join(IMAGE_SUFFIXES)})"
            )
        return [MediaFile(str(path), path) for path in sorted(paths, key=lambda one: _natural_key(one.name))]

    def state(self) -> list[tuple[int, int]] | str:
        """Return size and modification time of each file, or a digest of the bytes.

        Raises ConfigError for an absent file.
        """
        if self.path is None:
            return hashlib.blake2b(self.data or b"", digest_size=16).hexdigest()
        if not self.path.exists():
            raise ConfigError(f"{self.name}: no such file; {suggest_path(self.path)}")
        states = [file.path.stat() for file in self.frames() or [self] if file.path is not None]
        return [(status.st_size, status.st_mtime_ns) for status in states]


def suggest_path(path: Path) -> str:
    """Suggest the existing path that differs only in slashes and capitals, for messages."""
    found = Path(path.anchor or ".")
    for part in Path(str(path).replace("\\", "/")).parts[bool(path.anchor) :]:
        name = part if os.path.lexists(found / part) else _list_folded(found).get(part.casefold())
        if name is None:
            return "correct the name; names in a table are relative to the directory media.base"
        found /= name
    return f"did you mean {found}? (slashes and capitals must be the same)"


@lru_cache(maxsize=64)  # many rows may name files of one folder
def _list_folded(folder: Path) -> dict[str, str]:
    return {entry.name.casefold(): entry.name for entry in sorted(folder.glob("*"))}


def _natural_key(name: str) -> list[tuple[int, str]]:
    """Return a sort key that puts ``frame2`` before ``frame10``."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)]


def import_decoder(module: str) -> ModuleType:
    """Import a module of Pillow, PyAV or NumPy; raises ConfigError."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"Pillow and PyAV decode pictures and videos, but {module.partition('.')[0]} cannot be "
            f"imported ({error}): pip install 'zerostart[media]'"
        ) from error


@contextmanager
def _readable(file: MediaFile, kind: str) -> Iterator[None]:
    """Convert any error of a decoding library to a ConfigError that names ``file``."""
    try:
        yield
    except (ConfigError, MemoryError):  # running out of memory is not the file's fault
        raise
    except Exception as error:  # of many types, which differ between versions
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ConfigError(
            f"{file.name} cannot be read as {kind} ({reason}): the file is damaged or has an unknown format; "
            "replace it, or remove its row from the table"
        ) from error


@contextmanager
def _open_image(file: MediaFile) -> Iterator[Image]:
    pillow = import_decoder("PIL.Image")
    with _readable(file, "a picture"), file.open() as content, pillow.open(content) as image:
        yield image


def image_size(file: MediaFile) -> Size:
    """Return height and width of the upright picture, by its header. Raises ConfigError."""
    with _open_image(file) as image:
        if image.getexif().get(_ORIENTATION) in _ON_ITS_SIDE:
            # Decoded, since Pillow's reader of TIFF turns pictures itself in some versions.
            image = import_decoder("PIL.ImageOps").exif_transpose(image)
        return image.height, image.width


def rgb_image(file: MediaFile, background: Color) -> Image:
    """Decode the first picture of a file, upright and in mode RGB. Raises ConfigError."""
    with _open_image(file) as image:
        return _rgb(import_decoder("PIL.ImageOps").exif_transpose(image), background)


def _rgb(image: Image, background: Color) -> Image:
    """Convert to mode RGB, with ``background`` under transparent parts."""
    pillow = import_decoder("PIL.Image")
    if image.mode.startswith(("I", "F")):
        values = import_decoder("numpy").asarray(image)
        if image.mode == "F" or values.min() < 0 or values.max() > 65535:
            raise ValueError(f"pixels of mode {image.mode} with more than 16 bits have no known range")
        # Half of the divisor is added to round to the nearest.
        image = pillow.fromarray(((values.astype("int64") * 255 + 32767) // 65535).astype("uint8"))
    if not image.has_transparency_data:
        return image.convert("RGB")
    layer = image.convert("RGBA")
    # `convert` to RGB would show the colour of transparent pixels.
    return pillow.alpha_composite(pillow.new("RGBA", layer.size, (*background, 255)), layer).convert("RGB")


#: The time of each frame in seconds after the first one, and the time of the end. Without times in the file:
#: the numbers of the frames, and None.
Timeline = tuple[Sequence[Fraction], Fraction | None]


def _regular_timeline(count: int, rate: Fraction | None) -> Timeline:
    return [index / (rate or Fraction(1)) for index in range(count)], count / rate if rate else None


class Clip(ABC):
    """Frames in their order; ``size`` is (height, width) of an upright frame."""

    size: Size

    @abstractmethod
    def timeline(self, seconds: Fraction | None, count: int | None) -> Timeline:
        """Return the times of at least ``count`` frames, or those up to ``seconds``.

        Raises ConfigError.
        """

    @abstractmethod
    def pictures(self, indices: Sequence[int]) -> Iterator[Image]:
        """Decode the frames with these ascending numbers in mode RGB. Raises ConfigError."""


def open_clip(files: Sequence[MediaFile], background: Color) -> Clip:
    """Open one video file, one directory or a list of pictures; raises ConfigError."""
    first = files[0]
    if stills := files if len(files) > 1 else first.frames():
        return _Stills(stills, background)
    if Path(first.name).suffix.lower() not in IMAGE_SUFFIXES:
        return _Stream(first)
    with _open_image(first) as image:
        count = int(getattr(image, "n_frames", 1))
        size = (image.height, image.width)
    return _Animation(first, background, count, size) if count > 1 else _Stills([first], background)


class _Stills(Clip):
    """One picture a frame, without times."""

    def __init__(self, files: Sequence[MediaFile], background: Color) -> None:
        self._files = files
        self._background = background
        self.size = image_size(files[0])

    def timeline(self, seconds: Fraction | None, count: int | None) -> Timeline:
        return _regular_timeline(len(self._files), None)

    def pictures(self, indices: Sequence[int]) -> Iterator[Image]:
        for index in indices:
            yield rgb_image(self._files[index], self._background)


class _Animation(Clip):
    """A GIF, WebP or APNG of several frames."""

    def __init__(self, file: MediaFile, background: Color, count: int, size: Size) -> None:
        self._file = file
        self._background = background
        self._count = count
        self.size = size

    def timeline(self, seconds: Fraction | None, count: int | None) -> Timeline:
        starts = [Fraction(0)]
        with _open_image(self._file) as image:
            for index in range(self._count):
                image.seek(index)
                starts.append(starts[-1] + Fraction(image.info.get("duration", 0)) / 1000)
        *starts, end = starts
        return (starts, end) if end else _regular_timeline(self._count, None)

    def pictures(self, indices: Sequence[int]) -> Iterator[Image]:
        with _open_image(self._file) as image:
            for index in indices:
                image.seek(index)
                yield _rgb(image, self._background)


class _Stream(Clip):
    """The first video stream of a file, by PyAV."""

    def __init__(self, file: MediaFile) -> None:
        self._file = file
        with self._open() as (container, stream):
            # The first frame is decoded for the size: headers may say another.
            for frame in container.decode(stream):
                picture = _rotate_upright(frame)
                self.size = (picture.height, picture.width)
                break
            else:
                raise ConfigError(f"{file.name} has no frame that can be decoded; replace it")

    @contextmanager
    def _open(self) -> Iterator[tuple[Any, Any]]:
        # Opened for each use: a stream is read forwards only, and workers must not share a handle.
        with _readable(self._file, "a video"):
            source = self._file.open() if self._file.path is None else str(self._file.path)
            with import_decoder("av").open(source) as container:
                if not container.streams.video:
                    raise ConfigError(f"{self._file.name} has no video stream; replace it")
                stream = container.streams.video[0]
                # PyAV's default divides a frame among threads; several frames at a time are faster.
                stream.thread_type = "AUTO"
                yield container, stream

    def timeline(self, seconds: Fraction | None, count: int | None) -> Timeline:
        shown: list[tuple[int, int]] = []
        untimed, begin, beyond = 0, math.inf, math.inf
        with self._open() as (container, stream):
            base, rate = stream.time_base, stream.average_rate or stream.guessed_rate
            for packet in container.demux(stream):
                # An empty packet ends the stream, and one that is to be discarded is never shown.
                if not packet.size or packet.is_discard:
                    continue
                if len(shown) + untimed == count:
                    break
                if packet.pts is None:
                    untimed += 1
                    continue
                shown.append((packet.pts, packet.duration or 0))
                begin = min(begin, packet.pts)
                if seconds is not None and (packet.pts - begin) * base >= seconds:
                    beyond = min(beyond, packet.pts)
                # Packets come in the order of decoding: no later one is shown before this one's dts.
                if packet.dts is not None and packet.dts >= beyond:
                    break
        shown = sorted(one for one in shown if one[0] <= beyond)
        if untimed or not shown:
            return _regular_timeline(untimed + len(shown), rate)
        starts = [(time - shown[0][0]) * base for time, _ in shown]
        # Containers round times to their own unit: a constant rate is restored exactly.
        if rate is not None:
            near = min(base, 1 / (4 * rate))
            if all(abs(start - index / rate) <= near for index, start in enumerate(starts)):
                return _regular_timeline(len(starts), rate)
        last = shown[-1][1] * base or (1 / rate if rate else Fraction(0))
        return starts, starts[-1] + last

    def pictures(self, indices: Sequence[int]) -> Iterator[Image]:
        with self._open() as (container, stream):
            # Never sought: many files have wrong keyframes, and a search would give another frame.
            frames = enumerate(container.decode(stream))
            number, frame = next(frames)
            for index in indices:
                while number < index:
                    number, frame = next(frames, (index, None))
                if frame is None:
                    raise ConfigError(
                        f"{self._file.name}: frame {index + 1} cannot be decoded, but its packets are there; "
                        "encode the video again, or remove its row from the table"
                    )
                yield _rotate_upright(frame)


def _rotate_upright(frame: VideoFrame) -> Image:
    picture = frame.to_image()
    turns = round(frame.rotation / 90) % 4  # counterclockwise
    how = import_decoder("PIL.Image").Transpose
    return picture.transpose((how.ROTATE_90, how.ROTATE_180, how.ROTATE_270)[turns - 1]) if turns else picture


def choose_frames(clip: Clip, config: DatasetConfig, max_frames: int) -> list[int]:
    """Return the numbers of at most ``max_frames`` chosen frames; raises ConfigError."""
    even = config.frames == "even"
    # Converted from text: 23.976 means 23976/1000, not the nearest float.
    rate = None if config.frame_rate is None else Fraction(str(config.frame_rate))
    seconds = None if rate is None else config.num_frames / rate
    starts, end = clip.timeline(seconds, None if even or rate is not None else config.num_frames)
    available = math.floor(end * rate) if rate and end is not None else len(starts)
    factor, remainder = config.time_division_factor, config.time_division_remainder
    count = min(available, max_frames)
    count -= (count - remainder) % factor
    if count < 1:
        raise ConfigError(
            f"{available} frames are too few: a number of frames must leave the remainder "
            f"{remainder} when divided by {factor} (media.time_division_remainder and "
            "media.time_division_factor); leave the video out"
        )
    if even:
        return [_nearest(starts, index * starts[-1] / max(count - 1, 1)) for index in range(count)]
    if rate is None or end is None:
        return list(range(count))
    return [_nearest(starts, index / rate) for index in range(count)]


def _nearest(starts: Sequence[Fraction], time: Fraction) -> int:
    """Return the number of the frame with the nearest time, of two the even one."""
    after = bisect_left(starts, time)
    if after in (0, len(starts)):
        return min(after, len(starts) - 1)
    before, left, right = after - 1, time - starts[after - 1], starts[after] - time
    return after if right < left or (right == left and after % 2 == 0) else before


def target_size(size: Size, config: DatasetConfig) -> Size:
    """Return the size that a picture is brought to, in multiples of ``config.multiple_of``.

    Raises ConfigError for a picture that is too small to have such a size.
    """
    if config.height is not None and config.width is not None:
        return config.height, config.width
    if config.buckets != "own":
        buckets = config.buckets
        sizes = standard_sizes(config.max_pixels, config.multiple_of) if isinstance(buckets, str) else buckets
        return _nearest_shape(size, sizes)
    # To the pixel as DiffSynth-Studio does it, so that its data give the same here.
    height, width = size
    if height * width > config.max_pixels:
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
    """Return sizes from 1:2 to 2:1, the widest for each height; raises ConfigError."""
    # Each size needs separate batches, so there should be few.
    step = math.lcm(_STEP, multiple_of) if max_pixels >= _SMALL_PIXELS else multiple_of
    sizes = []
    for height in range(step, math.isqrt(max_pixels * _MAX_RATIO) + 1, step):
        width = max_pixels // height // step * step
        if width and max(height, width) <= _MAX_RATIO * min(height, width):
            sizes.append((height, width))
    if not sizes:
        raise ConfigError(
            f"media.max_pixels {max_pixels} allows no size in multiples of media.multiple_of "
            f"{multiple_of}; raise it"
        )
    return tuple(sizes)


def _nearest_shape(size: Size, sizes: Sequence[Size]) -> Size:
    """Return the size whose shape is nearest, of equals the largest, then the first."""
    # In logarithms twice as wide and twice as high are equally far from a square.
    shape = math.log(size[0] / size[1])
    # Rounded, or the last bits of a logarithm would decide between sizes of the same shape.
    return min(sizes, key=lambda s: (round(abs(math.log(s[0] / s[1]) - shape), 9), -s[0] * s[1]))


def fit_picture(picture: Image, target: Size) -> Image:
    """Scale a picture (bilinear, antialiased) to cover ``target``, and crop its centre.

    The numbers are those of torchvision's ``resize`` and ``center_crop``, which DiffSynth-Studio uses.
    """
    (width, height), (target_height, target_width) = picture.size, target
    scale = max(target_width / width, target_height / height)
    scaled = round(width * scale), round(height * scale)
    if scaled != picture.size:
        picture = picture.resize(scaled, import_decoder("PIL.Image").Resampling.BILINEAR)
    x = round((scaled[0] - target_width) / 2.0)
    y = round((scaled[1] - target_height) / 2.0)
    if scaled == (target_width, target_height):
        return picture
    return picture.crop((x, y, x + target_width, y + target_height))


def decode_row(
    columns: Sequence[Column], files: Mapping[str, Sequence[MediaFile]], config: DatasetConfig
) -> dict[str, torch.Tensor | list[torch.Tensor]]:
    """Decode the ``files`` of a row by column; absent pictures and videos are left out.

    The first of ``columns`` with files that shares the item's size determines it. All videos of that size
    have equally many frames. Raises ConfigError.
    """
    # A column of several pictures is also there when it is empty: as an empty list.
    present = [column for column in columns if files[column.name] or column.kind == "images"]
    clips = {
        column.name: open_clip(files[column.name], config.background)
        for column in present
        if column.kind == "video"
    }

    def sizes(column: Column) -> list[Size]:
        clip = clips.get(column.name)
        return [clip.size] if clip else [image_size(file) for file in files[column.name]]

    def decode(column: Column) -> torch.Tensor | list[torch.Tensor]:
        own = None if column.own_size else shared
        targets = [own or target_size(size, config) for size in sizes(column)]
        if column.kind == "video":
            max_frames = config.num_frames if column.own_size else frames
            clip = clips[column.name]
            return _decode_video(clip, targets[0], choose_frames(clip, config, max_frames))
        pictures = [
            _pixels(fit_picture(rgb_image(file, config.background), target))
            for file, target in zip(files[column.name], targets, strict=True)
        ]
        return pictures if column.kind == "images" else pictures[0]

    # Size and number of frames depend on all columns, so they are known before one is decoded.
    sharing = [column for column in present if not column.own_size]
    leading = next((column for column in sharing if files[column.name]), None)
    shared = None if leading is None else target_size(sizes(leading)[0], config)
    frames = config.num_frames
    for column in sharing:
        if column.name in clips:
            frames = len(choose_frames(clips[column.name], config, frames))
    return {column.name: decode(column) for column in present}


def _decode_video(clip: Clip, target: Size, indices: Sequence[int]) -> torch.Tensor:
    frames = torch.empty((len(indices), 3, *target), dtype=torch.uint8, device="cpu")
    for place, picture in enumerate(clip.pictures(indices)):
        frames[place] = _pixels(fit_picture(picture, target))
    return frames.transpose(0, 1).contiguous()


def _pixels(picture: Image) -> torch.Tensor:
    """Return a picture of mode RGB as uint8 [3, H, W]."""
    # `array` copies; `asarray` would give Pillow's own memory, which is read-only.
    return torch.from_numpy(import_decoder("numpy").array(picture)).permute(2, 0, 1).contiguous()


def to_picture(pixels: torch.Tensor) -> Image:
    """Convert uint8 [3, H, W] to a Pillow image of mode RGB; raises ConfigError."""
    return import_decoder("PIL.Image").fromarray(pixels.permute(1, 2, 0).contiguous().numpy())


class PicturedText(str):
    """A text with pictures; the string has a digest of their pixels."""

    text: str
    pictures: tuple[Image, ...]

    __slots__ = ("pictures", "text")

    @classmethod
    def of(cls, text: str, pictures: Sequence[Image]) -> PicturedText:
        """Join the ``text`` with these upright ``pictures`` of mode RGB."""
        hashed = hashlib.blake2b(digest_size=16)
        for picture in pictures:
            # The size as well: the same bytes in other sides are another picture.
            hashed.update(repr(picture.size).encode() + picture.tobytes())
        pictured = cls(f"{text} [pictures {hashed.hexdigest()}]")
        pictured.text, pictured.pictures = text, tuple(pictures)
        return pictured


def sample_texts(settings: SamplesConfig) -> tuple[list[str], list[str]]:
    """Return each prompt and its negative prompt, with the pictures of the prompt.

    Raises ConfigError, naming the file, for a picture that cannot be read.
    """
    if settings.images is None:
        return list(settings.prompts), [settings.negative_prompt] * len(settings.prompts)
    prompts: list[str] = []
    negatives: list[str] = []
    for text, names in zip(settings.prompts, settings.images, strict=True):
        pictures = [_sample_picture(name) for name in ([names] if isinstance(names, str) else names)]
        prompts.append(PicturedText.of(text, pictures))
        # Encoders that see pictures see them with the negative text, too, as their pipelines show them.
        negatives.append(PicturedText.of(settings.negative_prompt, pictures))
    return prompts, negatives


def _sample_picture(name: str) -> Image:
    path = expanded(name)
    if not path.is_file():
        raise ConfigError(f"samples.images: {path}: no such file; {suggest_path(path)}")
    return rgb_image(MediaFile(str(path), path), _WHITE)
