"""The cache of encoded media: the same bytes on any number of ranks, what diffusers gives, never stale."""

import errno
import hashlib
import json
import os
import pickle
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from torch.utils.data import DataLoader

import zerostart
from tests.ranks import rank_outcomes, run_ranks
from tests.training.data.encoded import PROMPTS, bytes_of, configured, make, write_media
from tests.training.loop.held_locks import lock_held
from zerostart.distributed.world import current_world
from zerostart.errors import CheckpointNotFoundError, ConfigError, ReadError, WriteError
from zerostart.training.config.load import parse_config
from zerostart.training.data.cache import ensure_cache
from zerostart.training.data.cache_files import publish_prompts
from zerostart.training.data.cached import CachedItems

SIZES = [(16, 16), (16, 32), (16, 16), (32, 16), (16, 32), (16, 16), (16, 16)]


def cached(values: dict[str, Any]) -> str:
    """Make or open the cache that a configuration names; the digest of its items."""
    return ensure_cache(parse_config(values), current_world()).digest()


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
    """A cache that one rank has made, in three files."""
    values = configured(pipeline, media, tmp_path_factory.mktemp("one"), prompts=["a cat"], file_size=12_000)
    cached(values)
    return values


@pytest.fixture
def place(made: dict[str, Any], tmp_path: Path) -> Path:
    """A copy of that cache, to do something to."""
    shutil.copytree(Path(made["output"]["directory"]) / "cache", tmp_path / "cache")
    return tmp_path / "cache"


def test_two_ranks_make_the_same_bytes(made: dict[str, Any], tmp_path: Path) -> None:
    values = {**made, "output": {"directory": str(tmp_path)}}
    first, second = run_ranks(cached, 2, values)
    one = Path(made["output"]["directory"]) / "cache"
    assert first == second == CachedItems(one).digest()
    assert bytes_of(tmp_path / "cache") == bytes_of(one)
    assert len([name for name in bytes_of(one) if name.startswith("items-")]) > 1
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


def test_reading(made: dict[str, Any], place: Path) -> None:
    """By workers, by copies, several times over; items of one shape share a key."""
    items = CachedItems(place)
    assert items.digest() == CachedItems(made["output"]["directory"] + "/cache").digest()
    loader = DataLoader(pickle.loads(pickle.dumps(items)), batch_size=None, num_workers=1)
    for one, other in zip(items, loader, strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)
    keys = items.shapes()
    groups = {size: {keys[n] for n, one in enumerate(SIZES) if one == size} for size in set(SIZES)}
    assert all(len(found) == 1 for found in groups.values())
    assert len(set(keys)) == len(groups)
    twice = CachedItems(place, repeats=2)
    assert (len(twice), twice.shapes()) == (2 * len(items), [*keys, *keys])
    assert torch.equal(twice[len(items) + 1]["latents"], items[1]["latents"])
    assert twice.digest() != items.digest()
    with pytest.raises(IndexError):
        items[len(items)]
    with pytest.raises(CheckpointNotFoundError, match="there is no cache here; make it with zerostart cache"):
        CachedItems(place.parent)


opened: list[str] | None = None


def listen(event: str, arguments: tuple[Any, ...]) -> None:
    if opened is not None and event == "open" and isinstance(arguments[0], (str, bytes)):
        opened.append(os.fsdecode(arguments[0]))


def trained(values: dict[str, Any]) -> list[str]:
    """The files that a run opens in this rank's own process."""
    global opened
    from zerostart.training.loop.runner import train

    sys.addaudithook(listen)  # for the life of this process
    opened = []
    assert train(parse_config(values)).steps == 2
    return opened


@pytest.mark.slow
def test_a_run_opens_no_file_of_an_encoder(made: dict[str, Any], pipeline: Path, tmp_path: Path) -> None:
    values = {
        **made,
        "task": {"name": "flow-matching"},
        "train": {"steps": 2, "batch_size": 1},
        "output": {"directory": str(tmp_path)},
        "cache": {**made["cache"], "directory": made["output"]["directory"] + "/cache"},
    }
    (found,) = run_ranks(trained, 1, values)
    read = {Path(name).relative_to(pipeline).parts[0] for name in found if name.startswith(f"{pipeline}/")}
    assert read == {"model_index.json", "transformer"}
    assert any("items-00000" in name for name in found)


