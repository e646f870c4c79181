"""Real pictures that scikit-learn ships, and videos whose frames are numbered by their colour."""

import importlib.util
from fractions import Fraction
from pathlib import Path

import numpy as np
from PIL import Image

_SKLEARN_IMAGES = Path(importlib.util.find_spec("sklearn").origin).parent / "datasets" / "images"
#: Photographs of 427 x 640 pixels (height x width).
CHINA, FLOWER = _SKLEARN_IMAGES / "china.jpg", _SKLEARN_IMAGES / "flower.jpg"


def make_frames(count, height=32, width=48):
    """Make frames of one grey each: frame ``i`` has the value ``2 * i``."""
    return [np.full((height, width, 3), 2 * index, dtype=np.uint8) for index in range(count)]


def read_frame_numbers(video):
    """Return the numbers of the `make_frames` in a decoded video [3, F, H, W]."""
    assert (video == video[:1, :, :1, :1]).all()
    return [int(value) // 2 for value in video[0, :, 0, 0]]


def write_video(path, frames, rate=24, codec="ffv1", pixels="bgr0", times=None):
    """Write a video, lossless by default; ``times`` are frame times in milliseconds."""
    import av

    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=rate)
        stream.height, stream.width = frames[0].shape[:2]
        stream.pix_fmt = pixels
        if times is not None:
            stream.codec_context.time_base = Fraction(1, 1000)
        for number, frame in enumerate(frames):
            picture = av.VideoFrame.from_ndarray(frame, format="rgb24")
            if times is not None:
                picture.pts, picture.time_base = times[number], Fraction(1, 1000)
            container.mux(stream.encode(picture))
        container.mux(stream.encode())
    return path


def write_animation(path, frames, milliseconds):
    """Write a lossless GIF or WebP."""
    pictures = [Image.fromarray(frame) for frame in frames]
    options = {"lossless": True} if path.suffix == ".webp" else {}
    pictures[0].save(
        path, save_all=True, append_images=pictures[1:], duration=milliseconds, loop=0, **options
    )
    return path
