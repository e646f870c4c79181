"""Saves to stores that take a file whole, from one process: staged on disk, and whole there or not at all."""

import itertools
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import zerostart
from tests.ranks import run_ranks
from tests.stores import proxy, servers
from tests.stores.killed import worker
from tests.stores.test_saving import on
from tests.training.conftest import tokenizer_path as tokenizer_path
from tests.training.loop.test_resumed_runs import going_on, interrupted
from tests.training.loop.test_run import losses, run
from tests.training.loop.test_run import values as values
from zerostart.checkpoint.source import open_catalog
from zerostart.checkpoint.storage import staged_uploads, uploads_at, webdav_uploads
from zerostart.checkpoint.storage.staged_uploads import StagedUploads
from zerostart.checkpoint.storage.uploads import Stored, TakenError
from zerostart.checkpoint.verifying import file_digests
from zerostart.errors import CheckpointNotFoundError, ConfigError, WriteError
from zerostart.state.converting.convert import convert, export

pytestmark = pytest.mark.skipif(not servers.has("rclone"), reason="rclone is not installed")


@pytest.fixture(autouse=True)
def own_folders(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Two models of one architecture, of some 20 MB: a few parts of 8 MiB, and two files of 12 MB at most."""
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("models")
    sizes = {"vocab_size": 4000, "hidden_size": 512, "intermediate_size": 1500, "num_key_value_heads": 2}
    config = LlamaConfig(**sizes, num_hidden_layers=2, num_attention_heads=4)
    for seed in (1, 2):
        torch.manual_seed(seed)
        LlamaForCausalLM(config).bfloat16().save_pretrained(folder / str(seed), max_shard_size="12MB")
        (folder / str(seed) / "tokenizer.json").write_text("{}")
    return [str(folder / "1"), str(folder / "2")]


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[Path, str]]:
    """What a server of WebDAV serves, and its URL with a name and a password."""
    folder = tmp_path / "served"
    folder.mkdir()
    with servers.rclone(
        folder, "webdav", "--dir-cache-time", "5m", "--user", "me", "--pass", "secret"
    ) as address:
        yield folder, f"http://me:secret@{address.removeprefix('http://')}"


def digests(source: str | Path) -> dict[str, str]:
    return file_digests(open_catalog(str(source)))


def content(folder: Path) -> dict[str, bytes]:
    """All files but the documents, in which moments and names of the save are."""
    found = {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    return {name: data for name, data in found.items() if name not in ("zerostart.json", "state.json")}


def saving(first: str, second: str, place: str, local: str) -> list[Any]:
    """Save one model over another, in each way, and a state; expect what directories of this machine have."""
    models = [zerostart.load(one, engine="fsdp2", progress=False) for one in (first, second)]
    told = []
    for number, (model, how) in enumerate(
        (
            (models[0], {"max_shard_size": "12MB"}),
            (models[1], {"max_shard_size": "5GB"}),
            (models[0], {"max_shard_size": "5GB"}),
            (models[1], {"max_shard_size": "12MB", "memory_limit": 64 << 20}),
        )
    ):
        for path in (f"{place}/model", f"{local}/{number}"):
            told.append(zerostart.save(model, path, **how).staged_bytes)  # type: ignore[arg-type]
        if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
            assert digests(f"{place}/model") == digests(f"{local}/{number}")
            assert zerostart.verify(f"{place}/model").tensors == zerostart.verify(f"{local}/{number}").tensors
    optimizer = torch.optim.AdamW(models[0].parameters(), lr=1e-2)
    for parameter in models[0].parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    for path in (f"{place}/state", f"{local}/state"):
        zerostart.save_state(path, models[0], optimizer, extra={"step": 1})
    before = zerostart.digest(models[0])
    optimizer.step()
    assert zerostart.digest(models[0]) != before
    assert zerostart.load_state(f"{place}/state", models[0], optimizer) == {"step": 1}
    assert zerostart.digest(models[0]) == before
    return told


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize("kind", ["webdav", pytest.param("file", marks=pytest.mark.slow)])
def test_a_save_is_what_a_local_one_is(
    kind: str, ranks: int, models: list[str], served: tuple[Path, str], tmp_path: Path
) -> None:
    folder, url = served
    url = f"file://{folder}" if kind == "file" else url
    told = run_ranks(saving, ranks, *models, url, str(tmp_path / "local"), timeout=280)
    assert [n > 19_000_000 for n in told[0]] == [True, False] * 4
    # The same files to the byte, but for names that were taken, and nothing beside them.
    assert content(folder / "state/model") == content(tmp_path / "local/state/model")
    assert content(folder / "state").keys() == content(tmp_path / "local/state").keys()
    names = {len(data) for data in content(tmp_path / "local/3").values()}
    assert {len(data) for name, data in content(folder / "model").items() if "index" not in name} <= names
    assert not list(folder.rglob(".zerostart/*"))
    with pytest.raises(ConfigError, match="is signed"):
        uploads_at("https://example.org/model?signature=x")
    with pytest.raises(ConfigError, match="push_to_hub"):
        uploads_at("hf://me/model")


def failing(source: str, place: str, room: int | None) -> str:
    model = zerostart.load(source, engine="fsdp2", progress=False)
    if room is not None:
        from zerostart.transfer import uploading

        uploading.free_space = lambda path: room  # type: ignore[assignment]
    with pytest.raises(WriteError) as raised:
        zerostart.save(model, place, max_shard_size="12MB")
    return str(raised.value)


def test_one_error_on_all_ranks_and_the_old_one_stays(models: list[str], served: tuple[Path, str]) -> None:
    """Too little disk before anything is sent; a server that breaks off in the middle of a file."""
    folder, url = served
    export(models[0], f"{url}/model")
    before = content(folder)
    told = run_ranks(failing, 2, models[1], f"{url}/model", 15_000_000)
    assert told[0] == told[1]
    assert "put them together first takes" in told[0]
    assert "TMPDIR" in told[0]
    assert "secret" not in told[0]
    assert content(folder) == before

    def fault(method: str, path: str, number: int) -> proxy.Fault:
        return "cut" if method == "PUT" and path.endswith(".part") and number > 30 else None

    with proxy.before(proxy.Proxy(url.partition("@")[2], fault=fault)) as line:
        line.target = f"http://{url.partition('@')[2]}"
        through = url.replace(url.partition("@")[2], line.address.removeprefix("http://"))
        told = run_ranks(failing, 2, models[1], f"{through}/model", None, timeout=280)
    assert told[0] == told[1]
    assert "uploading" in told[0]
    assert "model" in told[0]
    assert "secret" not in told[0]
    assert digests(f"{url}/model") == digests(models[0])
    export(models[1], f"{url}/model")
    assert digests(f"{url}/model") == digests(models[1])
    assert not list(folder.rglob(".zerostart/*"))


def test_moves_whose_answers_are_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """rclone's server removes what is at the new name first: another attempt would remove what was moved."""
    moves: list[int] = []

    def fault(method: str, path: str, number: int) -> proxy.Fault:
        if method == "MOVE":
            moves.append(number)
        return ("lost", 503, None)[len(moves) % 3] if method == "MOVE" else None

    with (
        servers.rclone(tmp_path, "webdav", "--dir-cache-time", "5m") as address,
        proxy.before(proxy.Proxy(address, fault=fault)) as line,
    ):
        found = uploads_at(f"{line.address}/place")
        assert found is not None
        uploads = found.aside(".zerostart/0123456789ab")
        for number in range(4):
            uploads.put("inner/a.json", b"x" * (number + 1))
            assert (tmp_path / "place/inner/a.json").stat().st_size == number + 1
        assert len(moves) > 4
        # Of one that is answered and not done: what is there is as long as what should be.
        monkeypatch.setattr(webdav_uploads, "DELAYS", (0.01,))
        uploads.put("inner/b.json", b"y" * number)
        for answer, words in ((207, "answered 207"), (204, "where it was uploaded to")):
            line.fault = lambda method, path, _, answer=answer: answer if method == "MOVE" else None
            with pytest.raises(WriteError, match=words):
                uploads.put("inner/b.json", b"x" * number)
            with pytest.raises(WriteError, match=words):
                uploads.give_name("inner/a.json", "inner/b.json")
        assert (tmp_path / "place/inner/b.json").read_bytes() == b"y" * number


def test_servers_that_take_nothing_are_told(models: list[str], tmp_path: Path) -> None:
    refused = pytest.raises(WriteError, match="saves need a WebDAV server")
    with servers.rclone(tmp_path, "http") as address, refused:
        export(models[0], f"{address}/model")
    with pytest.raises(ConfigError, match="archives"):
        uploads_at(f"zip://model::file://{tmp_path}/a.zip")


SAVING = """
import os, sys
import torch
torch.set_num_threads(1)
import zerostart
import obstore, transformers
kind, first, second = sys.argv[1:4]
models = [zerostart.load(one, engine="fsdp2", progress=False) for one in (first, second)]
def work(which):
    place = os.environ["AWS_ENDPOINT_URL"] + "/run"
    if kind == "state":
        zerostart.save_state(place, models[int(which)], extra=which)
    else:
        zerostart.save(models[int(which)], place, max_shard_size="12MB" if kind == "shards" else "5GB")
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", ["shards", "single", "state"])
def test_killed_in_the_middle(kind: str, models: list[str], tmp_path: Path) -> None:
    """The old checkpoint is whole, or the new one, and the next save leaves nothing of the killed one."""
    old, new = (digests(model) for model in models)
    with (
        servers.rclone(tmp_path, "webdav", "--dir-cache-time", "5m") as address,
        worker(SAVING, [kind, *models], address) as saving,
    ):
        place = f"{address}/run"
        assert saving.done("0")
        at, was_killed, seen = 0, True, set()
        while was_killed:
            was_killed = saving.killed(at, "1")
            now = digests(place)
            assert now in (old, new), at
            assert now == new or was_killed
            seen.add(now == new)
            assert saving.done("0"), at
            assert digests(place) == old
            assert not [path for path in tmp_path.rglob(".zerostart/**/*") if path.is_file()], at
            zerostart.verify(place)
            at += 7
    assert seen == {True, False}
    assert at > 50


def test_a_conversion_is_what_a_local_one_is(models: list[str], tmp_path: Path) -> None:
    """Into files of other names, the largest of which is staged, and the small ones are not."""
    # One that was killed before its first note was in its place has left that, and one that lives may have.
    parts = [tmp_path / f"beside/.zerostart/{token * 12}/{'5' * 32}.part" for token in "ab"]
    for part in parts:
        part.parent.mkdir(parents=True)
        part.touch()
    os.utime(parts[0], (0, 0))
    made = convert(models[0], f"file://{tmp_path}/stored", "dcp")
    convert(models[0], tmp_path / "here", "dcp")
    assert content(tmp_path / "stored") == content(tmp_path / "here")
    assert made.staged_bytes > 19_000_000
    assert [part.parent.exists() for part in parts] == [False, True]
    with pytest.raises(ConfigError, match="is there already"):
        convert(models[0], f"file://{tmp_path}/stored", "dcp")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["webdav", "file"])
def test_a_run_goes_on_from_there(
    kind: str, checkpoints: Any, values: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On another machine, which has nothing of the run: its losses are those of a run that never stopped."""
    path, folder = checkpoints("qwen3"), tmp_path / "served"
    folder.mkdir()
    straight = on(run, 2, values(path, "fsdp2", "straight", steps=6))[0]
    given = going_on(values(path, "fsdp2", steps=6), background=False, keep=1)
    with servers.rclone(folder, "webdav", "--dir-cache-time", "5m") as address:
        place = f"{address}/the run" if kind == "webdav" else f"file://{folder}/the run"
        given["output"] = {"directory": place}
        on(interrupted, 2, given, 4)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "elsewhere"))
        assert on(run, 2, given)[0].directory == place
        assert digests(place) == digests(straight.directory)
        told = (folder / "the run/metrics.jsonl").read_text().splitlines()
        found = [json.loads(line) for line in told]
        assert [entry["loss"] for entry in found if "loss" in entry] == losses(straight)
        assert [path.parent.name for path in folder.rglob("state.json")] == ["step-00000006"]
        assert not [path for path in folder.rglob(".zerostart/**/*") if path.is_file()]
        with pytest.raises(ConfigError, match="is not empty"):
            run({**given, "resume": None})


