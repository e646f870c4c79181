"""Cache of encoded media: equal on any number of ranks, and never stale."""

import csv
import hashlib
import json
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from torch.utils.data import DataLoader

import zerostart
from tests.ranks import rank_outcomes, run_ranks
from tests.training.data.tiny_media import (
    PROMPTS,
    make_config,
    make_picture,
    read_cache,
    save_pipeline,
    write_media,
)
from tests.training.loop.locks import hold_lock
from zerostart.distributed.world import current_world
from zerostart.errors import CheckpointError, ConfigError, ReadError, WriteError
from zerostart.training.config.load import parse_config
from zerostart.training.data import cache
from zerostart.training.data.cache import ensure_cache
from zerostart.training.data.cached import CachedItems

pytestmark = pytest.mark.usefixtures("one_thread")
SIZES = [(16, 16), (16, 32), (16, 16), (32, 16), (16, 32), (16, 16), (16, 16)]


def open_cache(values: dict[str, Any]) -> CachedItems:
    return ensure_cache(parse_config(values), current_world())


def make_cache(values: dict[str, Any]) -> str:
    """Make or open the cache of a configuration; return the digest of its items."""
    return open_cache(values).digest()


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_pipeline("z_image", tmp_path_factory.mktemp("pipeline") / "z_image")


