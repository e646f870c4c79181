"""Several data sets in one run: what an epoch has of each, in which order."""

import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.training.data.encoded import configured, make, write_media
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

ALONE = World(0, 1, None)


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make("z_image", tmp_path_factory.mktemp("pipeline") / "z_image")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Tables of three and of four pictures."""
    at = tmp_path_factory.mktemp("media")
    return [
        write_media(at / name, {"image": "image"}, [(48, 48)] * count)["source"]
        for name, count in (("a", 3), ("b", 4))
    ]


def media_of(folders: list[str]) -> dict[str, Any]:
    first = {"source": folders[0], "repeats": 4}
    second = {"source": folders[1], "height": 16, "width": 32, "caption_prefix": "sea, "}
    return {"height": 32, "width": 32, "repeats": 2, "datasets": [first, second]}


def cache(pipeline: Path, media: dict[str, Any] | None, out: Path) -> CachedItems:
    # Nothing is drawn: an item is the same in each cache, by whichever number.
    values = configured(pipeline, media, out, directory=str(out / "cache"), posterior="mode")
    return ensure_cache(parse_config(values), ALONE)


def bits(item: dict[str, torch.Tensor]) -> bytes:
    return b"".join(item[name].numpy().tobytes() for name in sorted(item) if name != "index")


def test_an_epoch_is_each_set_as_often_as_it_says(pipeline: Path, folders: list[str], tmp_path: Path) -> None:
    """By a list that is written out here: in a drawn order, on any number of ranks, from any step."""
    media = media_of(folders)
    mixed = cache(pipeline, media, tmp_path / "mixed")
    own = []
    for number, one in enumerate(media["datasets"]):
        given = {"height": 32, "width": 32, **one, "repeats": 1}
        own.append([bits(item) for item in cache(pipeline, given, tmp_path / str(number))])
    written = own[0] * 4 + own[1] * 2
    assert len(set(written)) == 3 + 4
    assert [bits(mixed[place]) for place in range(len(mixed))] == written
    # torch's permutation of these, drawn from the seed and the epoch; batches of one size of pictures.
    order = torch.randperm(20, generator=torch.Generator().manual_seed(5 + 3)).tolist()
    wide = [place for place in order if place >= 12]
    square = [place for place in order if place < 12]
    buckets = Buckets(mixed.shapes(), 2, 2, 5)
    buckets.set_epoch(3)
    batches = list(buckets)
    assert [place for batch in batches for place in batch if place < 12] == square
    assert [place for batch in batches for place in batch if place >= 12] == wide
    # Wherever they are; and a run of other repeats has another digest.
    moved = tmp_path / "moved"
    for number, source in enumerate(folders):
        shutil.copytree(Path(source).parent, moved / str(number))
    elsewhere = [str(moved / str(number) / "metadata.csv") for number in range(2)]
    assert cache(pipeline, media_of(elsewhere), tmp_path / "mixed").digest() == mixed.digest()
    assert cache(pipeline, {**media, "repeats": 3}, tmp_path / "mixed").digest() != mixed.digest()


def test_what_is_held_out_of_each_set_is_in_none_of_its_repeats(
    pipeline: Path, folders: list[str], tmp_path: Path
) -> None:
    mixed = cache(pipeline, media_of(folders), tmp_path)
    trained, held = split_off(Numbered(mixed), 0.25, shares=mixed.shares)
    assert held is not None
    rest = Counter(bits(held[place]) for place in range(len(held)))
    seen = Counter(bits(trained[place]) for place in range(len(trained)))
    assert sorted(seen.values()) == [2, 2, 2, 4, 4]
    assert sorted(rest.values()) == [1, 1]
    assert not seen.keys() & rest.keys()
    assert len(trained.shapes()) == len(trained)


COLUMNS = [
    ("file_name,caption", "image"),
    ("file_name,text", "image"),
    ("image,text", "image"),
]


@pytest.mark.parametrize(("header", "name"), COLUMNS)
def test_columns_of_other_tools_tables(header: str, name: str, folders: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "named"
    shutil.copytree(Path(folders[0]).parent, folder)
    (folder / "metadata.csv").write_text(f"{header}\nimage-0.png,a cat\n")
    item = read_media(MediaConfig(source=str(folder)), ALONE)[0]
    assert (item["prompt"], item[name].shape) == ("a cat", (3, 48, 48))


def test_what_says_too_little_or_too_much_is_refused(folders: list[str], tmp_path: Path) -> None:
    for media, told in (
        ({"source": "a", "datasets": [{"source": "b"}]}, "source or datasets .*, and both are given"),
        ({"height": 16, "width": 16}, "source or datasets .*, and neither is given"),
        ({"datasets": [{"sorce": "b"}]}, "unknown key media.datasets.0.sorce; did you mean .*0.source"),
        ({"datasets": [{"source": "b", "repeats": 0}]}, "media.datasets.0.repeats: .*greater than or equal"),
    ):
        with pytest.raises(ConfigError, match=told):
            parse_config(configured(tmp_path, media, tmp_path))


def test_each_set_has_a_frame_rate_of_its_own(tmp_path: Path) -> None:
    """LTX-2 takes it with each video: that of the section stands for sets that have none."""
    made = make("ltx2", tmp_path / "ltx2")
    sources = [
        write_media(tmp_path / name, {"video": "video"}, [(32, 32)], 9)["source"] for name in ("a", "b")
    ]
    sets = [{"source": sources[0]}, {"source": sources[1], "frame_rate": 12}]
    items = cache(made, {"frame_rate": 30, "datasets": sets}, tmp_path)
    assert [items[place]["frame_rate"].item() for place in range(2)] == [30.0, 12.0]
