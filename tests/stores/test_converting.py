"""Conversions to a store are what conversions to a directory are, byte for byte: all is there, or nothing."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import zerostart
from tests.ranks import run_ranks
from tests.stores import proxy, servers
from tests.stores.killed import worker
from tests.trained import config, write_deepspeed
from zerostart.checkpoint.source import open_catalog
from zerostart.checkpoint.storage import uploads_at
from zerostart.errors import CheckpointError, CheckpointNotFoundError, ConfigError
from zerostart.state.converting.contents import Contents, opened
from zerostart.state.converting.convert import convert

pytestmark = pytest.mark.skipif(not servers.has("weed"), reason="SeaweedFS is not installed")
PLACE = f"s3://{servers.BUCKET}/converted"


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    with servers.s3("weed") as found:
        yield found


@pytest.fixture(autouse=True)
def surroundings(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in servers.environment(endpoint).items():
        monkeypatch.setenv(name, value)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One of some 19 MB, so that files have several parts of 8 MiB."""
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("model")
    sizes = {"vocab_size": 4000, "hidden_size": 512, "intermediate_size": 1500, "num_key_value_heads": 2}
    torch.manual_seed(1)
    config = LlamaConfig(**sizes, num_hidden_layers=2, num_attention_heads=4)
    LlamaForCausalLM(config).bfloat16().save_pretrained(folder)
    (folder / "__init__.py").touch()  # the code of a model may have such a file
    return folder


def files(url: str, endpoint: str) -> dict[str, bytes]:
    """All objects at a URL but the document, in which moments and names of the save are."""
    uploads = uploads_at(url)
    assert uploads is not None
    assert uploads.unfinished() == []
    key = url.removeprefix(f"s3://{servers.BUCKET}/")
    bucket = servers.store(endpoint)
    names = uploads.listed().keys() - {"zerostart.json"}
    return {name: bytes(bucket.get(f"{key}/{name}").bytes()) for name in names}