@pytest.fixture(scope="module")
def media(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return write_media(tmp_path_factory.mktemp("media") / "pictures", {"image": "image"}, SIZES)


@pytest.fixture(scope="module")
def base(pipeline: Path, media: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Configuration with a cache that one rank made."""
    values = make_config(pipeline, media, tmp_path_factory.mktemp("one"), prompts=["a cat"])
    make_cache(values)
    return values


@pytest.fixture
def config(base: dict[str, Any], tmp_path: Path) -> dict[str, Any]:
    """Configuration with a copy of the cache and media, which a test may change."""
    shutil.copytree(Path(base["media"]["source"]).parent, tmp_path / "media")
    shutil.copytree(Path(base["output"]["directory"]) / "cache", tmp_path / "cache")
    return {
        **base,
        "media": {**base["media"], "source": str(tmp_path / "media" / "metadata.csv")},
        "cache": {**base["cache"], "directory": str(tmp_path / "cache")},
    }


def read_table(values: dict[str, Any]) -> list[list[str]]:
    with Path(values["media"]["source"]).open(newline="") as lines:
        return list(csv.reader(lines))


def write_table(values: dict[str, Any], rows: list[list[str]]) -> None:
    with Path(values["media"]["source"]).open("w", newline="") as lines:
        csv.writer(lines).writerows(rows)


def are_equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def count_encoded(values: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> int:
    """Return how many items are encoded when the cache is opened."""
    from zerostart.training.diffusion import z_image

    count, encode = [], z_image.ZImageEncoder.encode

    def encode_and_count(self: Any, example: Any, generator: Any) -> Any:
        count.append(1)
        return encode(self, example, generator)

    with monkeypatch.context() as patched:
        patched.setattr(z_image.ZImageEncoder, "encode", encode_and_count)
        make_cache(values)
    return len(count)


def test_two_ranks_make_the_same_bytes(base: dict[str, Any], tmp_path: Path) -> None:
    values = {**base, "output": {"directory": str(tmp_path)}}
    first, second = run_ranks(make_cache, 2, values)
    directory = Path(base["output"]["directory"]) / "cache"
    assert first == second == make_cache(base)
    assert read_cache(tmp_path / "cache") == read_cache(directory)
    assert [entry.name for entry in tmp_path.iterdir()] == ["cache"]
    zerostart.verify(directory)


@torch.no_grad()
def test_items_equal_the_inputs_of_the_pipeline(base: dict[str, Any], pipeline: Path) -> None:
    from PIL import Image

    items = CachedItems(Path(base["output"]["directory"]) / "cache")
    pipe = diffusers.ZImageImg2ImgPipeline.from_pretrained(str(pipeline))
    folder = Path(base["media"]["source"]).parent
    assert len(items) == len(SIZES)
    for number, item in enumerate(items):
        assert list(item) == ["latents", "prompt_embeds"]
        (embeds,), _ = pipe.encode_prompt(PROMPTS[number % len(PROMPTS)], do_classifier_free_guidance=False)
        assert torch.equal(item["prompt_embeds"], embeds)
        pixels = pipe.image_processor.preprocess(Image.open(folder / f"image-{number}.png"))
        seed = hashlib.blake2b(f"0 {number}".encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(seed, "little") >> 1)
        sample = pipe.vae.encode(pixels).latent_dist.sample(generator)
        vae = pipe.vae.config
        assert torch.equal(item["latents"], ((sample - vae.shift_factor) * vae.scaling_factor)[0])
    for text in ("", "a cat"):
        (embeds,), _ = pipe.encode_prompt(text, do_classifier_free_guidance=False)
        assert torch.equal(items.prompt(text)["prompt_embeds"], embeds)
    with pytest.raises(ConfigError, match=r"no embeddings of the text 'a dog'; name it in cache\.prompts"):
        items.prompt("a dog")


@pytest.mark.slow
@torch.no_grad()
def test_placement_and_dtype_of_encoders(base: dict[str, Any], pipeline: Path, tmp_path: Path) -> None:
    """Offloaded encoders give the same bytes; in bfloat16 they equal the pipeline's."""
    directory = Path(base["output"]["directory"]) / "cache"
    values = {**base, "output": {"directory": str(tmp_path / "by-layers")}}
    values["cache"] = {**base["cache"], "placement": "offload"}
    assert len(set(run_ranks(make_cache, 2, values))) == 1
    assert read_cache(tmp_path / "by-layers" / "cache") == read_cache(directory)
    values = {**base, "output": {"directory": str(tmp_path / "lower")}}
    values["cache"] = {**base["cache"], "dtype": "bfloat16"}
    run_ranks(make_cache, 2, values)
    pipe = diffusers.ZImagePipeline.from_pretrained(str(pipeline), vae=None, dtype=torch.bfloat16)
    for number, item in enumerate(CachedItems(tmp_path / "lower" / "cache")):
        (embeds,), _ = pipe.encode_prompt(PROMPTS[number % len(PROMPTS)], do_classifier_free_guidance=False)
        assert item["prompt_embeds"].dtype == torch.bfloat16
        assert torch.equal(item["prompt_embeds"], embeds)


def test_items_and_shapes_as_read_by_workers(config: dict[str, Any]) -> None:
    items = open_cache({**config, "media": {**config["media"], "repeats": 2}})
    assert len(items) == 2 * len(SIZES)
    loader = DataLoader(pickle.loads(pickle.dumps(items)), batch_size=None, num_workers=1)
    for item, loaded in zip(items, loader, strict=True):
        assert are_equal(item, loaded)
    shapes = items.shapes()
    for number, size in enumerate(SIZES * 2):
        assert [index for index, key in enumerate(shapes) if key == shapes[number]] == [
            index for index, other_size in enumerate(SIZES * 2) if other_size == size
        ]
    with pytest.raises(IndexError):
        items[2 * len(SIZES)]


def catch_mismatch(values: dict[str, Any]) -> str:
    """Return the error of a cache that does not match the configuration."""
    with pytest.raises(ConfigError, match="does not match the configuration") as error:
        make_cache(values)
    return str(error.value)


def test_changed_settings_or_encoders_are_refused(
    config: dict[str, Any], pipeline: Path, tmp_path: Path
) -> None:
    digest = make_cache(config)
    with_settings = {**config, "cache": {**config["cache"], "posterior": "mode", "dtype": "bfloat16"}}
    text = catch_mismatch(with_settings)
    assert "cache.dtype was None and is bfloat16" in text
    assert "cache.posterior was sample and is mode" in text
    assert "Remove it to have it encoded again" in text
    offloaded = {**config["cache"], "placement": "offload"}  # it changes no number
    assert make_cache({**config, "cache": offloaded}) == digest

    copied = tmp_path / "pipeline"
    shutil.copytree(pipeline, copied)
    other_source = {**config, "model": {"source": str(copied)}}
    assert make_cache(other_source) == digest
    weights = copied / "text_encoder" / "model.safetensors"
    changed = bytearray(weights.read_bytes())
    changed[-1] ^= 1
    weights.write_bytes(changed)
    size = len(changed)
    assert f"text_encoder/model.safetensors was {size} bytes, " in catch_mismatch(other_source)
    texts = {**other_source, "cache": {**config["cache"], "prompts": ["the sea"]}}
    assert "text_encoder/model.safetensors was" in catch_mismatch(texts)
    changed[-1] ^= 1
    weights.write_bytes(changed)
    assert make_cache(other_source) == digest  # the modification time does not count
    index = json.loads((copied / "model_index.json").read_text())
    (copied / "model_index.json").write_text(json.dumps({**index, "is_distilled": True}))
    assert "is_distilled of the pipeline was None and is True" in catch_mismatch(other_source)
    (copied / "model_index.json").write_text(json.dumps(index))
    shutil.rmtree(copied)
    shutil.copytree(pipeline / "transformer", copied / "transformer")
    assert make_cache(other_source) == digest  # an existing cache needs no encoders


def test_cache_follows_its_media(config: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Only new and changed rows are encoded when the table changes."""
    place, folder = config["cache"]["directory"], Path(config["media"]["source"]).parent
    before = list(open_cache(config))
    header, *rows = read_table(config)
    make_picture(16, 16, 999).save(folder / "new.png")
    make_picture(16, 32, 998).save(folder / rows[1][header.index("image")])
    prompt = rows[0][header.index("prompt")]
    new = [{"prompt": prompt, "image": "new.png"}[name] for name in header]
    rows_left = [*rows[:3], *rows[4:]]
    write_table(config, [header, new, *reversed(rows_left)])
    assert count_encoded(config, monkeypatch) == 2
    after = list(open_cache(config))
    assert len(after) == len(SIZES)
    expected = [number for number in reversed(range(len(SIZES))) if number != 3]
    for at, number in enumerate(expected, start=1):
        assert are_equal(after[at], before[number]) == (number != 1)
    zerostart.verify(place)
    # The cache keeps items of rows that the table no longer has.
    part = {**config, "media": {**config["media"], "items": 2, "repeats": 2}}
    assert all(map(are_equal, open_cache(part), [*after[:2], *after[:2]]))
    write_table(config, [header, *rows])
    assert count_encoded(config, monkeypatch) == 0
    assert are_equal(open_cache(config)[3], before[3])
    # Another size makes another item.
    sized = {**config, "media": {**config["media"], "height": 16, "width": 16}}
    assert {tuple(item["latents"].shape[1:]) for item in open_cache(sized)} == {(4, 4)}
    os.utime(folder / "new.png")
    assert count_encoded(config, monkeypatch) == 0
    os.utime(folder / "image-0.png")
    assert count_encoded(config, monkeypatch) == 1


def test_equal_rows_are_separate_items(config: dict[str, Any]) -> None:
    header, *rows = read_table(config)
    write_table(config, [header, rows[0], rows[0]])
    first, second = open_cache(config)
    assert torch.equal(first["prompt_embeds"], second["prompt_embeds"])
    assert not torch.equal(first["latents"], second["latents"])


def test_added_texts_keep_the_items(config: dict[str, Any]) -> None:
    place = Path(config["cache"]["directory"])
    before, digest = read_cache(place), make_cache(config)
    items = open_cache({**config, "cache": {**config["cache"], "prompts": ["the sea"]}})
    assert items.texts == ("", "a cat", "the sea")
    assert items.prompt("the sea").keys() == {"prompt_embeds"}
    assert items.digest() == digest
    after = read_cache(place)
    assert len(after.keys() - before.keys()) == 1
    assert {name for name in before if after[name] != before[name]} == {"zerostart.json"}
    zerostart.verify(place)


@pytest.mark.slow
def test_two_processes_do_not_make_one_cache(base: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    raises = pytest.raises(WriteError, match="another process is making the cache")
    with hold_lock(tmp_path / "cache" / ".lock"), raises:
        make_cache({**base, "output": {"directory": str(tmp_path)}})


def make_cache_with_rank_seed(values: dict[str, Any]) -> None:
    make_cache({**values, "cache": {**values["cache"], "seed": current_world().rank}})


@pytest.mark.slow
def test_ranks_with_different_settings_fail(base: dict[str, Any], tmp_path: Path) -> None:
    values = {**base, "output": {"directory": str(tmp_path)}}
    for outcome in rank_outcomes(make_cache_with_rank_seed, 2, values, grace=30.0):
        assert "the ranks differ in cache.seed (rank 0: 0; rank 1: 1)" in outcome.message


def test_damaged_items_are_named_and_encoded_again(
    config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = make_cache(config)
    file = sorted(Path(config["cache"]["directory"]).glob("item-*"))[0]
    text = sorted(Path(config["cache"]["directory"]).glob("text-*"))[0]
    for damaged in (text, file):
        whole = damaged.read_bytes()
        damaged.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        items = open_cache(config)
        read = list if damaged == file else lambda items: [items.prompt(prompt) for prompt in items.texts]
        with pytest.raises(ReadError, match=rf"{damaged.name} has other contents .*remove it"):
            read(items)
    file.write_bytes(file.read_bytes()[:-1])
    text.unlink()
    assert count_encoded(config, monkeypatch) == 1
    assert make_cache(config) == digest
    zerostart.verify(config["cache"]["directory"])


def test_directories_that_are_no_cache_are_refused(
    config: dict[str, Any], pipeline: Path, media: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="needs the section media"):
        make_cache(make_config(pipeline, None, tmp_path))
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.txt").write_text("mine")
    with pytest.raises(ConfigError, match="is not empty and is not a complete cache"):
        make_cache(make_config(pipeline, media, tmp_path, directory=str(mine)))
    index = Path(config["cache"]["directory"]) / "zerostart.json"
    document = json.loads(index.read_text())
    document["cache"]["version"] = 2
    index.write_text(json.dumps(document))
    with pytest.raises(CheckpointError, match=r"is a cache of version 2, .* remove"):
        make_cache(config)


def test_unusable_media_and_pipelines_are_named(
    pipeline: Path, media: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"is not a diffusers pipeline .*name one in cache\.source"):
        make_cache(make_config(pipeline / "vae", media, tmp_path / "a"))
    with pytest.raises(ConfigError, match=r"placement.*vae cannot be sharded.*replicate or offload"):
        parse_config(make_config(pipeline, media, tmp_path, placement={"vae": "shard"}))
    small = {**media, "multiple_of": 4, "height": 20, "width": 20}
    with pytest.raises(ConfigError, match=r"line 2: image is 20 x 20 .* ZImage\w* takes multiples of \d+"):
        make_cache(make_config(pipeline, small, tmp_path / "b"))
    assert not (tmp_path / "b").exists()
    listed = {**media, "columns": {"image": {"kind": "images", "size": "item"}}}
    with pytest.raises(ConfigError, match=r"line 2: ZImage\w* needs image as image, but .* makes it images"):
        make_cache(make_config(pipeline, listed, tmp_path / "c"))


def test_nonfinite_latents_are_refused(pipeline: Path, media: dict[str, Any], tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    copied = tmp_path / "pipeline"
    shutil.copytree(pipeline, copied)
    (weights,) = (copied / "vae").glob("*.safetensors")
    save_file({n: torch.full_like(t, torch.inf) for n, t in load_file(weights).items()}, weights)
    with pytest.raises(
        ConfigError, match=r"line 2: its latents has values that are not finite.*cache\.vae_dtype"
    ):
        make_cache(make_config(copied, media, tmp_path))
    assert len(CachedItems(tmp_path / "cache")) == 0


def test_bad_pictures_are_reported_together(config: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Good rows are cached; after a repair only the bad rows are encoded."""
    folder, place = Path(config["media"]["source"]).parent, config["cache"]["directory"]
    good = {number: (folder / f"image-{number}.png").read_bytes() for number in (2, 5)}
    for number, data in good.items():
        (folder / f"image-{number}.png").write_bytes(data[: len(data) // 2])
    whole = list(CachedItems(place))
    shutil.rmtree(place)
    with pytest.raises(ConfigError) as error:
        make_cache(config)
    assert str(error.value).startswith("2 rows cannot be encoded: ")
    for number in good:
        assert f"metadata.csv, line {number + 2}: {folder}/image-{number}.png" in str(error.value)
    assert f"The other 5 are kept in {place}" in str(error.value)
    assert len(CachedItems(place)) == 5
    with pytest.raises(ConfigError, match=r"image-2\.png .*; .*image-5\.png"):
        make_cache(config)
    for number, data in good.items():
        (folder / f"image-{number}.png").write_bytes(data)
    assert count_encoded(config, monkeypatch) == 2
    assert all(map(are_equal, open_cache(config), whole))


@pytest.mark.slow
def test_bad_pictures_are_reported_on_every_rank(config: dict[str, Any]) -> None:
    folder = Path(config["media"]["source"]).parent
    shutil.rmtree(config["cache"]["directory"])
    for number in (0, 6):
        (folder / f"image-{number}.png").write_bytes(b"no picture")
    outcomes = rank_outcomes(make_cache, 2, config)
    assert {outcome.error for outcome in outcomes} == {"zerostart.errors.ConfigError"}
    assert outcomes[0].message == outcomes[1].message
    assert "2 rows cannot be encoded: " in outcomes[0].message
    assert len(CachedItems(config["cache"]["directory"])) == 5


def die_at_second_item(values: dict[str, Any]) -> None:
    """Kill rank 1 before it writes its second item."""
    write, written = cache._write, []

    def write_or_die(directory: Path, name: str, *arguments: Any) -> None:
        written.append(name)
        if current_world().rank == 1 and len(written) == 2:
            os._exit(9)
        write(directory, name, *arguments)

    cache._write = write_or_die  # only in the process of this rank
    make_cache(values)


@pytest.mark.slow
def test_killed_run_continues(base: dict[str, Any], tmp_path: Path) -> None:
    values = {**base, "output": {"directory": str(tmp_path)}}
    outcomes = rank_outcomes(die_at_second_item, 2, values, grace=30.0)
    assert outcomes[1].exit_code == 9
    assert "PeerError" in outcomes[0].error
    written = {file.name: file.stat().st_mtime_ns for file in (tmp_path / "cache").glob("item-*.safetensors")}
    assert 0 < len(written) < len(SIZES)
    run_ranks(make_cache, 3, values)
    directory = Path(base["output"]["directory"]) / "cache"
    assert read_cache(tmp_path / "cache") == read_cache(directory)
    assert {name: (tmp_path / "cache" / name).stat().st_mtime_ns for name in written} == written  # as before


def test_long_text_is_named_with_its_row(
    pipeline: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    media = write_media(tmp_path / "media", {"image": "image"}, [(16, 16)] * 2)
    path = Path(media["source"])
    path.write_text(path.read_text().replace("a cat sees the sea", "cat " * 50))
    make_cache(make_config(pipeline, media, tmp_path, max_sequence_length=40))
    assert "1 texts were cut off: " in caplog.text
    assert "metadata.csv, line 2: its text has 50 tokens, but only the first 40 are used" in caplog.text
