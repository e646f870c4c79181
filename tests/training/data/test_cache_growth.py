"""A cache that follows its media: what is new is encoded, what went is dropped, nothing else is opened."""

import contextlib
import csv
import logging
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ranks import rank_outcomes, run_ranks
from tests.training.data.encoded import picture
from tests.training.data.test_cache import SIZES, cached
from tests.training.data.test_cache import made as made
from tests.training.data.test_cache import media as media
from tests.training.data.test_cache import one_thread as one_thread
from tests.training.data.test_cache import pipeline as pipeline
from zerostart.distributed.world import current_world
from zerostart.errors import ConfigError, WriteError, ZerostartError
from zerostart.training.config.load import parse_config
from zerostart.training.data.cache import ensure_cache
from zerostart.training.data.cached import CachedItems


@pytest.fixture
def own(made: dict[str, Any], tmp_path: Path) -> dict[str, Any]:
    """A copy of a cache and of its media, to do something to."""
    shutil.copytree(Path(made["media"]["source"]).parent, tmp_path / "media")
    shutil.copytree(Path(made["output"]["directory"]) / "cache", tmp_path / "cache")
    return {
        **made,
        "media": {**made["media"], "source": str(tmp_path / "media" / "metadata.csv")},
        "cache": {**made["cache"], "directory": str(tmp_path / "cache")},
    }


def table(values: dict[str, Any]) -> list[list[str]]:
    with Path(values["media"]["source"]).open(newline="") as lines:
        return list(csv.reader(lines))


def rewrite(values: dict[str, Any], rows: list[list[str]]) -> None:
    with Path(values["media"]["source"]).open("w", newline="") as lines:
        csv.writer(lines).writerows(rows)


def tensors(directory: str | Path) -> list[dict[str, torch.Tensor]]:
    return list(CachedItems(directory))


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def encoded_rows(values: dict[str, Any]) -> int:
    """How many items are encoded when the cache is opened."""
    from zerostart.training.diffusion import z_image

    count, encode = [], z_image.ZImageEncoder.encode

    def counted(self: Any, example: Any, generator: Any) -> Any:
        count.append(1)
        return encode(self, example, generator)

    z_image.ZImageEncoder.encode = counted  # type: ignore[method-assign]  # put back below
    try:
        cached(values)
    finally:
        z_image.ZImageEncoder.encode = encode  # type: ignore[method-assign]
    return len(count)


def test_a_cache_follows_its_table(own: dict[str, Any]) -> None:
    """Rows in another order, one gone, one new, one of another picture; the rest is not encoded again."""
    place, folder = own["cache"]["directory"], Path(own["media"]["source"]).parent
    before = tensors(place)
    header, *rows = table(own)
    picture(16, 16, 999).save(folder / "new.png")
    picture(16, 32, 998).save(folder / rows[1][header.index("image")])
    prompt = rows[0][header.index("prompt")]
    new = [{"prompt": prompt, "image": "new.png"}[name] for name in header]
    del rows[3]
    rewrite(own, [header, new, *reversed(rows)])
    assert encoded_rows(own) == 1 + 2  # the first new one, to know its size, and both
    after = tensors(place)
    assert len(after) == len(SIZES)
    expected = [number for number in reversed(range(len(SIZES))) if number != 3]
    for at, number in enumerate(expected, start=1):
        assert same(after[at], before[number]) == (number != 1)
    assert same(ensure_cache(parse_config(own), current_world())[0], after[0])
    assert encoded_rows(own) == 0
    import zerostart

    zerostart.verify(place)
    rewrite(own, [header, *rows[4:]])
    assert encoded_rows(own) == 0
    assert [same(one, before[number]) for one, number in zip(tensors(place), (5, 6), strict=True)] == [
        True
    ] * 2


