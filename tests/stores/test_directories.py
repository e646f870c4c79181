"""URLs are sources like local directories."""

import itertools
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import zerostart
from tests.ranks import run_ranks
from tests.stores import proxy, servers
from zerostart.checkpoint.source import open_catalog
from zerostart.cli import main
from zerostart.errors import (
    CheckpointNotFoundError,
    ConfigError,
    ReadError,
    VerifyError,
    ZerostartError,
)
from zerostart.testing.ranks import Net, save


@pytest.fixture(autouse=True)
def empty_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sharded transformers model with index and tokenizer."""
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("served") / "some model"
    torch.manual_seed(5)
    sizes = {"vocab_size": 200, "hidden_size": 64, "intermediate_size": 96, "num_key_value_heads": 2}
    config = LlamaConfig(**sizes, num_hidden_layers=2, num_attention_heads=4)
    LlamaForCausalLM(config).save_pretrained(folder, max_shard_size="60KB")
    (folder / "tokenizer.json").write_text("{}")
    assert len(list(folder.glob("*.safetensors"))) > 2
    return folder


@pytest.fixture(scope="module", params=["http", pytest.param("webdav", marks=pytest.mark.slow)])
def url(model: Path, request: pytest.FixtureRequest) -> Iterator[str]:
    """Address of the model, with and without listing."""
    with servers.rclone(model.parent, request.param) as address:
        yield f"{address}/some%20model"


@pytest.mark.slow
def test_catalog_equals_that_of_the_local_directory(url: str, model: Path) -> None:
    catalog, local = open_catalog(url), open_catalog(model)
    assert catalog.tensors == local.tensors
    assert [Path(file).name for file in catalog.files] == [Path(file).name for file in local.files]
    assert Path(catalog.root, "config.json").read_bytes() == (model / "config.json").read_bytes()
    assert Path(catalog.root, "tokenizer.json").exists()
    assert zerostart.diff(url, model).same
    # A single file is a source, too, with the configuration next to it.
    single_file = open_catalog(f"{url}/{Path(local.files[0]).name}")
    assert len(single_file.files) == 1
    assert Path(single_file.root, "config.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2])
def test_load_equals_that_of_the_local_directory(url: str, model: Path, world_size: int) -> None:
    expected = run_ranks(digests, 1, str(model))[0]
    assert run_ranks(digests, world_size, url) == [expected] * world_size


def digests(source: str) -> dict[str, str]:
    model = zerostart.load(source, engine="fsdp2", progress=False)
    report = zerostart.report(model)
    assert report.read_bytes == report.planned_bytes
    return zerostart.digest(model)


@pytest.mark.slow
def test_saved_directory_is_verified_by_url(model: Path, tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    run_ranks(resave, 1, str(model), str(saved))
    with servers.rclone(tmp_path, "http") as address:
        assert zerostart.verify(f"{address}/saved") == zerostart.verify(saved)
        with pytest.raises(SystemExit) as exit_info:
            main(["verify", f"{address}/saved"])
        assert not exit_info.value.code
        file = next(saved.glob("*.safetensors"))
        file.write_bytes(file.read_bytes()[:-1] + b"x")
        with pytest.raises(VerifyError, match=r"tensor .* has other contents"):
            zerostart.verify(f"{address}/saved")


def resave(source: str, out: str) -> None:
    zerostart.save(zerostart.load(source, engine="fsdp2", progress=False), out)


@pytest.mark.slow
def test_missing_directories_are_errors(url: str) -> None:
    with pytest.raises(CheckpointNotFoundError, match="no directory of that name"):
        open_catalog(f"{url}/absent")
    with pytest.raises(CheckpointNotFoundError, match="this needs files of this machine"):
        zerostart.load_pipeline(url)


def test_url_without_a_slash_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for url in (Path("s3://bucket/x"), "s3:/bucket/x"):
        for call in (
            open_catalog,
            zerostart.verify,
            lambda path: zerostart.save(torch.nn.Linear(1, 1), path),
        ):
            with pytest.raises(ConfigError, match=r"give the text 's3://bucket/x'"):
                call(url)
    with pytest.raises(ConfigError, match="https://NAME"):
        open_catalog("https://")
    assert not any(tmp_path.iterdir())
    (tmp_path / "s3:").mkdir()
    save(tmp_path / "s3:" / "x.safetensors")
    assert open_catalog(Path("s3://x.safetensors")).tensors


@pytest.mark.slow
def test_credentials_in_a_url_are_sent_and_not_printed(tmp_path: Path) -> None:
    save(tmp_path / "model.safetensors")
    with servers.rclone(tmp_path, "webdav", "--user", "me", "--pass", "se cret") as address:
        server = address.removeprefix("http://")
        assert open_catalog(f"http://me:se%20cret@{server}").tensors
        with pytest.raises(ReadError, match="give credentials") as caught:
            open_catalog(f"http://me:wrong@{server}/model.safetensors")
        assert "wrong" not in str(caught.value)
    cases: tuple[tuple[str, type[Exception]], ...] = (
        (f"http://me:wrong@{server}", ReadError),
        ("s3://me:wrong@bucket/x", ConfigError),
        ("htps://me:wrong@server/x", ConfigError),
    )
    for url, error in cases:
        with pytest.raises(error) as caught:
            open_catalog(url)
        assert "wrong" not in str(caught.value)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[proxy.Proxy]:
    save(tmp_path / "model.safetensors")
    with (
        servers.rclone(tmp_path, "webdav") as address,
        proxy.serve_proxy(proxy.Proxy(address)) as proxy_server,
    ):
        yield proxy_server


def content(address: str) -> bytes:
    catalog = open_catalog(f"{address}/model.safetensors")
    buffer = bytearray(catalog.sizes[0])
    with catalog.storage.reader() as reader:
        reader.read(0, 0, [memoryview(buffer)])
    return bytes(buffer)


@pytest.mark.slow
@pytest.mark.parametrize("fault", [429, 500, 503, "reset", "short"])
def test_temporary_faults_are_retried(store: proxy.Proxy, tmp_path: Path, fault: proxy.Fault) -> None:
    """Each range is refused or broken off twice."""
    ranges = itertools.count()
    store.fault = lambda method, path, number: fault if method == "GET" and next(ranges) % 3 else None
    assert content(store.address) == (tmp_path / "model.safetensors").read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("status", "words"),
    [(416, "416"), (403, "give credentials"), (400, "400")],
)
def test_permanent_faults_are_raised_at_once(store: proxy.Proxy, status: int, words: str) -> None:
    catalog = open_catalog(f"{store.address}/model.safetensors")
    count = len(store.requests)
    store.fault = lambda method, path, number: status
    message = rf"model\.safetensors at offset 7 failed: .*{words}"
    with pytest.raises(ReadError, match=message), catalog.storage.reader() as reader:
        reader.read(0, 7, [memoryview(bytearray(9))])
    assert len(store.requests) == count + 1


@pytest.mark.slow
def test_change_during_a_load_is_one_error_on_all_ranks(store: proxy.Proxy, tmp_path: Path) -> None:
    """Replace the object after its header was read."""
    data = tmp_path / "model.safetensors"
    before = data.read_bytes()

    def replace(method: str, path: str, number: int) -> None:
        # The header takes two ranges; replace the object before the next ones.
        if sum(verb == "GET" for verb, _ in store.requests) > 2 and data.read_bytes() == before:
            new = tmp_path / "new"
            new.write_bytes(before[:-1] + b"x")
            os.utime(new, (1, 1))
            new.replace(data)

    store.fault = replace
    messages = run_ranks(load_changed, 2, f"{store.address}/model.safetensors")
    assert messages[0] == messages[1]
    assert "model.safetensors was changed since the checkpoint was opened" in messages[0]


def load_changed(source: str) -> str:
    with pytest.raises(ReadError) as caught:
        zerostart.load(source, model=Net, engine="fsdp2", progress=False)
    return str(caught.value)


def test_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(ConfigError, match=r"pip install 'zerostart\[stores\]'"):
        open_catalog("gs://nobody-has-been-here/model")


@pytest.mark.slow
@pytest.mark.parametrize(
    "url",
    [
        *(f"{scheme}://KEY:SECRET@bucket/x" for scheme in ("s3", "gs", "az", "nobody")),
        *(f"{scheme}://KEY:SECRET@127.0.0.1:9/x" for scheme in ("http", "https", "ftp", "sftp", "peer")),
        "http://127.0.0.1:9/x?signature=SECRET",
    ],
)
def test_no_error_repeats_a_secret(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from zerostart.checkpoint.storage import object_store
    from zerostart.checkpoint.storage.upload import StoreDirectory

    monkeypatch.setattr(object_store, "RETRIES", 0)
    for call in (open_catalog, zerostart.verify, StoreDirectory.at):
        with pytest.raises(ZerostartError) as caught:
            call(url)
        assert "SECRET" not in str(caught.value)
