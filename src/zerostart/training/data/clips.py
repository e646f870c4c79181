"""Videos: files that PyAV decodes, animations that Pillow does, and frames that lie side by side.

A clip counts its frames without decoding them, and decodes those that are asked for, one at a time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Any

from zerostart.errors import ConfigError
from zerostart.training.data.files import IMAGE_SUFFIXES, VIDEO_SUFFIXES, MediaFile, needed
from zerostart.training.data.images import image_size, opened_image, readable, rgb, rgb_image

Color = tuple[int, int, int]


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
    def pictures(self, indices: Sequence[int]) -> Iterator[Any]:
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
                f"{first.name}: no frame in this directory; frames are known by {' '.join(IMAGE_SUFFIXES)}"
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

    def pictures(self, indices: Sequence[int]) -> Iterator[Any]:
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

    def _average_rate(self, image: Any) -> Fraction | None:
        """Frames a second, by how long each is shown."""
        shown = Fraction(0)
        for index in range(self._count):
            image.seek(index)
            shown += Fraction(image.info.get("duration", 0))
        return Fraction(1000 * self._count) / shown if shown else None

    def count(self, most: int | None) -> int:
        return self._count

    def pictures(self, indices: Sequence[int]) -> Iterator[Any]:
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
            self.rate = stream.average_rate or stream.guessed_rate
            for frame in container.decode(stream):
                picture = _upright(frame)
                self.size = (picture.height, picture.width)
                break
            else:
                raise ConfigError(f"{file.name} has no frame that can be decoded; replace it")

    def _opened(self) -> Any:
        source = self._file.opened() if self._file.path is None else str(self._file.path)
        return needed("av").open(source)

    def _stream(self, container: Any) -> Any:
        if not container.streams.video:
            raise ConfigError(f"{self._file.name} has no video stream; replace it")
        stream = container.streams.video[0]
        stream.thread_type = "AUTO"
        return stream

    def count(self, most: int | None) -> int:
        """By packets: headers may not tell, or may not tell the truth."""
        with readable(self._file, "a video"), self._opened() as container:
            found = 0
            for packet in container.demux(self._stream(container)):
                found += bool(packet.size) and not packet.is_discard
                if found == most:
                    break
            return found

    def pictures(self, indices: Sequence[int]) -> Iterator[Any]:
        with readable(self._file, "a video"), self._opened() as container:
            frames = enumerate(container.decode(self._stream(container)))
            number, frame = next(frames)
            for index in indices:
                while number < index:
                    reached = number
                    number, frame = next(frames, (index, None))
                    if frame is None:
                        raise ConfigError(
                            f"{self._file.name}: {reached + 1} frames can be decoded, but its packets tell "
                            f"of {index + 1} or more; encode it anew, or take its row out of the table"
                        )
                yield _upright(frame)


def _upright(frame: Any) -> Any:
    """A decoded frame as it is to be shown: a camera that was held upright tells so by quarter turns."""
    picture = frame.to_image()
    turns = round(frame.rotation / 90) % 4  # counterclockwise
    how = needed("PIL.Image").Transpose
    return picture.transpose((how.ROTATE_90, how.ROTATE_180, how.ROTATE_270)[turns - 1]) if turns else picture
