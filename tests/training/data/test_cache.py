"""The cache of encoded media: the same bytes on any number of ranks, what diffusers gives, never stale."""

import csv
import hashlib
import json
import os
import pickle
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from torch.utils.data import DataLoader

import zerostart
from tests.ranks import rank_outcomes, run_ranks
from tests.training.data.encoded import PROMPTS, bytes_of, configured, make, picture, write_media
from tests.training.loop.held_locks import lock_held
from zerostart.distributed.world import current_world
from zerostart.errors import CheckpointError, ConfigError, ReadError, WriteError
from zerostart.training.config.load import parse_config
from zerostart.training.data import cache
from zerostart.training.data.cache import ensure_cache
from zerostart.training.data.cached import CachedItems

SIZES = [(16, 16), (16, 32), (16, 16), (32, 16), (16, 32), (16, 16), (16, 16)]


def opened(values: dict[str, Any]) -> CachedItems:
    return ensure_cache(parse_config(values), current_world())


def cached(values: dict[str, Any]) -> str:
    """Make or open the cache that a configuration names; the digest of its items."""
    return opened(values).digest()


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """As encoders compute on a CPU: bits depend on it."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make("z_image", tmp_path_factory.mktemp("pipeline") / "z_image")


@pytest.fixture(scope="module")
def media(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return write_media(tmp_path_factory.mktemp("media") / "pictures", {"image": "image"}, SIZES)


@pytest.fixture(scope="module")
def made(pipeline: Path, media: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A cache that one rank has made."""
    values = configured(pipeline, media, tmp_path_factory.mktemp("one"), prompts=["a cat"])
    cached(values)
    return values


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


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def encoded_rows(values: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> int:
    """How many items are encoded when the cache is opened."""
    from zerostart.training.diffusion import z_image

    count, encode = [], z_image.ZImageEncoder.encode

    def counted(self: Any, example: Any, generator: Any) -> Any:
        count.append(1)
        return encode(self, example, generator)

    with monkeypatch.context() as patched:
        patched.setattr(z_image.ZImageEncoder, "encode", counted)
        cached(values)
    return len(count)


def test_two_ranks_make_the_same_bytes(made: dict[str, Any], tmp_path: Path) -> None:
    values = {**made, "output": {"directory": str(tmp_path)}}
    first, second = run_ranks(cached, 2, values)
    one = Path(made["output"]["directory"]) / "cache"
    assert first == second == cached(made)
    assert bytes_of(tmp_path / "cache") == bytes_of(one)
    assert [entry.name for entry in tmp_path.iterdir()] == ["cache"]
    zerostart.verify(one)


@torch.no_grad()
def test_items_are_what_the_pipeline_feeds_its_transformer(made: dict[str, Any], pipeline: Path) -> None:
    from PIL import Image

    items = CachedItems(Path(made["output"]["directory"]) / "cache")
    pipe = diffusers.ZImageImg2ImgPipeline.from_pretrained(str(pipeline))
    folder = Path(made["media"]["source"]).parent
    assert len(items) == len(SIZES)
    for number, item in enumerate(items):
        assert list(item) == ["latents", "prompt_embeds"]
        (embeds,), _ = pipe.encode_prompt(PROMPTS[number % len(PROMPTS)], do_classifier_free_guidance=False)
        assert torch.equal(item["prompt_embeds"], embeds)
        pixels = pipe.image_processor.preprocess(Image.open(folder / f"image-{number}.png"))
        seed = hashlib.blake2b(f"0 {number}".encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(seed, "little") >> 1)
        drawn = pipe.vae.encode(pixels).latent_dist.sample(generator)
        config = pipe.vae.config
        assert torch.equal(item["latents"], ((drawn - config.shift_factor) * config.scaling_factor)[0])
    for text in ("", "a cat"):
        (embeds,), _ = pipe.encode_prompt(text, do_classifier_free_guidance=False)
        assert torch.equal(items.prompt(text)["prompt_embeds"], embeds)
    with pytest.raises(ConfigError, match=r"no embeddings of the text 'a dog'; name it in cache\.prompts"):
        items.prompt("a dog")


@pytest.mark.slow
@torch.no_grad()
def test_where_encoders_lie_and_what_they_compute_in(
    made: dict[str, Any], pipeline: Path, tmp_path: Path
) -> None:
    """Offloaded by layers: the same bytes. In 16 bits: what the pipeline's encoder gives in them."""
    one = Path(made["output"]["directory"]) / "cache"
    values = {**made, "output": {"directory": str(tmp_path / "by-layers")}}
    values["cache"] = {**made["cache"], "placement": "offload"}
    assert len(set(run_ranks(cached, 2, values))) == 1
    assert bytes_of(tmp_path / "by-layers" / "cache") == bytes_of(one)
    values = {**made, "output": {"directory": str(tmp_path / "lower")}}
    values["cache"] = {**made["cache"], "dtype": "bfloat16"}
    run_ranks(cached, 2, values)
    pipe = diffusers.ZImagePipeline.from_pretrained(str(pipeline), vae=None, dtype=torch.bfloat16)
    for number, item in enumerate(CachedItems(tmp_path / "lower" / "cache")):
        (embeds,), _ = pipe.encode_prompt(PROMPTS[number % len(PROMPTS)], do_classifier_free_guidance=False)
        assert item["prompt_embeds"].dtype == torch.bfloat16
        assert torch.equal(item["prompt_embeds"], embeds)


def test_items_are_read_by_workers_and_share_keys_of_shapes(own: dict[str, Any]) -> None:
    items = opened({**own, "media": {**own["media"], "repeats": 2}})
    assert len(items) == 2 * len(SIZES)
    loader = DataLoader(pickle.loads(pickle.dumps(items)), batch_size=None, num_workers=1)
    for one, other in zip(items, loader, strict=True):
        assert same(one, other)
    shapes = items.shapes()
    for number, size in enumerate(SIZES * 2):
        assert [other for other, key in enumerate(shapes) if key == shapes[number]] == [
            other for other, its in enumerate(SIZES * 2) if its == size
        ]
    with pytest.raises(IndexError):
        items[2 * len(SIZES)]


def refused(values: dict[str, Any]) -> str:
    """Why the cache of a configuration is not opened."""
    with pytest.raises(ConfigError, match="does not match the configuration") as told:
        cached(values)
    return str(told.value)


def test_a_cache_of_other_settings_or_encoders_is_refused_by_what_differs(
    own: dict[str, Any], pipeline: Path, tmp_path: Path
) -> None:
    digest = cached(own)
    with_settings = {**own, "cache": {**own["cache"], "posterior": "mode", "dtype": "bfloat16"}}
    text = refused(with_settings)
    assert "cache.dtype was None and is bfloat16" in text
    assert "cache.posterior was sample and is mode" in text
    assert "Remove it to have it made again" in text
    placed = {**own["cache"], "placement": "offload"}  # on which no number depends
    assert cached({**own, "cache": placed}) == digest

    copied = tmp_path / "pipeline"
    shutil.copytree(pipeline, copied)
    other = {**own, "model": {"source": str(copied)}}
    assert cached(other) == digest
    weights = copied / "text_encoder" / "model.safetensors"
    changed = bytearray(weights.read_bytes())
    changed[-1] ^= 1
    weights.write_bytes(changed)
    size = len(changed)
    assert f"text_encoder/model.safetensors was {size} bytes, " in refused(other)
    texts = {**other, "cache": {**own["cache"], "prompts": ["the sea"]}}
    assert "text_encoder/model.safetensors was" in refused(texts)
    changed[-1] ^= 1
    weights.write_bytes(changed)
    assert cached(other) == digest  # whenever it was written
    index = json.loads((copied / "model_index.json").read_text())
    (copied / "model_index.json").write_text(json.dumps({**index, "is_distilled": True}))
    assert "is_distilled of the pipeline was None and is True" in refused(other)
    (copied / "model_index.json").write_text(json.dumps(index))
    shutil.rmtree(copied)
    shutil.copytree(pipeline / "transformer", copied / "transformer")
    assert cached(other) == digest  # it does without the encoders


def test_a_cache_follows_its_media(own: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows in another order, one gone, one new, one of another picture; the rest is not encoded again."""
    place, folder = own["cache"]["directory"], Path(own["media"]["source"]).parent
    before = list(opened(own))
    header, *rows = table(own)
    picture(16, 16, 999).save(folder / "new.png")
    picture(16, 32, 998).save(folder / rows[1][header.index("image")])
    prompt = rows[0][header.index("prompt")]
    new = [{"prompt": prompt, "image": "new.png"}[name] for name in header]
    kept = [*rows[:3], *rows[4:]]
    rewrite(own, [header, new, *reversed(kept)])
    assert encoded_rows(own, monkeypatch) == 2
    after = list(opened(own))
    assert len(after) == len(SIZES)
    expected = [number for number in reversed(range(len(SIZES))) if number != 3]
    for at, number in enumerate(expected, start=1):
        assert same(after[at], before[number]) == (number != 1)
    zerostart.verify(place)
    # A part of the rows, and all of the first table again: nothing has gone from the cache.
    part = {**own, "media": {**own["media"], "items": 2, "repeats": 2}}
    assert all(map(same, opened(part), [*after[:2], *after[:2]]))
    rewrite(own, [header, *rows])
    assert encoded_rows(own, monkeypatch) == 0
    assert same(opened(own)[3], before[3])
    # Another size is another item.
    sized = {**own, "media": {**own["media"], "height": 16, "width": 16}}
    assert {tuple(item["latents"].shape[1:]) for item in opened(sized)} == {(4, 4)}
    os.utime(folder / "new.png")
    assert encoded_rows(own, monkeypatch) == 0
    os.utime(folder / "image-0.png")
    assert encoded_rows(own, monkeypatch) == 1


def test_equal_rows_are_items_of_their_own(own: dict[str, Any]) -> None:
    header, *rows = table(own)
    rewrite(own, [header, rows[0], rows[0]])
    first, second = opened(own)
    assert torch.equal(first["prompt_embeds"], second["prompt_embeds"])
    assert not torch.equal(first["latents"], second["latents"])


def test_texts_are_added_and_the_items_stay(own: dict[str, Any]) -> None:
    place = Path(own["cache"]["directory"])
    before, digest = bytes_of(place), cached(own)
    items = opened({**own, "cache": {**own["cache"], "prompts": ["the sea"]}})
    assert items.texts == ("", "a cat", "the sea")
    assert items.prompt("the sea").keys() == {"prompt_embeds"}
    assert items.digest() == digest
    after = bytes_of(place)
    assert len(after.keys() - before.keys()) == 1
    assert {name for name in before if after[name] != before[name]} == {"zerostart.json"}
    zerostart.verify(place)


@pytest.mark.slow
def test_two_processes_do_not_make_one_cache(made: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    refused = pytest.raises(WriteError, match="another process is making the cache")
    with lock_held(tmp_path / "cache" / ".lock"), refused:
        cached({**made, "output": {"directory": str(tmp_path)}})


def cached_by_other_settings(values: dict[str, Any]) -> None:
    """As ranks that were started with configurations that differ."""
    cached({**values, "cache": {**values["cache"], "seed": current_world().rank}})


@pytest.mark.slow
def test_ranks_that_would_encode_otherwise_are_told_so(made: dict[str, Any], tmp_path: Path) -> None:
    values = {**made, "output": {"directory": str(tmp_path)}}
    for outcome in rank_outcomes(cached_by_other_settings, 2, values, grace=30.0):
        assert "the ranks differ in cache.seed (rank 0: 0; rank 1: 1)" in outcome.message


def test_damage_is_named_and_made_again(own: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    digest = cached(own)
    file = sorted(Path(own["cache"]["directory"]).glob("item-*"))[0]
    text = sorted(Path(own["cache"]["directory"]).glob("text-*"))[0]
    for damaged in (text, file):
        whole = damaged.read_bytes()
        damaged.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        items = opened(own)
        read = list if damaged == file else lambda items: [items.prompt(one) for one in items.texts]
        with pytest.raises(ReadError, match=rf"{damaged.name} has other contents .*remove it"):
            read(items)
    file.write_bytes(file.read_bytes()[:-1])
    text.unlink()
    assert encoded_rows(own, monkeypatch) == 1
    assert cached(own) == digest
    zerostart.verify(own["cache"]["directory"])


def test_directories_that_are_no_cache_are_refused(
    own: dict[str, Any], pipeline: Path, media: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="needs the section media"):
        cached(configured(pipeline, None, tmp_path))
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.txt").write_text("mine")
    with pytest.raises(ConfigError, match="is not empty and is not a complete cache"):
        cached(configured(pipeline, media, tmp_path, directory=str(mine)))
    index = Path(own["cache"]["directory"]) / "zerostart.json"
    document = json.loads(index.read_text())
    document["cache"]["version"] = 2
    index.write_text(json.dumps(document))
    with pytest.raises(CheckpointError, match=r"is a cache of version 2, .* remove"):
        cached(own)


def test_what_cannot_be_encoded_is_told(pipeline: Path, media: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"is not a diffusers pipeline .*name one in cache\.source"):
        cached(configured(pipeline / "vae", media, tmp_path / "a"))
    with pytest.raises(ConfigError, match=r"placement.*vae cannot be sharded.*replicate or offload"):
        parse_config(configured(pipeline, media, tmp_path, placement={"vae": "shard"}))
    small = {**media, "multiple_of": 4, "height": 20, "width": 20}
    with pytest.raises(ConfigError, match=r"line 2: image is 20 x 20 .* ZImage\w* takes multiples of \d+"):
        cached(configured(pipeline, small, tmp_path / "b"))
    assert not (tmp_path / "b").exists()
    listed = {**media, "columns": {"image": {"kind": "images", "size": "item"}}}
    with pytest.raises(ConfigError, match=r"line 2: ZImage\w* needs image as image, but .* makes it images"):
        cached(configured(pipeline, listed, tmp_path / "c"))


def test_numbers_that_are_not_finite_are_refused(
    pipeline: Path, media: dict[str, Any], tmp_path: Path
) -> None:
    from safetensors.torch import load_file, save_file

    copied = tmp_path / "pipeline"
    shutil.copytree(pipeline, copied)
    (weights,) = (copied / "vae").glob("*.safetensors")
    save_file({n: torch.full_like(t, torch.inf) for n, t in load_file(weights).items()}, weights)
    with pytest.raises(
        ConfigError, match=r"line 2: its latents has values that are not finite.*cache\.vae_dtype"
    ):
        cached(configured(copied, media, tmp_path))
    assert len(CachedItems(tmp_path / "cache")) == 0


def test_bad_pictures_are_told_at_once_and_cost_nothing_else(
    own: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is encoded is in the cache; mended, bad rows are all that is looked at again."""
    folder, place = Path(own["media"]["source"]).parent, own["cache"]["directory"]
    good = {number: (folder / f"image-{number}.png").read_bytes() for number in (2, 5)}
    for number, data in good.items():
        (folder / f"image-{number}.png").write_bytes(data[: len(data) // 2])
    whole = list(CachedItems(place))
    shutil.rmtree(place)
    with pytest.raises(ConfigError) as told:
        cached(own)
    assert str(told.value).startswith("2 rows cannot be encoded: ")
    for number in good:
        assert f"metadata.csv, line {number + 2}: {folder}/image-{number}.png" in str(told.value)
    assert f"The other 5 are in {place}, and stay" in str(told.value)
    assert len(CachedItems(place)) == 5
    with pytest.raises(ConfigError, match=r"image-2\.png .*; .*image-5\.png"):
        cached(own)
    for number, data in good.items():
        (folder / f"image-{number}.png").write_bytes(data)
    assert encoded_rows(own, monkeypatch) == 2
    assert all(map(same, opened(own), whole))


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


def die_after_an_item(values: dict[str, Any]) -> None:
    """Rank 1 is killed when its second item is to be written."""
    write, written = cache._write, []

    def killed(directory: Path, name: str, *arguments: Any) -> None:
        written.append(name)
        if current_world().rank == 1 and len(written) == 2:
            os._exit(9)
        write(directory, name, *arguments)

    cache._write = killed  # in a process of its own
    cached(values)


@pytest.mark.slow
def test_a_run_that_was_killed_goes_on(made: dict[str, Any], tmp_path: Path) -> None:
    values = {**made, "output": {"directory": str(tmp_path)}}
    outcomes = rank_outcomes(die_after_an_item, 2, values, grace=30.0)
    assert outcomes[1].exit_code == 9
    assert "PeerError" in outcomes[0].error
    there = {file.name: file.stat().st_mtime_ns for file in (tmp_path / "cache").glob("item-*.safetensors")}
    assert 0 < len(there) < len(SIZES)
    run_ranks(cached, 3, values)
    one = Path(made["output"]["directory"]) / "cache"
    assert bytes_of(tmp_path / "cache") == bytes_of(one)
    assert {name: (tmp_path / "cache" / name).stat().st_mtime_ns for name in there} == there  # not made again


def test_a_text_that_is_too_long_is_named_with_its_row(
    pipeline: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    media = write_media(tmp_path / "media", {"image": "image"}, [(16, 16)] * 2)
    table = Path(media["source"])
    table.write_text(table.read_text().replace("a cat sees the sea", "cat " * 50))
    cached(configured(pipeline, media, tmp_path, max_sequence_length=40))
    assert "1 texts were cut off: " in caplog.text
    assert "metadata.csv, line 2: its text has 50 tokens, but only the first 40 are used" in caplog.text
