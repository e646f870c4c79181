"""A URL of a directory is a source as a local directory is, and faults of a store are lived with or told."""

import filecmp
import itertools
import json
import os
import random
import select
import signal
import subprocess
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
    CheckpointError,
    CheckpointNotFoundError,
    ConfigError,
    ReadError,
    VerifyError,
    ZerostartError,
)
from zerostart.state.converting.convert import Converted
from zerostart.state.resuming.background import Saving
from zerostart.state.saving.save import SaveReport
from zerostart.testing.net import Net, save
from zerostart.transfer.meter import PeakMeter


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of transformers in several shards, with an index and a file of code."""
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
    """By names where the server has no lists, and by a list."""
    with servers.rclone(model.parent, request.param) as address:
        yield f"{address}/some%20model"


@pytest.mark.slow
def test_it_is_what_the_local_directory_is(url: str, model: Path) -> None:
    catalog, local = open_catalog(url), open_catalog(model)
    assert catalog.tensors == local.tensors
    assert [Path(file).name for file in catalog.files] == [Path(file).name for file in local.files]
    assert Path(catalog.root, "config.json").read_bytes() == (model / "config.json").read_bytes()
    assert Path(catalog.root, "tokenizer.json").exists()
    assert zerostart.diff(url, model).same
    # One of its files, too, with the configuration beside it.
    one = open_catalog(f"{url}/{Path(local.files[0]).name}")
    assert len(one.files) == 1
    assert Path(one.root, "config.json").exists()


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_load_is_that_of_the_local_directory(url: str, model: Path, world_size: int) -> None:
    expected = run_ranks(digests, 1, str(model))[0]
    assert run_ranks(digests, world_size, url) == [expected] * world_size


def digests(source: str) -> dict[str, str]:
    model = zerostart.load(source, engine="fsdp2", progress=False)
    report = zerostart.report(model)
    assert report.read_bytes == report.planned_bytes
    return zerostart.digest(model)


@pytest.mark.slow
def test_a_saved_directory_is_verified_where_it_lies(model: Path, tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    run_ranks(resave, 1, str(model), str(saved))
    with servers.rclone(tmp_path, "http") as address:
        assert zerostart.verify(f"{address}/saved") == zerostart.verify(saved)
        with pytest.raises(SystemExit) as ended:
            main(["verify", f"{address}/saved"])
        assert not ended.value.code
        file = next(saved.glob("*.safetensors"))
        file.write_bytes(file.read_bytes()[:-1] + b"x")
        with pytest.raises(VerifyError, match=r"tensor .* has other contents"):
            zerostart.verify(f"{address}/saved")


def resave(source: str, out: str) -> None:
    zerostart.save(zerostart.load(source, engine="fsdp2", progress=False), out)


@pytest.mark.slow
def test_a_rehearsal_is_compared_with_a_whole_copy(url: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "zerostart", "load", url, "--nproc", "1", "--verify", "--engine", "fsdp2"],
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert "every element equals" in done.stdout, done.stderr


@pytest.mark.slow
def test_what_is_not_there_is_told(url: str) -> None:
    with pytest.raises(CheckpointNotFoundError, match="no directory of that name"):
        open_catalog(f"{url}/absent")
    with pytest.raises(CheckpointNotFoundError, match="this needs files of this machine"):
        zerostart.load_pipeline(url)


def test_a_url_that_has_lost_a_slash_is_no_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for lost in (Path("s3://bucket/x"), "s3:/bucket/x"):
        for call in (
            open_catalog,
            zerostart.verify,
            lambda path: zerostart.save(torch.nn.Linear(1, 1), path),
        ):
            with pytest.raises(ConfigError, match=r"give the text 's3://bucket/x'"):
                call(lost)
    with pytest.raises(ConfigError, match="https://NAME"):
        open_catalog("https://")
    assert not any(tmp_path.iterdir())
    (tmp_path / "s3:").mkdir()
    save(tmp_path / "s3:" / "x.safetensors")
    assert open_catalog(Path("s3://x.safetensors")).tensors


@pytest.mark.slow
def test_why_a_server_is_not_reached_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where, through a proxy too; and of a certificate that nobody trusts what to give, at once."""
    from zerostart.checkpoint.storage import object_store

    monkeypatch.setattr(object_store, "RETRIES", 0)
    with pytest.raises(ReadError, match=r"127\.0\.0\.1:9: Connection refused"):
        open_catalog("http://127.0.0.1:9/x")
    save(tmp_path / "model.safetensors")
    key, certificate = tmp_path / "key", tmp_path / "certificate"
    made = ["-keyout", str(key), "-out", str(certificate), "-subj", "/CN=127.0.0.1", "-days", "1"]
    more = ["-addext", "subjectAltName=IP:127.0.0.1", "-addext", "basicConstraints=critical,CA:FALSE"]
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", *made, *more],
        check=True,
        capture_output=True,
    )
    with servers.rclone(tmp_path, "webdav", "--cert", str(certificate), "--key", str(key)) as address:
        url = address.replace("http://", "https://")
        with pytest.raises(ReadError, match=r"certificate: UnknownIssuer\); give .* SSL_CERT_FILE=FILE"):
            open_catalog(url)
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        assert open_catalog(url).tensors