def local(folder: Path) -> dict[str, bytes]:
    found = {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    found.pop("zerostart.json", None)
    return found


def at_once(own: dict[str, str], source: str, url: str) -> tuple[str, ...]:
    os.environ.update(own)
    return convert(source, url, "hf", max_shard_size="12MB").files


def check_alike(model: Path, to: str, endpoint: str, folder: Path) -> None:
    convert(model, folder / to, to)
    convert(model, f"{PLACE}/{to}", to)
    assert files(f"{PLACE}/{to}", endpoint) == local(folder / to), to


def test_what_is_uploaded_is_what_is_written(model: Path, endpoint: str, tmp_path: Path) -> None:
    check_alike(model, "dcp", endpoint, tmp_path)
    with pytest.raises(ConfigError, match="is there already"):
        convert(model, f"{PLACE}/dcp", "dcp")


@pytest.mark.slow
def test_other_formats_and_processes(model: Path, endpoint: str, tmp_path: Path) -> None:
    for to in ("universal", "zero", "original"):
        check_alike(model, to, endpoint, tmp_path)
    # By two processes, which take files in turn.
    url = f"{PLACE}/hf"
    own = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    run_ranks(at_once, 2, own, str(model), url)
    convert(model, tmp_path / "hf", "hf", max_shard_size="12MB")
    assert files(url, endpoint) == local(tmp_path / "hf")
    zerostart.verify(url)


def alike(url: str, folder: Path, out: Path) -> Contents:
    """What lies at a URL is what lies in a directory, and becomes the same files in each format."""
    stored, here = (opened(place) for place in (url, folder))
    for name in ("weights", "masters", "states"):
        there, own = ({**getattr(one, name)} for one in (stored, here))
        assert there == own, name
    for name in ("numbers", "groups", "ties", "buffers", "computing", "scale", "counters", "schedule"):
        assert getattr(stored, name) == getattr(here, name), name
    for to in ("hf", "dcp"):
        made = [convert(place, out / kind / to, to) for kind, place in (("url", url), ("disk", folder))]
        assert made[0].tensors == made[1].tensors > 0
        assert local(out / "url" / to) == local(out / "disk" / to), to
    return stored


@pytest.mark.parametrize("to", ["dcp", "zero", pytest.param("universal", marks=pytest.mark.slow)])
def test_shares_of_ranks_are_read_from_a_url(to: str, model: Path, endpoint: str, tmp_path: Path) -> None:
    """By ranges alone: less is read than the files have, and nothing is written beside."""
    convert(model, tmp_path / "made", to, world_size=2)
    prefix = f"sources/{to}"
    servers.upload(tmp_path / "made", endpoint, prefix)
    url = f"s3://{servers.BUCKET}/{prefix}"
    with proxy.before(proxy.Proxy(endpoint)) as line, servers.environed(servers.environment(line.address)):
        catalog = open_catalog(url)
        assert catalog.nbytes > 19_000_000
        assert sum(line.sent_of.values()) < catalog.nbytes / 2
        assert zerostart.diff(url, model).same == (to == "dcp")
    alike(url, tmp_path / "made", tmp_path / "out")
    # Not every file is needed: a universal checkpoint may be without its optimizer's groups.
    needed = next(file for file in catalog.files if file.endswith((".distcp", "model_states.pt")))
    servers.store(endpoint).delete(needed.partition(f"{servers.BUCKET}/")[2])
    with pytest.raises((CheckpointError, CheckpointNotFoundError), match=r"missing|no such file"):
        open_catalog(url)


def loaded(own: dict[str, str], source: str) -> tuple[dict[str, str], bool]:
    os.environ.update(own)
    model = zerostart.load(source, engine="fsdp2", progress=False)
    report = zerostart.report(model)
    return zerostart.digest(model), report.read_bytes == report.planned_bytes


@pytest.mark.slow
def test_shares_of_ranks_are_loaded_from_a_url(model: Path, endpoint: str, tmp_path: Path) -> None:
    own = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    for to in ("dcp", "zero"):
        convert(model, tmp_path / to, to, world_size=3)
        servers.upload(tmp_path / to, endpoint, f"loaded/{to}")
        expected = run_ranks(loaded, 1, own, str(tmp_path / to))[0]
        assert run_ranks(loaded, 2, own, f"s3://{servers.BUCKET}/loaded/{to}") == [expected] * 2


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 3])
def test_what_others_have_trained_is_converted_from_a_url(stage: int, endpoint: str, tmp_path: Path) -> None:
    """Checkpoints of DeepSpeed's own and of torch's: masters, moments, steps and groups."""
    run_ranks(write_deepspeed, 2, str(tmp_path / "zero"), stage, True, True, True, timeout=400)
    config(True).save_pretrained(tmp_path / "zero")
    servers.upload(tmp_path / "zero", endpoint, f"trained/zero-{stage}")
    url = f"s3://{servers.BUCKET}/trained/zero-{stage}"
    found = alike(url, tmp_path / "zero", tmp_path / "out")
    assert {"exp_avg", "exp_avg_sq"} <= found.states.keys()
    assert found.groups
    assert found.numbers["step"]
    for place in (url, tmp_path / "zero"):
        convert(place, tmp_path / f"universal-{place == url}", "universal")
    assert local(tmp_path / "universal-True") == local(tmp_path / "universal-False")
    # And from what that was converted to, optimizer states too.
    servers.upload(tmp_path / "out/url/dcp", endpoint, f"trained/dcp-{stage}")
    again = alike(f"s3://{servers.BUCKET}/trained/dcp-{stage}", tmp_path / "out/disk/dcp", tmp_path / "more")
    assert again.states.keys() == found.states.keys()


CONVERTING = """
import sys
import torch
torch.set_num_threads(1)
from zerostart.state.converting.convert import convert
import botocore.session, transformers
source, place = sys.argv[1:3]
def work(which):
    convert(source, place, "dcp")
"""
#: The requests at which a conversion is killed are dealt to so many tests.
PARTS = 6


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("part", range(PARTS))
def test_killed_at_every_request_in_turn(part: int, model: Path, endpoint: str, tmp_path: Path) -> None:
    """All is there, or nothing that a reader goes by, and the next one leaves nothing of a killed one."""
    place = f"{PLACE}/killed-{part}"
    key = place.removeprefix(f"s3://{servers.BUCKET}/")
    convert(model, tmp_path / "whole", "dcp")
    expected, bucket = local(tmp_path / "whole"), servers.store(endpoint)
    uploads = uploads_at(place)
    assert uploads is not None
    with worker(CONVERTING, [str(model), place], endpoint) as converting:
        at, was_killed, seen = part, True, set()
        while was_killed:
            was_killed = converting.killed(at)
            whole = ".metadata" in uploads.listed()
            assert whole or was_killed
            seen.add(whole)
            if whole:
                there = {
                    name: data for name, data in files(place, endpoint).items() if ".zerostart" not in name
                }
                assert there == expected, at
                # Whoever converts beside clears up, and leaves what is whole.
                convert(model, f"{PLACE}/beside-{part}-{at}", "dcp")
            else:
                assert converting.done(), at
            assert files(place, endpoint) == expected, at
            for name in uploads.listed():
                bucket.delete(f"{key}/{name}")
            at += PARTS
    assert seen == {True, False}
    assert at > 2 * PARTS