def test_names_are_no_patterns_and_no_marks() -> None:
    """Of a file system that copies and removes, and in a URL."""
    for name in ("run[1]", "st*r", "q?z"):
        found = uploads_at(f"memory://staged/{name}")
        assert found is not None
        uploads = found.aside(".zerostart/0123456789ab")
        for content in (b"one", b"another"):
            uploads.put("a.json", content)
        assert uploads.read("a.json") is not None
        assert uploads.listed().keys() == {"a.json"}
    with pytest.raises(ConfigError, match="write %23"):
        uploads_at("http://127.0.0.1:9/run#1")


def test_shards_alone_are_no_checkpoint() -> None:
    """A reader during the first save to a store is not given a part of it."""
    found = uploads_at("memory://shards/model")
    assert found is not None
    for number in (1, 2):
        found.put(f"model-0000{number}-of-00003.safetensors", b"")
        with pytest.raises(CheckpointNotFoundError, match="no index of them: a save"):
            open_catalog("memory://shards/model")


def test_a_list_that_leaves_out_a_name_is_looked_at_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a server while something else is moved out of the folder; and what is not there is still told."""
    uploads = uploads_at(f"file://{tmp_path}")
    assert isinstance(uploads, StagedUploads)
    uploads = uploads.aside(".zerostart/save")
    left_out, found = itertools.cycle((True, False)), type(uploads).found

    def look(self: StagedUploads, name: str) -> Stored | None:
        return None if name == "model" and next(left_out) else found(self, name)

    monkeypatch.setattr(type(uploads), "found", look)
    monkeypatch.setattr(staged_uploads, "LOOKS", (0.0, 0.0, 0.0))
    tag = uploads.put("model", b"first", None)
    assert uploads.put("model", b"second", tag) != tag
    assert (tmp_path / "model").read_bytes() == b"second"
    with pytest.raises(TakenError):
        uploads.put("model", b"third", tag)
    next(left_out)  # the next look is one that sees it: looking again for its absence would miss it
    with pytest.raises(TakenError):
        uploads.put("model", b"third", None)
    assert (tmp_path / "model").read_bytes() == b"second"
