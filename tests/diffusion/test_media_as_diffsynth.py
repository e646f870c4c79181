"""Sizes, crops and frames of media are those of DiffSynth-Studio's own operators."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.diffusion.oracle import import_diffsynth, needs_diffsynth
from tests.ranks import run_ranks
from tests.training.data.media_files import frame_numbers, numbered_frames, write_animation, write_video
from zerostart.training.data.items import MediaItems
from zerostart.training.data.media import fitted, target_size
from zerostart.training.data.media_config import MediaConfig


def compare_pictures() -> int:
    """Random pictures, each in several settings; how many were compared."""
    import_diffsynth()
    from diffsynth.core.data.operators import ImageCropAndResize

    generator = np.random.default_rng(0)
    compared = 0
    for _ in range(25):
        height, width = generator.integers(40, 500, 2)
        picture = Image.fromarray(generator.integers(0, 256, (height, width, 3), dtype=np.uint8))
        for factor, keys in [
            (16, {}),
            (32, {"max_pixels": 20000}),
            (16, {"max_pixels": 65536}),
            (16, {"height": 208, "width": 112}),
        ]:
            config = MediaConfig(source="unused", multiple_of=factor, **keys)
            given = {"max_pixels": config.max_pixels, "height": config.height, "width": config.width}
            theirs = ImageCropAndResize(**given, height_division_factor=factor, width_division_factor=factor)
            ours = fitted(picture, target_size((int(height), int(width)), config))
            assert np.array_equal(np.asarray(ours), np.asarray(theirs(picture))), (height, width, keys)
            compared += 1
    return compared


def compare_frames(folder: str) -> int:
    """Which frames are taken of videos of several lengths and rates; how many settings were compared."""
    import_diffsynth()
    from diffsynth.core.data.operators import LoadGIF, LoadVideo

    compared = 0
    for length, rate in ((30, 24), (30, 30), (7, 10), (100, 25)):
        frames = numbered_frames(length)
        write_video(Path(folder, "v.mkv"), frames, rate)
        write_animation(Path(folder, "v.gif"), frames, 40)
        for count in (5, 17, 81):
            for wanted in (None, 8, 12, 16, 24):
                config = MediaConfig(
                    source=folder, prompt=None, height=32, width=48, num_frames=count, frame_rate=wanted
                )
                animation, video = (frame_numbers(item["video"]) for item in MediaItems(_columns(config)))
                theirs = LoadVideo(count, 4, 1, frame_rate=wanted or 24, fix_frame_rate=wanted is not None)
                assert video == _numbers(theirs(str(Path(folder, "v.mkv")))), (length, rate, count, wanted)
                if wanted is None:
                    assert animation == _numbers(LoadGIF(count, 4, 1)(str(Path(folder, "v.gif"))))
                compared += 1
    return compared


def _columns(config: MediaConfig) -> MediaConfig:
    table = Path(config.source, "table.csv")
    table.write_text("video\nv.gif\nv.mkv\n")
    return config.model_copy(update={"source": str(table)})


def _numbers(pictures: list[Image.Image]) -> list[int]:
    return [round(np.asarray(picture).mean() / 2) for picture in pictures]


@needs_diffsynth
@pytest.mark.slow
def test_pictures_are_those_of_diffsynth() -> None:
    assert run_ranks(compare_pictures, 1, process_group=False) == [100]


@needs_diffsynth
@pytest.mark.slow
def test_frames_are_those_of_diffsynth(tmp_path: Path) -> None:
    assert run_ranks(compare_frames, 1, str(tmp_path), process_group=False) == [60]
