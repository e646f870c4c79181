"""What has been drawn, as files: a picture is a PNG, a video an MP4."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from zerostart.errors import ConfigError, WriteError

#: What encodes videos, the best first, with its options: a build of FFmpeg need not have each.
_ENCODERS: Mapping[str, dict[str, str]] = {
    "libx264": {"crf": "18"},
    "libopenh264": {"b": "8M"},
    "mpeg4": {"b": "8M"},
}
#: What samples are called: their number, and the words that they were drawn for.
_DRAWN = re.compile(r"\d+(-.*)?\.(png|mp4)")


def check_writers(videos: bool) -> None:
    """Raise :class:`ConfigError` where what writes pictures, or ``videos``, is not installed."""
    try:
        import PIL.Image  # noqa: F401

        if videos:
            _encoder()
    except ImportError as error:
        raise ConfigError(
            f"samples are written by Pillow and PyAV, of which one cannot be imported ({error}); install "
            "them: pip install zerostart[media]"
        ) from error


def _encoder() -> str:
    """The first of ``_ENCODERS`` that this PyAV has. Raises :class:`ConfigError`."""
    from av.codec import codecs_available
    from av.codec.codec import Codec, UnknownCodecError

    for name in _ENCODERS:
        if name in codecs_available:
            with contextlib.suppress(UnknownCodecError):  # it reads what it does not write
                Codec(name, "w")
                return name
    raise ConfigError(
        f"samples of several frames are written by PyAV, and this one has no encoder of "
        f"{', '.join(_ENCODERS)}; install one that has (pip install zerostart[media]), or leave samples out"
    )


def write_drawn(path: Path, frames: torch.Tensor, fps: int) -> Path:
    """Write ``frames``, [F, 3, H, W] from 0 to 1, to ``path`` with a suffix of its own; gives that path.

    Raises :class:`WriteError`.
    """
    rows = (frames.clamp(0, 1) * 255).round().to(torch.uint8).permute(0, 2, 3, 1).contiguous().cpu()
    found = path.with_suffix(".png" if len(rows) == 1 else ".mp4")
    try:
        found.parent.mkdir(parents=True, exist_ok=True)
        if len(rows) == 1:
            _picture(found, rows[0])
        else:
            _video(found, rows, fps)
    except _failures() as error:
        raise WriteError(f"{found}: the sample cannot be written: {error}") from error
    return found


def _failures() -> tuple[type[Exception], ...]:
    """What writing fails with; PyAV's own errors, where it is installed, are of its own class."""
    try:
        from av.error import FFmpegError
    except ImportError:
        return (OSError,)
    return (OSError, FFmpegError)


def _picture(path: Path, rows: torch.Tensor) -> None:
    from PIL import Image

    Image.fromarray(rows.numpy()).save(path)


def _video(path: Path, rows: torch.Tensor, fps: int) -> None:
    import av

    _, height, width, _ = rows.shape
    with av.open(str(path), "w") as container:
        # Every player knows yuv420p, whose colours are shared by 2 x 2 pixels.
        name = _encoder()
        stream = container.add_stream(name, rate=fps, options=_ENCODERS[name])
        stream.width, stream.height, stream.pix_fmt = width + width % 2, height + height % 2, "yuv420p"
        for row in rows:
            frame = av.VideoFrame.from_ndarray(row.numpy(), format="rgb24")
            for packet in stream.encode(frame.reformat(stream.width, stream.height, "yuv420p")):
                container.mux(packet)
        for packet in stream.encode():
            container.mux(packet)


def clear_drawn(folder: Path) -> None:
    """Remove what ``write_drawn`` has put into ``folder``, and it where nothing else is there.

    Raises :class:`WriteError`.
    """
    try:
        for file in folder.iterdir() if folder.is_dir() else ():
            if _DRAWN.fullmatch(file.name) and not file.is_dir():
                file.unlink()
    except OSError as error:
        raise WriteError(f"{folder}: what is there cannot be removed: {error.strerror}") from error
    with contextlib.suppress(OSError):  # others have put something there
        folder.rmdir()


def read_pictures(folder: Path) -> np.ndarray[Any, Any] | None:
    """The pictures that were written into ``folder``, in their order: bytes, [N, H, W, 3]; None for none.

    Raises :class:`WriteError` where one is not there any more.
    """
    from PIL import Image

    files = sorted(file for file in folder.glob("*.png") if _DRAWN.fullmatch(file.name))
    try:
        return np.stack([np.asarray(Image.open(file).convert("RGB")) for file in files]) if files else None
    except OSError as error:
        raise WriteError(f"{folder}: a sample that was written cannot be read: {error}") from error
