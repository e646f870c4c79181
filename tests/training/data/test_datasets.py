"""Several data sets in one run: repeats, order, held-out items and columns."""

import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.training.data.tiny_media import make_config, save_pipeline, write_media
from zerostart.distributed.world import World
from zerostart.errors import ConfigError
from zerostart.training.config.load import parse_config
from zerostart.training.data.cache import ensure_cache
from zerostart.training.data.cached import CachedItems
from zerostart.training.data.items import read_media
from zerostart.training.data.media_config import MediaConfig
from zerostart.training.diffusion.flow import Numbered
from zerostart.training.loop.batches import Buckets
from zerostart.training.loop.task import split_off

WORLD = World(0, 1, None)


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_pipeline("z_image", tmp_path_factory.mktemp("pipeline") / "z_image")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Tables of three and of four pictures."""
    root = tmp_path_factory.mktemp("media")
    return [
        write_media(root / name, {"image": "image"}, [(48, 48)] * count)["source"]
        for name, count in (("a", 3), ("b", 4))
    ]


def make_media(folders: list[str]) -> dict[str, Any]:
    first = {"source": folders[0], "repeats": 4}
    second = {"source": folders[1], "height": 16, "width": 32, "caption_prefix": "sea, "}
    return {"height": 32, "width": 32, "repeats": 2, "datasets": [first, second]}


def open_cache(pipeline: Path, media: dict[str, Any] | None, out: Path) -> CachedItems:
    # The mode of the posterior makes equal items in each cache.
    values = make_config(pipeline, media, out, directory=str(out / "cache"), posterior="mode")
    return ensure_cache(parse_config(values), WORLD)


def to_bytes(item: dict[str, torch.Tensor]) -> bytes:
    return b"".join(item[name].numpy().tobytes() for name in sorted(item) if name != "index")


def test_epoch_repeats_each_set_as_configured(pipeline: Path, folders: list[str], tmp_path: Path) -> None:
    """The order is torch's permutation of the repeated items."""
    media = make_media(folders)
    mixed = open_cache(pipeline, media, tmp_path / "mixed")
    items = []
    for number, dataset in enumerate(media["datasets"]):
        settings = {"height": 32, "width": 32, **dataset, "repeats": 1}
        items.append([to_bytes(item) for item in open_cache(pipeline, settings, tmp_path / str(number))])
    expected = items[0] * 4 + items[1] * 2
    assert len(set(expected)) == 3 + 4
    assert [to_bytes(mixed[place]) for place in range(len(mixed))] == expected
    # torch's permutation by seed and epoch; a batch has pictures of one size.
    order = torch.randperm(20, generator=torch.Generator().manual_seed(5 + 3)).tolist()
    wide = [place for place in order if place >= 12]
    square = [place for place in order if place < 12]
    buckets = Buckets(mixed.shapes(), 2, 2, 5)
    buckets.set_epoch(3)
    batches = list(buckets)
    assert [place for batch in batches for place in batch if place < 12] == square
    assert [place for batch in batches for place in batch if place >= 12] == wide
    # The digest depends on the repeats, not on the folders.
    copies = tmp_path / "moved"
    for number, source in enumerate(folders):
        shutil.copytree(Path(source).parent, copies / str(number))
    elsewhere = [str(copies / str(number) / "metadata.csv") for number in range(2)]
    assert open_cache(pipeline, make_media(elsewhere), tmp_path / "mixed").digest() == mixed.digest()
    assert open_cache(pipeline, {**media, "repeats": 3}, tmp_path / "mixed").digest() != mixed.digest()


def test_held_out_items_are_in_no_repeat(pipeline: Path, folders: list[str], tmp_path: Path) -> None:
    mixed = open_cache(pipeline, make_media(folders), tmp_path)
    trained, held_out = split_off(Numbered(mixed), 0.25, shares=mixed.shares)
    assert held_out is not None
    held_counts = Counter(to_bytes(held_out[place]) for place in range(len(held_out)))
    trained_counts = Counter(to_bytes(trained[place]) for place in range(len(trained)))
    assert sorted(trained_counts.values()) == [2, 2, 2, 4, 4]
    assert sorted(held_counts.values()) == [1, 1]
    assert not trained_counts.keys() & held_counts.keys()
    assert len(trained.shapes()) == len(trained)


COLUMNS = [("file_name,caption", "image"), ("file_name,text", "image"), ("image,text", "image")]


@pytest.mark.parametrize(("header", "name"), COLUMNS)
def test_columns_of_other_tools_tables(header: str, name: str, folders: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "named"
    shutil.copytree(Path(folders[0]).parent, folder)
    (folder / "metadata.csv").write_text(f"{header}\nimage-0.png,a cat\n")
    item = read_media(MediaConfig(source=str(folder)), WORLD)[0]
    assert (item["prompt"], item[name].shape) == ("a cat", (3, 48, 48))


def test_incomplete_or_ambiguous_media_are_refused(folders: list[str], tmp_path: Path) -> None:
    for media, message in (
        ({"source": "a", "datasets": [{"source": "b"}]}, "source or datasets .*, and both are given"),
        ({"height": 16, "width": 16}, "source or datasets .*, and neither is given"),
        ({"datasets": [{"sorce": "b"}]}, "unknown key media.datasets.0.sorce; did you mean .*0.source"),
        ({"datasets": [{"source": "b", "repeats": 0}]}, "media.datasets.0.repeats: .*greater than or equal"),
    ):
        with pytest.raises(ConfigError, match=message):
            parse_config(make_config(tmp_path, media, tmp_path))


def test_each_set_has_its_own_frame_rate(tmp_path: Path) -> None:
    """LTX-2 takes it with each video; the rate of the section is the default."""
    pipeline = save_pipeline("ltx2", tmp_path / "ltx2")
    sources = [
        write_media(tmp_path / name, {"video": "video"}, [(32, 32)], 9)["source"] for name in ("a", "b")
    ]
    sets = [{"source": sources[0]}, {"source": sources[1], "frame_rate": 12}]
    items = open_cache(pipeline, {"frame_rate": 30, "datasets": sets}, tmp_path)
    assert [items[place]["frame_rate"].item() for place in range(2)] == [30.0, 12.0]