def refused(values: dict[str, Any]) -> str:
    """Why the cache of a configuration is not opened."""
    with pytest.raises(ConfigError, match="does not match the configuration") as told:
        cached(values)
    return str(told.value)


def test_a_stale_cache_is_refused_by_what_differs(
    made: dict[str, Any], place: Path, pipeline: Path, tmp_path: Path
) -> None:
    values = {**made, "cache": {**made["cache"], "directory": str(place)}}
    digest = cached(values)
    with_settings = {**values, "cache": {**values["cache"], "posterior": "mode", "dtype": "bfloat16"}}
    text = refused(with_settings)
    assert "cache.dtype was None and is bfloat16; cache.posterior was sample and is mode" in text
    assert "Remove it to have it made again" in text
    placed = {"placement": "offload", "file_size": "1MB"}  # on which no number depends
    assert cached({**values, "cache": {**values["cache"], **placed}}) == digest

    folder = tmp_path / "media"
    shutil.copytree(Path(made["media"]["source"]).parent, folder)
    moved = {**values, "media": {**made["media"], "source": str(folder / "metadata.csv"), "repeats": 2}}
    assert len(ensure_cache(parse_config(moved), current_world())) == 2 * len(SIZES)
    other_sizes = {**moved, "media": {**moved["media"], "height": 16, "width": 16}}
    assert f"from other data than media gives ({len(SIZES)} items, of other contents or sizes)" in refused(
        other_sizes
    )
    first = ensure_cache(parse_config({**moved, "media": {**moved["media"], "items": 2}}), current_world())
    assert (len(first), len(CachedItems(place))) == (2 * 2, len(SIZES))  # the others stay, for who takes all

    copied = tmp_path / "pipeline"
    shutil.copytree(pipeline, copied)
    other = {**values, "model": {"source": str(copied)}}
    assert cached(other) == digest
    weights = copied / "text_encoder" / "model.safetensors"
    changed = bytearray(weights.read_bytes())
    changed[-1] ^= 1
    weights.write_bytes(changed)
    assert "other encoders (text_encoder/model.safetensors has other contents" in refused(other)
    changed[-1] ^= 1
    weights.write_bytes(changed)
    assert cached(other) == digest  # whenever it was written
    index = json.loads((copied / "model_index.json").read_text())
    (copied / "model_index.json").write_text(json.dumps({**index, "is_distilled": True}))
    assert "other encoders (is_distilled of the pipeline was None and is True)" in refused(other)
    (copied / "model_index.json").write_text(json.dumps(index))
    (copied / "tokenizer" / "tokenizer.json").write_text("{}")
    assert "with other encoders (tokenizer/tokenizer.json had" in refused(other)
    shutil.rmtree(copied / "text_encoder")
    shutil.rmtree(copied / "tokenizer")
    assert cached(other) == digest  # it does without the encoders
    assert cached({**other, "media": None}) == digest  # and without the media


def test_texts_are_added_and_the_items_stay(made: dict[str, Any], place: Path) -> None:
    before, digest = bytes_of(place), CachedItems(place).digest()
    texts = {**made["cache"], "directory": str(place), "prompts": ["the sea"]}
    items = ensure_cache(parse_config({**made, "cache": texts}), current_world())
    assert items.texts == ("", "a cat", "the sea")
    assert items.prompt("the sea").keys() == {"prompt_embeds"}
    assert items.digest() == digest
    after = bytes_of(place)
    assert {name for name in after if after[name] != before[name]} == {
        "prompts.safetensors",
        "zerostart.json",
    }
    zerostart.verify(place)


def test_texts_that_two_runs_add_are_not_mixed_up(place: Path) -> None:
    texts = {text: {"prompt_embeds": torch.full((2, 3), i)} for i, text in enumerate(("one", "two"))}
    publish_prompts(place, {"one": texts["one"]}, current_world())
    first = CachedItems(place)
    publish_prompts(place, {"two": texts["two"]}, current_world())
    second = CachedItems(place)
    assert second.texts == ("", "a cat", "one", "two")
    for items in (first, second):
        assert torch.equal(items.prompt("one")["prompt_embeds"], texts["one"]["prompt_embeds"])
    assert torch.equal(second.prompt("two")["prompt_embeds"], texts["two"]["prompt_embeds"])
    file = place / "prompts.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(
        ReadError, match=r"prompts\.safetensors: the embeddings of the text .* have other contents"
    ):
        [second.prompt(text) for text in second.texts]
    assert [entry.name for entry in place.parent.iterdir()] == ["cache"]


