"""Saves to a real S3 server (SeaweedFS): whole or not at all, whatever fails on the way."""

import contextlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import zerostart
from tests.ranks import run_ranks
from tests.stores import proxy, servers
from zerostart.checkpoint.source import open_catalog
from zerostart.checkpoint.storage import object_store
from zerostart.checkpoint.storage.upload import StoreDirectory
from zerostart.checkpoint.verifying import file_digests
from zerostart.errors import ConfigError, WriteError

PLACE = f"s3://{servers.BUCKET}/run"
pytestmark = pytest.mark.skipif(not servers.has("weed"), reason="SeaweedFS is not installed")


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    with servers.s3() as found:
        yield found


@pytest.fixture(autouse=True)
def surroundings(
    endpoint: str, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
    for name, value in servers.environment(endpoint).items():
        monkeypatch.setenv(name, value)
    clear(endpoint)


def clear(endpoint: str) -> None:
    bucket = servers.store(endpoint)
    for batch in bucket.list("run"):
        for one in batch:
            bucket.delete(one["path"])


def make_models(folder: Path, hidden: int) -> list[str]:
    """Save two models of one architecture."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 8 * hidden, "hidden_size": hidden, "intermediate_size": 3 * hidden}
    config = LlamaConfig(**sizes, num_key_value_heads=2, num_hidden_layers=2, num_attention_heads=4)
    for seed in (1, 2):
        torch.manual_seed(seed)
        LlamaForCausalLM(config).save_pretrained(folder / str(seed))
        (folder / str(seed) / "tokenizer.json").write_text("{}")
    return [str(folder / "1"), str(folder / "2")]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Two models of some 40 MB."""
    return make_models(tmp_path_factory.mktemp("models"), 512)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Two models of some 2 MB, for dozens of saves."""
    return make_models(tmp_path_factory.mktemp("small"), 96)


def on(function: Callable[..., Any], ranks: int, *arguments: Any) -> list[Any]:
    own = {name: value for name, value in os.environ.items() if name.startswith(("AWS_", "XDG_"))}
    return run_ranks(call_with, ranks, own, function, *arguments, timeout=280)


def call_with(own: dict[str, str], function: Callable[..., Any], *arguments: Any) -> Any:
    os.environ.update(own)
    return function(*arguments)


def left_over(place: str = PLACE) -> list[str]:
    """Return the objects that no document lists."""
    store = StoreDirectory.at(place)
    found = set(store.list())
    listed = {"zerostart.json", "state.json"} & found
    for marker in [*listed]:
        listed |= set(json.loads(store.read(marker) or b"{}")["files"])
    return sorted(found - listed)


def digests(source: str) -> dict[str, str]:
    return file_digests(open_catalog(source))


def save_over(first: str, second: str, place: str, local: str) -> None:
    models = [zerostart.load(one, engine="fsdp2", progress=False) for one in (first, second)]
    rank = torch.distributed.get_rank()
    for number, (model, how) in enumerate(
        (
            (models[0], {"max_shard_size": "20MB"}),
            (models[1], {"max_shard_size": "20MB"}),
            (models[0], {"max_shard_size": "5GB"}),
            (models[1], {"max_shard_size": "20MB", "memory_limit": 64 << 20}),
            (models[0], {"dtype": torch.float16}),
            (models[1], {}),
        )
    ):
        for path in (place, f"{local}/{number}"):
            report = zerostart.save(model, path, **how)  # type: ignore[arg-type]
            if path == place and rank == 0:
                assert set(report.files) <= StoreDirectory.at(place).list().keys()
        if rank == 0:
            assert digests(place) == digests(f"{local}/{number}")
            assert zerostart.verify(place).tensors == zerostart.verify(f"{local}/{number}").tensors
            assert left_over(place) == []
        torch.distributed.barrier()


def load_digest(source: str) -> dict[str, str]:
    return zerostart.digest(zerostart.load(source, engine="fsdp2", progress=False))


def test_a_save_over_another_equals_a_local_one(models: list[str], tmp_path: Path) -> None:
    """Shards, single files and fp16, each over what was there; expect the local files' digests."""
    on(save_over, 2, *models, PLACE, str(tmp_path))
    assert on(load_digest, 1, PLACE)[0] == on(load_digest, 1, f"{tmp_path}/5")[0]
    assert {"config.json", "tokenizer.json", "model.safetensors"} <= StoreDirectory.at(PLACE).list().keys()


def save_states(source: str, place: str) -> dict[str, str]:
    model = zerostart.load(source, engine="fsdp2", progress=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    tokens = torch.arange(16).reshape(1, 16)
    for number in (1, 2):
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        zerostart.save_state(place, model, optimizer, {"step": number}, wait=number == 1).wait()
    return zerostart.digest(model)


def load_state(source: str, state: str) -> dict[str, str]:
    model = zerostart.load(source, engine="fsdp2", progress=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    assert zerostart.load_state(state, model, optimizer) == {"step": 2}
    return zerostart.digest(model)


@pytest.mark.slow
def test_a_training_state_is_saved_and_resumed_from_a_copy(small: list[str], tmp_path: Path) -> None:
    found = on(save_states, 2, small[0], PLACE)[0]
    assert left_over() == []
    assert digests(f"{PLACE}/model") == found
    store = StoreDirectory.at(PLACE)
    for name in store.list():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(store.read(name) or b"")
    assert on(load_state, 2, small[0], str(tmp_path))[0] == found


@contextlib.contextmanager
def disturbed(
    endpoint: str, fault: Callable[[str, str, int], proxy.Fault], flipped: str = ""
) -> Iterator[proxy.Proxy]:
    with (
        proxy.before(proxy.Proxy(endpoint, fault=fault, flipped=flipped)) as line,
        servers.environed(servers.environment(line.address)),
    ):
        yield line


@pytest.mark.slow
def test_faults_are_retried(endpoint: str, models: list[str]) -> None:
    def fault(method: str, path: str, number: int) -> proxy.Fault:
        if number % 7 == 3 and method == "PUT":
            return (503, "dead", "cut")[number // 7 % 3]
        return None

    with disturbed(endpoint, fault) as line:
        on(save_shards, 2, models[0], PLACE)
        assert len(line.asked) > 10
    assert digests(PLACE) == digests(models[0])
    assert left_over() == []


def save_shards(source: str, place: str) -> None:
    zerostart.save(zerostart.load(source, engine="fsdp2", progress=False), place, max_shard_size="20MB")


def fail_on_one_rank(source: str, place: str) -> str:
    model = zerostart.load(source, engine="fsdp2", progress=False)
    zerostart.save(model, place, max_shard_size="20MB")
    if torch.distributed.get_rank() == 1:
        os.environ["AWS_ENDPOINT_URL"] = "http://127.0.0.1:9"
        object_store.RETRIES = 0
    with pytest.raises(WriteError) as raised:
        zerostart.save(model, place, max_shard_size="20MB")
    return str(raised.value)


@pytest.mark.slow
def test_one_error_on_all_ranks_and_nothing_left(models: list[str]) -> None:
    found = on(fail_on_one_rank, 2, models[0], PLACE)
    assert found[0] == found[1]
    assert f"{PLACE}/model-" in found[0]
    assert digests(PLACE) == digests(models[0])
    assert left_over() == []


@pytest.mark.slow
def test_only_its_own_objects(small: list[str], endpoint: str) -> None:
    """Objects of others stay, also small files that the save has, too."""
    bucket = servers.store(endpoint)
    bucket.put("run/README.md", b"mine")
    bucket.put("run/tokenizer.json", b"mine")
    bucket.put("run/data/model.bin", b"mine too")
    for source in small:
        zerostart.save(zerostart.load(source, engine="fsdp2", progress=False), PLACE, max_shard_size="1MB")
    assert left_over() == ["README.md", "data/model.bin", "tokenizer.json"]
    assert bytes(bucket.get("run/tokenizer.json").bytes()) == b"mine"
    assert digests(PLACE) == digests(small[1])
    bucket.put("run/zerostart.json", b'{"mine": 1}')
    with pytest.raises(WriteError, match="was not written by zerostart"):
        zerostart.save(zerostart.load(small[0], engine="fsdp2", progress=False), PLACE)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["shards", "single", "state"])
@pytest.mark.parametrize("loss", ["dead", 403])
def test_a_save_that_loses_its_connection_or_rights(
    kind: str, loss: proxy.Fault, endpoint: str, small: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fail all requests from each one on; expect the old checkpoint or the new one."""
    monkeypatch.setattr(object_store, "RETRIES", 0)
    old, new = map(digests, small)
    models = [zerostart.load(one, engine="fsdp2", progress=False) for one in small]

    def save(number: int) -> None:
        if kind == "state":
            zerostart.save_state(PLACE, models[number], extra=number)
        else:
            zerostart.save(models[number], PLACE, max_shard_size="1MB" if kind == "shards" else "5GB")

    where = f"{PLACE}/model" if kind == "state" else PLACE
    save(0)
    seen, failed, at = set(), True, 0
    while failed:
        with disturbed(endpoint, lambda method, path, number, at=at: loss if number >= at else None):  # type: ignore[misc]
            try:
                save(1)
                failed = False
            except WriteError:
                failed = True
        now = digests(where)
        assert now in (old, new), at
        assert failed or now == new
        seen.add(now == new)
        save(0)
        assert digests(where) == old
        assert left_over() == [], at
        zerostart.verify(PLACE)
        at += 1
    assert seen == {True, False}
    assert at > 5


@pytest.mark.slow
@pytest.mark.parametrize("part", ["shards", "config.json", "zerostart.json"])
def test_a_changed_byte_is_an_error(part: str, endpoint: str, small: list[str]) -> None:
    """Change one byte of each upload on its way; expect an error of the save and the old checkpoint."""
    models = [zerostart.load(one, engine="fsdp2", progress=False) for one in small]
    zerostart.save(models[0], PLACE, max_shard_size="1MB")
    store = StoreDirectory.at(PLACE)
    store.put("config.json", b"{}")
    flipped = "model-" if part == "shards" else part
    with disturbed(endpoint, lambda *_: None, flipped), pytest.raises(WriteError, match="BadDigest"):
        zerostart.save(models[1], PLACE, max_shard_size="1MB")
    assert digests(PLACE) == digests(small[0 if part == "shards" else 1])


def test_urls_that_no_save_can_write_to() -> None:
    for name in ("a//b", "../a", "a/./b", "a\\b", "a\nb"):
        with pytest.raises(ConfigError, match="name another directory"):
            zerostart.save(torch.nn.Linear(2, 2), f"s3://{servers.BUCKET}/{name}")
    for url in ("sftp://me:secret@host/x", "https://me:secret@host/x", "hdfs://host/x"):
        with pytest.raises(ConfigError, match="save to a local directory and copy it") as raised:
            zerostart.save(torch.nn.Linear(2, 2), url)
        assert "secret" not in str(raised.value)
