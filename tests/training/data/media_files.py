"""Real pictures that scikit-learn ships, and videos whose frames are known by their colour."""

import importlib.util
from fractions import Fraction
from pathlib import Path

import numpy as np
from PIL import Image

_SHIPPED = Path(importlib.util.find_spec("sklearn").origin).parent / "datasets" / "images"
#: Photographs of 427 x 640 pixels (height x width).
CHINA, FLOWER = _SHIPPED / "china.jpg", _SHIPPED / "flower.jpg"


def numbered_frames(count, height=32, width=48):
    """Frame ``i`` is of one grey, ``2 * i``."""
    return [np.full((height, width, 3), 2 * index, dtype=np.uint8) for index in range(count)]


def frame_numbers(video):
    """Which of the `numbered_frames` a decoded video has; [3, F, H, W], every pixel of a frame alike."""
    assert (video == video[:1, :, :1, :1]).all()
    return [int(value) // 2 for value in video[0, :, 0, 0]]


def write_video(path, frames, rate=24, codec="ffv1", pixels="bgr0", times=None):
    """Without loss in a .mkv by default; ``times`` are those of the frames, in milliseconds."""
    import av

    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=rate)
        stream.height, stream.width = frames[0].shape[:2]
        stream.pix_fmt = pixels
        if times is not None:
            stream.codec_context.time_base = Fraction(1, 1000)
        for number, frame in enumerate(frames):
            shown = av.VideoFrame.from_ndarray(frame, format="rgb24")
            if times is not None:
                shown.pts, shown.time_base = times[number], Fraction(1, 1000)
            container.mux(stream.encode(shown))
        container.mux(stream.encode())
    return path


def write_animation(path, frames, milliseconds):
    """A GIF or a WebP, without loss."""
    pictures = [Image.fromarray(frame) for frame in frames]
    options = {"lossless": True} if path.suffix == ".webp" else {}
    pictures[0].save(
        path, save_all=True, append_images=pictures[1:], duration=milliseconds, loop=0, **options
    )
    return path