def test_texts_are_added_by_the_encoders_of_the_items(
    made: dict[str, Any], place: Path, pipeline: Path, tmp_path: Path
) -> None:
    copied = tmp_path / "pipeline"
    shutil.copytree(pipeline, copied)
    weights = copied / "text_encoder" / "model.safetensors"
    changed = bytearray(weights.read_bytes())
    changed[-1] ^= 1
    weights.write_bytes(changed)
    texts = {**made["cache"], "directory": str(place), "prompts": ["the sea"]}
    values = {**made, "model": {"source": str(copied)}, "cache": texts}
    assert r"text_encoder/model.safetensors has other contents" in refused(values)
    assert CachedItems(place).texts == ("", "a cat")


def test_a_cache_is_made_on_another_file_system(
    made: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def elsewhere(*_: Any, **__: Any) -> None:
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))

    (tmp_path / "disk").mkdir()
    (tmp_path / "cache").symlink_to(tmp_path / "disk" / "cache")
    monkeypatch.setattr(os, "link", elsewhere)
    cached({**made, "output": {"directory": str(tmp_path)}})
    one = Path(made["output"]["directory"]) / "cache"
    assert bytes_of(tmp_path / "disk" / "cache") == bytes_of(one)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["cache", "disk"]
    assert [entry.name for entry in (tmp_path / "disk").iterdir()] == ["cache"]


@pytest.mark.slow
def test_two_processes_do_not_make_one_cache(made: dict[str, Any], tmp_path: Path) -> None:
    draft = tmp_path / ".cache.encoding"
    draft.mkdir()
    (draft / "items-00000.safetensors").write_text("under way")
    refused = pytest.raises(WriteError, match="another process is making the cache")
    with lock_held(tmp_path / ".cache.lock"), refused:
        cached({**made, "output": {"directory": str(tmp_path)}})
    assert (draft / "items-00000.safetensors").read_text() == "under way"


def cached_by_other_settings(values: dict[str, Any]) -> None:
    """As ranks that were started with configurations that differ."""
    cached({**values, "cache": {**values["cache"], "seed": current_world().rank}})


@pytest.mark.slow
def test_ranks_that_would_encode_otherwise_are_told_so(made: dict[str, Any], tmp_path: Path) -> None:
    values = {**made, "output": {"directory": str(tmp_path)}}
    for outcome in rank_outcomes(cached_by_other_settings, 2, values, grace=30.0):
        assert "the ranks do not do the same" in outcome.message
        assert "media, cache and texts have the checksum" in outcome.message


def test_what_is_damaged_is_named(place: Path) -> None:
    file = place / "items-00001.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    items = CachedItems(place)
    with pytest.raises(ReadError, match=r"items-00001\.safetensors: item \d+ has other contents"):
        list(items)
    file.write_bytes(whole[:-1])
    with pytest.raises(
        ReadError, match=rf"items-00001\.safetensors has {len(whole) - 1} bytes, but {len(whole)} were"
    ):
        CachedItems(place)
    file.unlink()
    with pytest.raises(ReadError, match=r"items-00001\.safetensors: No such file"):
        CachedItems(place)


def test_what_cannot_be_encoded_is_told(
    made: dict[str, Any], pipeline: Path, media: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="no section media to make one from"):
        cached(configured(pipeline, None, tmp_path))
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "thesis.txt").write_text("mine")
    with pytest.raises(ConfigError, match="is not empty and is not a complete cache"):
        cached(configured(pipeline, media, tmp_path))
    with pytest.raises(ConfigError, match=r"is not a diffusers pipeline .*name one in cache\.source"):
        cached(configured(pipeline / "vae", media, tmp_path / "a"))
    with pytest.raises(ConfigError, match="vae cannot be sharded"):
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
    assert not (tmp_path / "cache").exists()


def die_after_a_file(values: dict[str, Any]) -> None:
    """Rank 1 is killed when its first file is to be written; rank 0 writes its own."""
    from zerostart.training.data.cache_files import Draft

    write = Draft.write

    def killed(self: Draft, file: int, items: Any) -> None:
        if current_world().rank == 1:
            os._exit(9)
        write(self, file, items)

    Draft.write = killed  # type: ignore[method-assign]  # in a process of its own
    cached(values)