@pytest.mark.slow
def test_two_ranks_grow_a_cache_to_the_same_bytes(own: dict[str, Any], tmp_path: Path) -> None:
    header, *rows = table(own)
    folder = Path(own["media"]["source"]).parent
    for number in range(5):
        picture(16, 16, 900 + number).save(folder / f"new-{number}.png")
        rows.insert(2 * number, [{"prompt": "a cat", "image": f"new-{number}.png"}[name] for name in header])
    rewrite(own, [header, *rows])
    other = {**own, "cache": {**own["cache"], "directory": str(tmp_path / "other")}}
    shutil.copytree(own["cache"]["directory"], tmp_path / "other")
    first, second = run_ranks(cached, 2, own)
    assert first == second == cached(other)


@pytest.mark.slow
def test_bad_pictures_are_told_at_once_and_cost_nothing_else(
    pipeline: Path, media: dict[str, Any], own: dict[str, Any], tmp_path: Path
) -> None:
    """What is encoded is in the cache; mended or taken out, bad rows are all that is looked at again."""
    folder = Path(own["media"]["source"]).parent
    header, *rows = table(own)
    good = {number: (folder / f"image-{number}.png").read_bytes() for number in (2, 5)}
    for number, data in good.items():
        (folder / f"image-{number}.png").write_bytes(data[: len(data) // 2])
    whole = tensors(own["cache"]["directory"])
    shutil.rmtree(own["cache"]["directory"])
    with pytest.raises(ConfigError) as told:
        cached(own)
    assert str(told.value).startswith("2 rows cannot be encoded: ")
    for number in good:
        assert f"metadata.csv, line {number + 2}, column 'image': {folder}/image-{number}.png" in str(
            told.value
        )
    assert f"The other 5 are in {own['cache']['directory']}, and stay" in str(told.value)
    assert len(CachedItems(own["cache"]["directory"])) == 5
    with pytest.raises(ConfigError, match=r"image-2\.png .*; .*image-5\.png"):
        cached(own)
    (folder / "image-2.png").write_bytes(good[2])
    taken_out = [row for number, row in enumerate(rows) if number != 5]
    rewrite(own, [header, *taken_out])
    assert encoded_rows(own) == 1 + 1
    expected = [item for number, item in enumerate(whole) if number != 5]
    assert all(map(same, tensors(own["cache"]["directory"]), expected))
    (folder / "image-5.png").write_bytes(good[5])
    rewrite(own, [header, *rows])
    assert encoded_rows(own) == 1 + 1
    assert all(map(same, tensors(own["cache"]["directory"]), whole))


@pytest.mark.slow
def test_bad_pictures_are_told_on_every_rank(own: dict[str, Any]) -> None:
    folder = Path(own["media"]["source"]).parent
    shutil.rmtree(own["cache"]["directory"])
    for number in (0, 6):
        (folder / f"image-{number}.png").write_bytes(b"no picture")
    outcomes = rank_outcomes(cached, 2, own)
    assert {outcome.error for outcome in outcomes} == {"zerostart.errors.ConfigError"}
    assert outcomes[0].message == outcomes[1].message
    assert "2 rows cannot be encoded: " in outcomes[0].message
    assert len(CachedItems(own["cache"]["directory"])) == 5


def opened_below(folder: Path, values: dict[str, Any]) -> set[str]:
    """The files in a folder that are opened when a cache is."""
    found: set[str] = set()
    active = True

    def listen(event: str, arguments: tuple[Any, ...]) -> None:
        if active and event == "open" and str(arguments[0]).startswith(f"{folder}{os.sep}"):
            found.add(Path(str(arguments[0])).name)

    sys.addaudithook(listen)  # for the life of this process
    cached(values)
    active = False
    return found


def test_a_start_opens_no_file_of_the_media_again(own: dict[str, Any]) -> None:
    folder = Path(own["media"]["source"]).parent
    cached(own)
    assert opened_below(folder, own) == {"metadata.csv"}
    every = {"metadata.csv", *(f"image-{number}.png" for number in range(len(SIZES)))}
    assert opened_below(folder, {**own, "media": {**own["media"], "check": "contents"}}) == every
    os.utime(folder / "image-1.png")
    assert opened_below(folder, own) == {"metadata.csv", "image-1.png"}
    assert opened_below(folder, own) == {"metadata.csv"}


def test_a_cache_is_enough_where_the_media_are_gone(
    own: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    folder = Path(own["media"]["source"]).parent
    digest = cached(own)
    for file in folder.glob("*.png"):
        file.unlink()
    assert cached(own) == digest
    header, *rows = table(own)
    rewrite(own, [header, *rows, [{"prompt": "a", "image": "never.png"}[name] for name in header]])
    with pytest.raises(ConfigError, match=r"never\.png: no such file"):
        cached(own)
    shutil.rmtree(folder)
    with caplog.at_level(logging.WARNING, "zerostart"):
        assert cached(own) == digest
    assert "does not exist any more: the items of the cache" in caplog.text


def test_a_part_of_the_media_takes_nothing_from_the_cache(own: dict[str, Any]) -> None:
    """``media.items``, say for a trial, and one of these rows is new: the others stay as they are."""
    place = own["cache"]["directory"]
    before = tensors(place)
    header, *rows = table(own)
    rows[0][header.index("prompt")] = "a cat sleeps"
    rewrite(own, [header, *rows])
    part = {**own, "media": {**own["media"], "items": 2, "repeats": 2}}
    first, second, third, fourth = ensure_cache(parse_config(part), current_world())
    assert same(first, third)
    assert not same(first, before[0])
    assert same(second, before[1])
    assert same(fourth, before[1])
    assert encoded_rows(part) == 0
    assert len(ensure_cache(parse_config(part), current_world())) == 4
    assert encoded_rows(own) == 0
    assert all(map(same, tensors(place)[1:], before[1:]))


def test_a_cache_that_another_process_changes_meanwhile_is_not_undone(
    own: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from zerostart.training.data import filling

    header, *rows = table(own)
    picture(16, 16, 999).save(Path(own["media"]["source"]).parent / "new.png")
    rewrite(own, [header, *rows, [{"prompt": "a", "image": "new.png"}[name] for name in header]])
    embedded = filling.embedded

    def meanwhile(*arguments: Any) -> Any:
        monkeypatch.setattr(filling, "embedded", embedded)
        cached(own)
        return embedded(*arguments)

    monkeypatch.setattr(filling, "embedded", meanwhile)
    with pytest.raises(WriteError, match=r"has changed the cache .* start again"):
        cached(own)
    assert len(tensors(own["cache"]["directory"])) == len(SIZES) + 1
    assert encoded_rows(own) == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["_Planner", "_switch", "_finish"])
def test_a_first_cache_goes_on_from_any_kill(name: str, made: dict[str, Any], tmp_path: Path) -> None:
    from zerostart.checkpoint.write import staging as publishing

    values = {**made, "output": {"directory": str(tmp_path)}}
    child = os.fork()
    if child == 0:
        setattr(publishing, name, lambda *_: os._exit(9))
        with contextlib.suppress(BaseException):
            cached(values)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    assert cached(values) == CachedItems(Path(made["output"]["directory"]) / "cache").digest()


def test_what_is_known_of_a_cache_that_failed_is_not_in_its_way(
    own: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from zerostart.training.diffusion import z_image

    shutil.rmtree(own["cache"]["directory"])
    Path(own["cache"]["directory"]).mkdir()
    with monkeypatch.context() as patched:
        patched.setattr(z_image.ZImageEncoder, "encode", lambda *_: 1 / 0)
        with pytest.raises(ZerostartError, match="ZeroDivisionError"):
            cached(own)
    assert [file.name for file in Path(own["cache"]["directory"]).glob("*")]
    assert encoded_rows(own) == len(SIZES) + 1
