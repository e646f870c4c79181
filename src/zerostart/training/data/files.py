"""Files of pictures and videos: those that cells of a table name or hold, their digests, and decoding them.

Pictures are decoded by Pillow: whatever is in a file becomes upright red, green and blue of 8 bits. Videos
are files that PyAV decodes, animations that Pillow does, and frames that lie side by side. A clip counts its
frames without decoding them, and decodes those that are asked for, one at a time.
"""

from __future__ import annotations

import hashlib
import importlib
import io
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, BinaryIO

from zerostart.errors import ConfigError
from zerostart.training.data.media_config import Kind

if TYPE_CHECKING:
    from av import VideoFrame
    from PIL.Image import Image

Color = tuple[int, int, int]  # red, green, blue

#: What a directory is looked through for. Elsewhere a picture is what Pillow can open.
IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff")
VIDEO_SUFFIXES = (".mp4", ".mov", ".mkv", ".webm", ".avi", ".flv", ".wmv", ".m4v", ".mpg", ".mpeg")

#: Files whose length changes with their contents. Of others, which may be not compressed, all is looked at.
_COMPRESSED = (*(s for s in IMAGE_SUFFIXES if s not in (".bmp", ".tif", ".tiff")), *VIDEO_SUFFIXES)
#: Bytes at the start and at the end of a file that are looked at: all of a small one.
_LOOKED_AT = 64 * 1024


@dataclass(frozen=True)
class MediaFile:
    """A file by its ``path`` (or a directory of frames), or its ``data``; ``name`` is for messages."""

    name: str
    path: Path | None
    data: bytes | None = None

    @property
    def suffix(self) -> str:
        """In small letters, with the dot."""
        return Path(self.name).suffix.lower()

    def opened(self) -> BinaryIO:
        """To be read from its start; raises OSError."""
        # No path: the bytes came with the table, and there is no file to look at.
        return io.BytesIO(self.data or b"") if self.path is None else self.path.open("rb")

    def stills(self) -> list[MediaFile]:
        """The frames of a directory, in the order of the numbers in their names."""
        if self.path is None or not self.path.is_dir():
            return []
        found = [path for path in self.path.iterdir() if path.suffix.lower() in IMAGE_SUFFIXES]
        return [MediaFile(str(path), path) for path in sorted(found, key=lambda path: _natural(path.name))]

    def exists(self) -> bool:
        """Whether there is anything to open."""
        return self.path is None or self.path.exists()

    def state(self) -> list[list[int]] | None:
        """Length and time of modification, in nanoseconds, of it or of its frames; None where it is gone."""
        if self.path is None:
            return []
        try:
            found = [one.path.stat() for one in self.stills() or [self] if one.path is not None]
        except FileNotFoundError:
            return None
        return [[status.st_size, status.st_mtime_ns] for status in found]

    def digest(self) -> bytes:
        """Of its length, start and end, or of all of it; of a directory: of its frames. Raises OSError."""
        state = hashlib.blake2b(digest_size=16)
        for file in self.stills() or [self]:
            with file.opened() as content:
                length = content.seek(0, io.SEEK_END)
                state.update(length.to_bytes(8, "little"))
                if file.suffix not in _COMPRESSED:
                    content.seek(0)
                    while data := content.read(_LOOKED_AT):
                        state.update(data)
                    continue
                # A compressed file does not change in its middle alone.
                # A set: of a file no longer than one piece start and end are the same, and read once.
                for start in sorted({0, max(0, length - _LOOKED_AT)}):
                    content.seek(start)
                    state.update(content.read(_LOOKED_AT))
        return state.digest()


def _natural(name: str) -> list[tuple[int, str]]:
    """``frame2`` before ``frame10``."""
    # Pairs, for a number and a text cannot be compared; -1 puts texts before numbers.
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)]


def files_of(cell: object, kind: Kind, base: Path, where: str) -> tuple[MediaFile, ...]:
    """The files that a cell names: relative to ``base``, or absolute; or holds (``bytes`` of a dataset).

    None for an empty cell. A text that begins with ``[`` is a JSON list, as CSV needs it, where
    several files can be. Raises :class:`ConfigError` for what names no file; ``where`` says which cell it
    is.
    """
    if kind != "image" and isinstance(cell, str) and cell.lstrip().startswith("["):
        cell = _listed(cell, where)
    if cell is None or cell == "":
        return ()
    if not isinstance(cell, (list, tuple)):
        return (_file(cell, base, where),)
    if kind == "image":
        raise ConfigError(
            f"{where}: a list of files, but the column holds one picture; set the kind of the "
            "column to images in media.columns"
        )
    return tuple(_file(part, base, where) for part in cell)