@pytest.mark.slow
def test_other_versions_do_not_go_on(
    made: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from zerostart.training.data import filling
    from zerostart.training.data.cache_files import Draft

    values = {**made, "output": {"directory": str(tmp_path)}}
    write, written = Draft.write, []

    def stopped(self: Draft, file: int, items: Any) -> None:
        if len(written) == 1:
            written.append(-1)
            raise KeyboardInterrupt
        written.append(file)
        write(self, file, items)

    monkeypatch.setattr(Draft, "write", stopped)
    with pytest.raises(KeyboardInterrupt):
        cached(values)
    monkeypatch.setattr(filling, "version", lambda name: f"another one of {name}")
    cached(values)
    assert written == [0, -1, 0, 1]


@pytest.mark.slow
def test_a_run_that_was_killed_goes_on(made: dict[str, Any], tmp_path: Path) -> None:
    values = {**made, "output": {"directory": str(tmp_path)}}
    outcomes = rank_outcomes(die_after_a_file, 2, values, grace=30.0)
    assert outcomes[1].exit_code == 9
    assert "PeerError" in outcomes[0].error
    draft = tmp_path / ".cache.encoding"
    there = {file.name: file.stat().st_mtime_ns for file in draft.glob("items-*.safetensors")}
    assert there
    assert not (tmp_path / "cache").exists()
    run_ranks(cached, 3, values)
    one = Path(made["output"]["directory"]) / "cache"
    assert bytes_of(tmp_path / "cache") == bytes_of(one)
    assert {name: (tmp_path / "cache" / name).stat().st_mtime_ns for name in there} == there  # not made again
    assert not draft.exists()


@pytest.mark.slow
def test_what_another_run_has_left_is_made_anew(made: dict[str, Any], tmp_path: Path) -> None:
    values = {**made, "output": {"directory": str(tmp_path)}}
    rank_outcomes(die_after_a_file, 2, values, grace=30.0)
    other = {**values, "cache": {**values["cache"], "posterior": "mode"}}
    assert cached(other) != CachedItems(Path(made["output"]["directory"]) / "cache").digest()
    assert [entry.name for entry in tmp_path.iterdir()] == ["cache"]


OTHERS = [pytest.param(key, marks=pytest.mark.slow) for key in ("wan", "flux", "flux2_klein", "qwen_image")]


@pytest.mark.parametrize("key", ["z_image", *OTHERS])
def test_a_text_that_is_too_long_is_named_with_its_row(
    key: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Where the pipeline cuts it: the last word of such a text makes no difference to its embeddings."""
    from zerostart.training.data.encoders import encoders

    pipeline = make(key, tmp_path / "pipeline")
    settings = parse_config(configured(pipeline, None, tmp_path, max_sequence_length=40)).cache
    assert settings is not None
    with encoders(str(pipeline), settings, current_world()) as encoder:
        for words in range(1, 48):
            texts = " ".join(["cat"] * words), " ".join([*["cat"] * (words - 1), "sea"])
            one, other = (encoder.prompt(text) for text in texts)
            encoder.lengths.begin()
            encoder.prompt(texts[0])
            cut = torch.equal(one["prompt_embeds"], other["prompt_embeds"])
            # The end of a text has a token of its own, which takes the place of the last word first.
            assert cut <= (encoder.cut() is not None), words
            last = encoder.cut()
        assert last is not None
        assert "tokens with the pipeline's own, of which 40 are taken" in last
    if key != "z_image":
        return
    media = write_media(tmp_path / "media", {"image": "image"}, [(16, 16)] * 2)
    table = Path(media["source"])
    table.write_text(table.read_text().replace("a cat sees the sea", "cat " * 50))
    given = configured(pipeline, media, tmp_path, max_sequence_length=40)
    with pytest.raises(ConfigError, match=r"1 row cannot be encoded: .*metadata\.csv, line 2: its text has"):
        cached(given | {"cache": {**given["cache"], "long_prompts": "refuse"}})
    caplog.clear()
    shutil.rmtree(tmp_path / "cache")
    cached(given)
    assert "1 texts were cut off: " in caplog.text
    assert "metadata.csv, line 2: its text has" in caplog.text
