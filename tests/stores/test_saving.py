"""Save to an S3 server (SeaweedFS), completely or not."""

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

URL = f"s3://{servers.BUCKET}/run"
pytestmark = pytest.mark.skipif(not servers.has("weed"), reason="SeaweedFS is not installed")


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    with servers.s3() as url:
        yield url


@pytest.fixture(autouse=True)
def store_environment(
    endpoint: str, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
    for name, value in servers.environment(endpoint).items():
        monkeypatch.setenv(name, value)
    clear(endpoint)


def clear(endpoint: str) -> None:
    bucket = servers.store(endpoint)
    for batch in bucket.list("run"):
        for entry in batch:
            bucket.delete(entry["path"])


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
    """Two models of about 40 MB."""
    return make_models(tmp_path_factory.mktemp("models"), 512)


@pytest.fixture(scope="module")
def small_models(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Two models of about 2 MB."""
    return make_models(tmp_path_factory.mktemp("small"), 96)


def run_with_stores(function: Callable[..., Any], ranks: int, *arguments: Any) -> list[Any]:
    environment = {name: value for name, value in os.environ.items() if name.startswith(("AWS_", "XDG_"))}
    return run_ranks(call_with, ranks, environment, function, *arguments, timeout=280)


def call_with(environment: dict[str, str], function: Callable[..., Any], *arguments: Any) -> Any:
    os.environ.update(environment)
    return function(*arguments)


def unlisted_objects(url: str = URL) -> list[str]:
    """Return the objects that no manifest lists."""
    store = StoreDirectory.at(url)
    names = set(store.list())
    listed = {"zerostart.json", "state.json"} & names
    for marker in [*listed]:
        listed |= set(json.loads(store.read(marker) or b"{}")["files"])
    return sorted(names - listed)


def digests(source: str) -> dict[str, str]:
    return file_digests(open_catalog(source))


def save_over(first: str, second: str, url: str, local: str) -> None:
    models = [zerostart.load(source, engine="fsdp2", progress=False) for source in (first, second)]
    rank = torch.distributed.get_rank()
    for number, (model, options) in enumerate(
        (
            (models[0], {"max_shard_size": "20MB"}),
            (models[1], {"max_shard_size": "20MB"}),
            (models[0], {"max_shard_size": "5GB"}),
            (models[1], {"max_shard_size": "20MB", "memory_limit": 64 << 20}),
            (models[0], {"dtype": torch.float16}),
            (models[1], {}),
        )
    ):
        for path in (url, f"{local}/{number}"):
            report = zerostart.save(model, path, **options)  # type: ignore[arg-type]
            if path == url and rank == 0:
                assert set(report.files) <= StoreDirectory.at(url).list().keys()
        if rank == 0:
            assert digests(url) == digests(f"{local}/{number}")
            assert zerostart.verify(url).tensors == zerostart.verify(f"{local}/{number}").tensors
            assert unlisted_objects(url) == []
        torch.distributed.barrier()


def load_digest(source: str) -> dict[str, str]:
    return zerostart.digest(zerostart.load(source, engine="fsdp2", progress=False))


def test_save_over_another_equals_a_local_one(models: list[str], tmp_path: Path) -> None:
    """Shards, single files and fp16 replace each other."""
    run_with_stores(save_over, 2, *models, URL, str(tmp_path))
    assert run_with_stores(load_digest, 1, URL)[0] == run_with_stores(load_digest, 1, f"{tmp_path}/5")[0]
    assert {"config.json", "tokenizer.json", "model.safetensors"} <= StoreDirectory.at(URL).list().keys()


def save_states(source: str, url: str) -> dict[str, str]:
    model = zerostart.load(source, engine="fsdp2", progress=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    tokens = torch.arange(16).reshape(1, 16)
    for number in (1, 2):
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        zerostart.save_state(url, model, optimizer, {"step": number}, wait=number == 1).wait()
    return zerostart.digest(model)


def load_state(source: str, state: str) -> dict[str, str]:
    model = zerostart.load(source, engine="fsdp2", progress=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    assert zerostart.load_state(state, model, optimizer) == {"step": 2}
    return zerostart.digest(model)


@pytest.mark.slow
def test_training_state_resumes_from_a_copy(small_models: list[str], tmp_path: Path) -> None:
    digest = run_with_stores(save_states, 2, small_models[0], URL)[0]
    assert unlisted_objects() == []
    assert digests(f"{URL}/model") == digest
    store = StoreDirectory.at(URL)
    for name in store.list():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(store.read(name) or b"")
    assert run_with_stores(load_state, 2, small_models[0], str(tmp_path))[0] == digest


@contextlib.contextmanager
def serve_with_faults(
    endpoint: str, fault: Callable[[str, str, int], proxy.Fault], flipped: str = ""
) -> Iterator[proxy.Proxy]:
    with (
        proxy.serve_proxy(proxy.Proxy(endpoint, fault=fault, flipped=flipped)) as faulty,
        servers.set_environment(servers.environment(faulty.address)),
    ):
        yield faulty


@pytest.mark.slow
def test_faults_are_retried(endpoint: str, models: list[str]) -> None:
    def fault(method: str, path: str, number: int) -> proxy.Fault:
        if number % 7 == 3 and method == "PUT":
            return (503, "dead", "cut")[number // 7 % 3]
        return None

    with serve_with_faults(endpoint, fault) as faulty:
        run_with_stores(save_shards, 2, models[0], URL)
        assert len(faulty.requests) > 10
    assert digests(URL) == digests(models[0])
    assert unlisted_objects() == []


def save_shards(source: str, url: str) -> None:
    zerostart.save(zerostart.load(source, engine="fsdp2", progress=False), url, max_shard_size="20MB")


def fail_on_one_rank(source: str, url: str) -> str:
    model = zerostart.load(source, engine="fsdp2", progress=False)
    zerostart.save(model, url, max_shard_size="20MB")
    if torch.distributed.get_rank() == 1:
        os.environ["AWS_ENDPOINT_URL"] = "http://127.0.0.1:9"
        object_store.RETRIES = 0
    with pytest.raises(WriteError) as caught:
        zerostart.save(model, url, max_shard_size="20MB")
    return str(caught.value)


@pytest.mark.slow
def test_failed_save_is_one_error_and_leaves_nothing(models: list[str]) -> None:
    messages = run_with_stores(fail_on_one_rank, 2, models[0], URL)
    assert messages[0] == messages[1]
    assert f"{URL}/model-" in messages[0]
    assert digests(URL) == digests(models[0])
    assert unlisted_objects() == []


@pytest.mark.slow
def test_foreign_objects_are_kept(small_models: list[str], endpoint: str) -> None:
    """Even those with a name that the save uses."""
    bucket = servers.store(endpoint)
    bucket.put("run/README.md", b"mine")
    bucket.put("run/tokenizer.json", b"mine")
    bucket.put("run/data/model.bin", b"mine too")
    for source in small_models:
        zerostart.save(zerostart.load(source, engine="fsdp2", progress=False), URL, max_shard_size="1MB")
    assert unlisted_objects() == ["README.md", "data/model.bin", "tokenizer.json"]
    assert bytes(bucket.get("run/tokenizer.json").bytes()) == b"mine"
    assert digests(URL) == digests(small_models[1])
    bucket.put("run/zerostart.json", b'{"mine": 1}')
    with pytest.raises(WriteError, match="was not written by zerostart"):
        zerostart.save(zerostart.load(small_models[0], engine="fsdp2", progress=False), URL)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["shards", "single", "state"])
@pytest.mark.parametrize("loss", ["dead", 403])
def test_lost_connection_or_rights(
    kind: str, loss: proxy.Fault, endpoint: str, small_models: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The old or the new checkpoint remains."""
    monkeypatch.setattr(object_store, "RETRIES", 0)
    old, new = map(digests, small_models)
    models = [zerostart.load(source, engine="fsdp2", progress=False) for source in small_models]

    def save(number: int) -> None:
        if kind == "state":
            zerostart.save_state(URL, models[number], extra=number)
        else:
            zerostart.save(models[number], URL, max_shard_size="1MB" if kind == "shards" else "5GB")

    url = f"{URL}/model" if kind == "state" else URL
    save(0)
    outcomes, has_failed, at = set(), True, 0
    while has_failed:
        with serve_with_faults(endpoint, lambda method, path, number, at=at: loss if number >= at else None):  # type: ignore[misc]
            try:
                save(1)
                has_failed = False
            except WriteError:
                has_failed = True
        current = digests(url)
        assert current in (old, new), at
        assert has_failed or current == new
        outcomes.add(current == new)
        save(0)
        assert digests(url) == old
        assert unlisted_objects() == [], at
        zerostart.verify(URL)
        at += 1
    assert outcomes == {True, False}
    assert at > 5


@pytest.mark.slow
@pytest.mark.parametrize("part", ["shards", "config.json", "zerostart.json"])
def test_changed_byte_is_an_error(part: str, endpoint: str, small_models: list[str]) -> None:
    """Change uploads; the old checkpoint stays."""
    models = [zerostart.load(source, engine="fsdp2", progress=False) for source in small_models]
    zerostart.save(models[0], URL, max_shard_size="1MB")
    store = StoreDirectory.at(URL)
    store.put("config.json", b"{}")
    flipped = "model-" if part == "shards" else part
    with serve_with_faults(endpoint, lambda *_: None, flipped), pytest.raises(WriteError, match="BadDigest"):
        zerostart.save(models[1], URL, max_shard_size="1MB")
    assert digests(URL) == digests(small_models[0 if part == "shards" else 1])


def test_unwritable_urls_are_refused() -> None:
    for name in ("a//b", "../a", "a/./b", "a\\b", "a\nb"):
        with pytest.raises(ConfigError, match="name another directory"):
            zerostart.save(torch.nn.Linear(2, 2), f"s3://{servers.BUCKET}/{name}")
    for url in ("sftp://me:secret@host/x", "https://me:secret@host/x", "hdfs://host/x"):
        with pytest.raises(ConfigError, match="save to a local directory and copy it") as caught:
            zerostart.save(torch.nn.Linear(2, 2), url)
        assert "secret" not in str(caught.value)