def _listed(text: str, where: str) -> Sequence[object]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: {text!r} is not a JSON list of files: {error}") from error
    assert isinstance(value, list), "JSON that begins with [ is a list"
    return value


def _file(cell: object, base: Path, where: str) -> MediaFile:
    if isinstance(cell, dict) and cell.keys() == {"bytes", "path"}:
        # The bytes count before the path, which in a saved dataset may be of another machine.
        if cell["bytes"] is not None:
            return MediaFile(cell["path"] or where, None, cell["bytes"])
        cell = cell["path"]
    if not isinstance(cell, str) or not cell:
        raise ConfigError(f"{where}: {cell!r} is not the name of a file")
    if cell.startswith(("http://", "https://")):
        raise ConfigError(f"{where}: {cell} is a URL; download the file, and give its path")
    # An absolute name replaces the base, as `/` of pathlib has it.
    path = base / cell
    return MediaFile(str(path), path)


def needed(module: str) -> ModuleType:
    """A module of the libraries that decode; raises :class:`ConfigError` where it is not installed."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"Pillow and PyAV decode pictures and videos, but {module.partition('.')[0]} cannot be "
            f"imported ({error}): pip install 'zerostart[media]'"
        ) from error


#: The tag of EXIF that says how a camera was held; these values lay a picture on its side.
_ORIENTATION, _ON_ITS_SIDE = 0x0112, (5, 6, 7, 8)


@contextmanager
def readable(file: MediaFile, what: str) -> Iterator[None]:
    """Inside a library reads ``file``; raises :class:`ConfigError`, which names it, where that fails."""
    try:
        yield
    # Errors of ours say already what is wrong, and a lack of memory is not the file's fault.
    except (ConfigError, MemoryError):
        raise
    except Exception as error:  # of many types, which differ between versions
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ConfigError(
            f"{file.name} cannot be read as {what} ({reason}): the file is damaged, or of a format "
            "that the library does not know; replace it, or remove its row from the table"
        ) from error


@contextmanager
def opened_image(file: MediaFile) -> Iterator[Image]:
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


def rgb_image(file: MediaFile, background: Color) -> Image:
    """The (first) picture of a file, upright, as a Pillow image of mode RGB. Raises :class:`ConfigError`."""
    with opened_image(file) as image:
        return rgb(needed("PIL.ImageOps").exif_transpose(image), background)


def rgb(image: Image, background: Color) -> Image:
    """A Pillow image in mode RGB, what is transparent over ``background``.

    Raises ValueError for a mode whose values have no range that is known.
    """
    if image.mode.startswith("I"):
        image = _eight_bits(image)
    if image.mode == "F":
        raise ValueError("its pixels are floating-point numbers, whose range is unknown")
    if not image.has_transparency_data:
        return image.convert("RGB")
    pillow = needed("PIL.Image")
    layer = image.convert("RGBA")
    # By alpha, for `convert` would show whatever colour lies under the transparent pixels.
    return pillow.alpha_composite(pillow.new("RGBA", layer.size, (*background, 255)), layer).convert("RGB")


def _eight_bits(image: Image) -> Image:
    values = needed("numpy").asarray(image).astype("int64")
    if values.min() < 0 or values.max() > 65535:
        raise ValueError("its pixels have 32 bits, whose range is unknown")
    # 65535 becomes 255 exactly; half of the divisor is added to round to the nearest.
    return needed("PIL.Image").fromarray(((values * 255 + 32767) // 65535).astype("uint8"))


class Clip(ABC):
    """Frames in their order, at ``rate`` a second; None where nothing tells their times.

    ``size`` is (height, width) of an upright frame.
    """

    rate: Fraction | None = None
    size: tuple[int, int]

    @abstractmethod
    def count(self, most: int | None) -> int:
        """How many frames there are, or that there are ``most``. Raises :class:`ConfigError`."""

    @abstractmethod
    def pictures(self, indices: Sequence[int]) -> Iterator[Image]:
        """Frames by their numbers, which never fall, as Pillow images of mode RGB.

        Raises :class:`ConfigError`.
        """


def clip_of(files: Sequence[MediaFile], background: Color) -> Clip:
    """The clip that one file, one directory or a list of pictures is. Raises :class:`ConfigError`."""
    first = files[0]
    if len(files) > 1:
        return _Stills(files, background)
    if first.path is not None and first.path.is_dir():
        stills = first.stills()
        if not stills:
            raise ConfigError(
                f"{first.name}: no frames in this directory; frames are files that end with "
                f"{' '.join(IMAGE_SUFFIXES)}"
            )
        return _Stills(stills, background)
    return _Animation(first, background) if _is_picture(first) else _Stream(first)


def _is_picture(file: MediaFile) -> bool:
    if file.suffix in IMAGE_SUFFIXES or file.suffix in VIDEO_SUFFIXES:
        return file.suffix in IMAGE_SUFFIXES
    try:
        with opened_image(file):
            return True
    except ConfigError:
        return False


class _Stills(Clip):
    """One picture a frame."""

    def __init__(self, files: Sequence[MediaFile], background: Color) -> None:
        self._files = files
        self._background = background
        self.size = image_size(files[0])

    def count(self, most: int | None) -> int:
        return len(self._files)

    def pictures(self, indices: Sequence[int]) -> Iterator[Image]:
        for index in indices:
            picture = rgb_image(self._files[index], self._background)
            width, height = picture.size
            if (height, width) != self.size:
                raise ConfigError(
                    f"{self._files[index].name} has {height} x {width} pixels, and the first frame of its "
                    f"video {self.size[0]} x {self.size[1]} (height x width); make them alike"
                )
            yield picture


class _Animation(Clip):
    """What Pillow opens: GIF, WebP, APNG, or a picture, which is a video of one frame."""

    def __init__(self, file: MediaFile, background: Color) -> None:
        self._file = file
        self._background = background
        with opened_image(file) as image:
            # The second picture of an MPO is the same one for the other eye.
            self._count = 1 if image.format == "MPO" else int(getattr(image, "n_frames", 1))
            if self._count > 1:
                self.size = (image.height, image.width)
                self.rate = self._average_rate(image)
        if self._count == 1:
            self.size = image_size(file)

    def _average_rate(self, image: Image) -> Fraction | None:
        """Frames a second, by how long each is shown."""
        shown = Fraction(0)
        for index in range(self._count):
            image.seek(index)
            # Pillow gives milliseconds.
            shown += Fraction(image.info.get("duration", 0))
        # None for an animation whose frames have no durations: nothing tells its times.
        return Fraction(1000 * self._count) / shown if shown else None

    def count(self, most: int | None) -> int:
        return self._count

    def pictures(self, indices: Sequence[int]) -> Iterator[Image]:
        if self._count == 1:
            yield from [rgb_image(self._file, self._background)] * len(indices)
            return
        with opened_image(self._file) as image:
            for index in indices:
                image.seek(index)
                yield rgb(image, self._background)


class _Stream(Clip):
    """The first video stream of a file, by PyAV."""

    def __init__(self, file: MediaFile) -> None:
        self._file = file
        with readable(file, "a video"), self._opened() as container:
            stream = self._stream(container)
            # Either may be missing, by container; frames of unlike distances have an average only.
            self.rate = stream.average_rate or stream.guessed_rate
            # The first frame is decoded for the size: what headers say may be another, and lie on its side.
            for frame in container.decode(stream):
                picture = _upright(frame)
                self.size = (picture.height, picture.width)
                break
            else:
                raise ConfigError(f"{file.name} has no frame that can be decoded; replace it")

    def _opened(self) -> Any:
        # Opened anew for each use: a stream is read forwards only, and workers must not share a handle.
        source = self._file.opened() if self._file.path is None else str(self._file.path)
        return needed("av").open(source)

    def _stream(self, container: Any) -> Any:
        if not container.streams.video:
            raise ConfigError(f"{self._file.name} has no video stream; replace it")
        stream = container.streams.video[0]
        # PyAV's default divides a frame among threads; several frames at a time are faster.
        stream.thread_type = "AUTO"
        return stream

    def count(self, most: int | None) -> int:
        with readable(self._file, "a video"), self._opened() as container:
            found = 0
            for packet in container.demux(self._stream(container)):
                # An empty packet ends the stream, and one that is to be discarded is never shown.
                found += bool(packet.size) and not packet.is_discard
                if found == most:
                    break
            return found

    def pictures(self, indices: Sequence[int]) -> Iterator[Image]:
        with readable(self._file, "a video"), self._opened() as container:
            frames = enumerate(container.decode(self._stream(container)))
            # Frames are decoded in order and never sought: many files have wrong times or keyframes, and a
            # search would give another frame.
            number, frame = next(frames)
            for index in indices:
                while number < index:
                    reached = number
                    number, frame = next(frames, (index, None))
                    if frame is None:
                        raise ConfigError(
                            f"{self._file.name}: only {reached + 1} frames can be decoded, but its "
                            "packets hold "
                            f"{index + 1} or more; encode the video again, or remove its row from the table"
                        )
                yield _upright(frame)


def _upright(frame: VideoFrame) -> Image:
    picture = frame.to_image()
    turns = round(frame.rotation / 90) % 4  # counterclockwise
    how = needed("PIL.Image").Transpose
    return picture.transpose((how.ROTATE_90, how.ROTATE_180, how.ROTATE_270)[turns - 1]) if turns else picture