@pytest.mark.slow
def test_names_in_an_index_lead_to_what_lies_below_it(tmp_path: Path) -> None:
    """However they are spelled, and beside an empty file, of which no range can be asked for."""
    save(tmp_path / "x.safetensors")
    (tmp_path / "merges.txt").touch()
    index = tmp_path / "model.safetensors.index.json"
    with servers.rclone(tmp_path, "http") as address:
        for file in ("x.safetensors", "./x.safetensors"):
            index.write_text(json.dumps({"weight_map": {"scale": file}}))
            catalog = open_catalog(f"{address}/{index.name}")
            assert catalog.tensors
            assert Path(catalog.root, "merges.txt").read_bytes() == b""
        index.write_text('{"weight_map": {"a": "../x.safetensors"}}')
        with pytest.raises(CheckpointError, match="outside the checkpoint's directory"):
            open_catalog(f"{address}/{index.name}")


@pytest.mark.slow
def test_files_beside_weights_are_bounded_together(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """In memory, and those that no library looks for on the disk as well."""
    save(tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    lengths = {"vocab.txt": 100, "a.txt": 90, "b.txt": 80, "c.txt": 70, "d.txt": 60, "e.py": 0}
    for name, length in lengths.items():
        with (tmp_path / name).open("wb") as file:
            file.write(name.encode())
            file.truncate((length << 20) + 5)
    with servers.rclone(tmp_path, "webdav") as address, PeakMeter(torch.device("cpu")) as meter:
        root = Path(open_catalog(address).root)
    assert {file.name for file in root.iterdir()} == {"config.json", *lengths} - {"a.txt"}
    assert "1 files beside the weights are not fetched, a.txt among them" in caplog.text
    for name in ("vocab.txt", "d.txt", "e.py"):
        assert filecmp.cmp(root / name, tmp_path / name, shallow=False)
    assert meter.host_bytes < 150 << 20
    assert [place.name for place in root.parent.iterdir()] == [root.name]


@pytest.mark.slow
def test_a_name_and_password_of_a_url_are_sent_and_never_told(tmp_path: Path) -> None:
    """Nor is what a store says that was signed."""
    from zerostart.checkpoint.storage.object_store import error_text

    document = "<Error><Code>No</Code><Message>Not so.</Message><StringToSign>a token</StringToSign></Error>"
    assert error_text(Exception(f"403 Forbidden: <?xml?>\n{document}")) == "403 Forbidden: No: Not so."
    save(tmp_path / "model.safetensors")
    with servers.rclone(tmp_path, "webdav", "--user", "me", "--pass", "se cret") as address:
        server = address.removeprefix("http://")
        assert open_catalog(f"http://me:se%20cret@{server}").tensors
        with pytest.raises(ReadError, match="give credentials") as caught:
            open_catalog(f"http://me:wrong@{server}/model.safetensors")
        assert "wrong" not in str(caught.value)
    asked: tuple[tuple[str, type[Exception]], ...] = (
        (f"http://me:wrong@{server}", ReadError),
        ("s3://me:wrong@bucket/x", ConfigError),
        ("htps://me:wrong@server/x", ConfigError),
    )
    for url, error in asked:
        with pytest.raises(error) as caught:
            open_catalog(url)
        assert "wrong" not in str(caught.value)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[proxy.Proxy]:
    save(tmp_path / "model.safetensors")
    with (
        servers.rclone(tmp_path, "webdav") as address,
        proxy.before(proxy.Proxy(address)) as made,
    ):
        yield made


def content(address: str) -> bytes:
    catalog = open_catalog(f"{address}/model.safetensors")
    buffer = bytearray(catalog.sizes[0])
    with catalog.storage.reader() as reader:
        reader.read(0, 0, [memoryview(buffer)])
    return bytes(buffer)


@pytest.mark.slow
@pytest.mark.parametrize("fault", [429, 500, 503, "reset", "short"])
def test_faults_that_pass_are_outlived(store: proxy.Proxy, tmp_path: Path, fault: proxy.Fault) -> None:
    """Each range is refused, or breaks off, twice."""
    ranges = itertools.count()
    store.fault = lambda method, path, number: fault if method == "GET" and next(ranges) % 3 else None
    assert content(store.address) == (tmp_path / "model.safetensors").read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("status", "words"),
    [(416, "416"), (403, "give credentials"), (400, "400")],
)
def test_faults_that_stay_are_told_at_once(store: proxy.Proxy, status: int, words: str) -> None:
    catalog = open_catalog(f"{store.address}/model.safetensors")
    before = len(store.asked)
    store.fault = lambda method, path, number: status
    told = rf"model\.safetensors at offset 7 failed: .*{words}"
    with pytest.raises(ReadError, match=told), catalog.storage.reader() as reader:
        reader.read(0, 7, [memoryview(bytearray(9))])
    assert len(store.asked) == before + 1


@pytest.mark.slow
def test_a_url_for_one_file_alone_is_enough(store: proxy.Proxy) -> None:
    """As a signed one is: what may lie beside the file is refused."""
    store.fault = lambda method, path, number: None if path.endswith("/model.safetensors") else 403
    catalog = open_catalog(f"{store.address}/model.safetensors")
    assert len(catalog.files) == 1
    assert catalog.tensors
    with pytest.raises(ReadError, match=r"403|credentials"):
        open_catalog(f"{store.address}/nothing")


@pytest.mark.slow
def test_a_change_in_the_middle_of_a_load_is_one_error_on_all_ranks(
    store: proxy.Proxy, tmp_path: Path
) -> None:
    """The object is replaced, with one as long, after its header was read."""
    data = tmp_path / "model.safetensors"
    before = data.read_bytes()

    def replace(method: str, path: str, number: int) -> None:
        # The header takes two ranges; from the next one on, or two at once, it is another object.
        if sum(asked == "GET" for asked, _ in store.asked) > 2 and data.read_bytes() == before:
            new = tmp_path / "new"
            new.write_bytes(before[:-1] + b"x")
            os.utime(new, (1, 1))
            new.replace(data)

    store.fault = replace
    told = run_ranks(failing, 2, f"{store.address}/model.safetensors")
    assert told[0] == told[1]
    assert "model.safetensors was changed since the checkpoint was opened" in told[0]


@pytest.mark.slow
def test_a_server_that_knows_no_lists_may_say_so_in_any_way(store: proxy.Proxy) -> None:
    store.fault = lambda method, path, number: 404 if method == "PROPFIND" else None
    assert open_catalog(store.address).tensors


@pytest.mark.slow
def test_a_process_that_was_forked_after_a_store_was_asked_is_told(store: proxy.Proxy) -> None:
    """In it the library would wait for ever for threads that it has not."""
    assert open_catalog(store.address).tensors
    told, tells = os.pipe()
    if (child := os.fork()) == 0:
        try:
            open_catalog(store.address)
        except ConfigError as error:
            os.write(tells, str(error).encode())
        finally:
            os._exit(0)
    os.close(tells)
    with os.fdopen(told, "rb") as words:
        # A child that waits for ever has nothing to say, and goes.
        ready, _, _ = select.select([words], [], [], 20)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        assert ready
        assert b"forked" in words.read()


def failing(source: str) -> str:
    with pytest.raises(ReadError) as caught:
        zerostart.load(source, model=Net, engine="fsdp2", progress=False)
    return str(caught.value)


@pytest.mark.slow
def test_gaps_between_rows_are_read_through_where_they_are_cheap(store: proxy.Proxy, tmp_path: Path) -> None:
    """One request for rows that lie near each other."""
    from zerostart.checkpoint.storage import Rows

    storage = open_catalog(f"{store.address}/model.safetensors").storage
    before, choice = len(store.asked), random.Random(3)
    whole, target = (tmp_path / "model.safetensors").read_bytes(), bytearray(70)
    offset = choice.randrange(100)
    with storage.reader() as reader:
        reader.gather(0, offset, Rows(5, 6, 40), memoryview(target), 14)
    assert len(store.asked) == before + 1
    for row in range(5):
        begin = offset + 40 * row
        assert target[14 * row : 14 * row + 6] == whole[begin : begin + 6]


def test_a_library_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(ConfigError, match=r"pip install 'zerostart\[stores\]'"):
        open_catalog("gs://nobody-has-been-here/model")


def test_a_profile_gives_keys_region_and_endpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from zerostart.checkpoint.storage.object_store import _aws_profile

    (tmp_path / "config").write_text("[profile lab]\nregion = us-west-2\nendpoint_url = http://store:9000\n")
    (tmp_path / "credentials").write_text("[lab]\naws_access_key_id = one\naws_secret_access_key = two\n")
    given = {
        "AWS_CONFIG_FILE": str(tmp_path / "config"),
        "AWS_SHARED_CREDENTIALS_FILE": str(tmp_path / "credentials"),
        "AWS_PROFILE": "lab",
    }
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    found = _aws_profile(given)
    provider = found["credential_provider"]
    assert (found["endpoint"], found["region"]) == ("http://store:9000", "us-west-2")
    assert (provider()["access_key_id"], provider()["secret_access_key"]) == ("one", "two")
    assert _aws_profile({**given, "AWS_ACCESS_KEY_ID": "three"}) == {}
    monkeypatch.setenv("AWS_PROFILE", "absent")
    with pytest.raises(ConfigError, match="ProfileNotFound"):
        _aws_profile(given)


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
        with pytest.raises(ZerostartError) as raised:
            call(url)
        assert "SECRET" not in str(raised.value)


@pytest.mark.slow
def test_no_report_and_no_error_of_any_kind_has_a_password() -> None:
    url = "http://me:SECRET@server/model"
    save = SaveReport(url, (), (), 0, 0, 0.0, {}, {})
    assert (save.path, eval(repr(save)).path) == (url, "http://server/model")
    for told in (save, Converted(url, (), 0, 0), Saving(_place=url), ZerostartError(f"{url}: no")):
        assert "SECRET" not in f"{told!r} {told}"
