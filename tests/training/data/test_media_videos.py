"""Videos: frames selected from files, animations and folders of pictures."""

import itertools
import json
import struct

import numpy as np
import pytest
from PIL import Image

from tests.training.data.media_files import (
    CHINA,
    make_frames,
    read_frame_numbers,
    write_animation,
    write_video,
)
from zerostart.errors import ConfigError
from zerostart.training.data.items import MediaItems
from zerostart.training.data.media_config import MediaConfig

pytest.importorskip("av")


def open_items(folder, rows, **keys):
    (folder / "table.json").write_text(json.dumps([{"prompt": "", **row} for row in rows]))
    return MediaItems(MediaConfig(source=str(folder / "table.json"), **keys))


def select(folder, name, **keys):
    """Return the numbers of the frames that are selected from one video."""
    media = open_items(folder, [{"video": name}], **{"height": 32, "width": 48, **keys})
    return read_frame_numbers(media[0]["video"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """30 frames at 24 a second in every format."""
    path = tmp_path_factory.mktemp("videos")
    frames = make_frames(30)
    write_video(path / "v.mkv", frames)
    write_animation(path / "v.gif", frames, milliseconds=40)
    write_animation(path / "v.webp", frames, milliseconds=40)
    (path / "stills").mkdir()
    for index, frame in enumerate(frames):
        Image.fromarray(frame).save(path / "stills" / f"frame{index}.png")
    return path


@pytest.mark.parametrize("name", ["v.mkv", "v.gif", "v.webp", "stills"])
def test_first_frames_of_every_form(folder, name):
    assert select(folder, name, num_frames=9) == list(range(9))
    # All but the last one: 29 leaves 1 when divided by 4, as DiffSynth counts down.
    assert select(folder, name, num_frames=81) == list(range(29))
    assert select(folder, name, num_frames=16, time_division_remainder=0) == list(range(16))
    assert select(folder, name, num_frames=5, frames="even") == [0, 7, 14, 22, 29]


def test_lists_of_frames_and_pictures(folder):
    names = [f"stills/frame{index}.png" for index in (3, 1, 2, 0, 4, 5)]
    assert select(folder, names, num_frames=81) == [3, 1, 2, 0, 4]
    assert select(folder, json.dumps(names), num_frames=1) == [3]
    assert select(folder, "stills/frame7.png") == [7]


def test_frames_at_a_rate(folder):
    """Select the nearest frame in time, as DiffSynth's ``map_single_frame_id`` does."""
    for rate, count in ((12, 13), (16, 17), (30, 37), (24, 29), (7.5, 9)):
        expected = [min(round(index / rate * 24), 29) for index in range(count)]
        assert select(folder, "v.mkv", frame_rate=rate) == expected, rate
    # A frame of 40 ms is 25 a second, and pictures have no rate.
    assert select(folder, "v.gif", frame_rate=12.5, num_frames=5) == [0, 2, 4, 6, 8]
    assert select(folder, "stills", frame_rate=12, num_frames=5) == list(range(5))


#: Frame times in milliseconds: 25 frames a second, then one in 300, then 50 a second.
TIMES = [*range(0, 400, 40), *range(400, 2800, 300), *range(2800, 3040, 20)]


@pytest.mark.parametrize("form", ["v.mkv", "v.mp4", "v.gif"])
def test_frames_of_a_variable_rate_are_selected_by_time(tmp_path, form):
    """Selection by the average rate would be up to 0.8 s off."""
    frames = make_frames(30)
    if form == "v.gif":
        durations = [later - time for time, later in itertools.pairwise([*TIMES, 3060])]
        write_animation(tmp_path / form, frames, durations)
    else:
        codec, pixels = ("ffv1", "bgr0") if form == "v.mkv" else ("libx264rgb", "rgb24")
        write_video(tmp_path / form, frames, codec=codec, pixels=pixels, times=TIMES)
    for rate, count in ((5, 13), (8, 21), (12, 33)):
        expected = [min(TIMES, key=lambda time: abs(time - 1000 * k / rate)) for k in range(count)]
        assert [TIMES[n] for n in select(tmp_path, form, frame_rate=rate)] == expected, rate
    expected = [min(TIMES, key=lambda time: abs(time - 200 * k)) for k in range(5)]
    assert [TIMES[n] for n in select(tmp_path, form, frame_rate=5, num_frames=5)] == expected
    expected = [min(TIMES, key=lambda time: abs(time - 3020 * k / 8)) for k in range(9)]
    assert [TIMES[n] for n in select(tmp_path, form, frames="even", num_frames=9)] == expected
    assert select(tmp_path, form, num_frames=9) == list(range(9))


def test_short_videos_are_refused_with_their_row(folder):
    media = open_items(folder, [{"video": "stills/frame7.png"}], num_frames=8, time_division_remainder=0)
    with pytest.raises(ConfigError, match=r"entry 1: 1 frames are too few"):
        media[0]
    with pytest.raises(ConfigError, match=r"entry 1: 0 frames are too few"):
        open_items(folder, [{"video": "v.mkv"}], frame_rate=0.5)[0]


def test_videos_of_an_item_have_one_size_and_number_of_frames(folder):
    write_video(folder / "short.mkv", make_frames(7, 64, 64))
    row = {
        "video": "v.mkv",
        "control_video": "short.mkv",
        "first_frame": str(CHINA),
        "edit_image": str(CHINA),
    }
    item = open_items(folder, [row], max_pixels=32 * 32)[0]
    assert item["video"].shape == item["control_video"].shape == (3, 5, 16, 32)
    assert item["first_frame"].shape == (3, 16, 32)
    assert item["edit_image"][0].shape == (3, 16, 32)  # 26 x 39 by itself
    columns = {"video": "video", "control_video": {"size": "own"}, "edit_image": {"size": "item"}}
    item = open_items(folder, [row], columns=columns, max_pixels=64 * 64)[0]
    assert item["video"].shape == (3, 29, 32, 48)
    assert item["control_video"].shape == (3, 5, 64, 64)
    assert item["edit_image"][0].shape == (3, 32, 48)


def test_h264_and_rotated_videos(folder, tmp_path):
    """The header of a track may have a quarter turn clockwise (ISO 14496-12)."""
    half_white = np.zeros((32, 64, 3), dtype=np.uint8)
    half_white[:, :32] = 255
    path = write_video(tmp_path / "v.mp4", [half_white] * 5, codec="libx264", pixels="yuv420p")
    keys = {"num_frames": 5, "max_pixels": 64 * 64}
    flat = open_items(tmp_path, [{"video": "v.mp4"}], **keys)[0]["video"]
    assert flat.shape == (3, 5, 32, 64)
    assert flat[..., :24].min() > 240
    assert flat[..., 40:].max() < 16
    data = path.read_bytes()
    straight = struct.pack(">9i", 0x10000, 0, 0, 0, 0x10000, 0, 0, 0, 0x40000000)
    at = data.index(straight, data.index(b"tkhd"))
    turned = struct.pack(">9i", 0, 0x10000, 0, -0x10000, 0, 0, 32 * 0x10000, 0, 0x40000000)
    path.write_bytes(data[:at] + turned + data[at + len(turned) :])
    media = open_items(tmp_path, [{"video": "v.mp4"}], **keys)
    upright = media[0]["video"]
    assert upright.shape == (3, 5, 64, 32)
    assert upright[..., :24, :].min() > 240  # left is up now
    assert upright[..., 40:, :].max() < 16


def test_damaged_videos_are_named_by_row(folder, tmp_path):
    whole = (folder / "v.mkv").read_bytes()
    (tmp_path / "cut.mkv").write_bytes(whole[:200])
    (tmp_path / "text.mp4").write_text("no video")
    (tmp_path / "none").mkdir()
    rows = [{"video": name} for name in ("cut.mkv", "text.mp4", "none")]
    media = open_items(tmp_path, rows, num_frames=2, time_division_factor=1, time_division_remainder=0)
    for index, message in enumerate(
        [r"cut\.mkv .*replace it", r"text\.mp4 cannot be read as a video", "no frames in this"]
    ):
        with pytest.raises(ConfigError, match=rf"entry {index + 1}: .*{message}"):
            media[index]
