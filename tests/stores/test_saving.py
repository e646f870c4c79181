"""Saves to a store are what saves to a directory are: whole or not at all, whatever fails on the way."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import zerostart
from tests.ranks import run_ranks
from tests.stores import proxy, servers
from tests.stores.killed import worker
from tests.training.conftest import tokenizer_path as tokenizer_path
from tests.training.loop.test_resumed_runs import going_on, interrupted
from tests.training.loop.test_run import losses, run
from tests.training.loop.test_run import values as values
from zerostart.checkpoint.source import open_catalog
from zerostart.checkpoint.storage import uploads_at
from zerostart.checkpoint.verifying import file_digests
from zerostart.checkpoint.write import notes
from zerostart.checkpoint.write.objects import ObjectStaging, part_length
from zerostart.checkpoint.write.parts import PartUploader
from zerostart.checkpoint.write.shards import plan_shards
from zerostart.errors import CheckpointNotFoundError, ConfigError, WriteError

PLACE = f"s3://{servers.BUCKET}/run"
pytestmark = pytest.mark.skipif(not servers.has("weed"), reason="SeaweedFS is not installed")


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    with servers.s3("weed") as found:
        yield found


@pytest.fixture(autouse=True)
def surroundings(
    endpoint: str, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
    for name, value in servers.environment(endpoint).items():
        monkeypatch.setenv(name, value)
    bucket = servers.store(endpoint)
    for batch in bucket.list("run"):
        for one in batch:
            bucket.delete(one["path"])


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Two models of transformers of one architecture, of some 40 MB: several parts of 8 MiB."""
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("models")
    sizes = {"vocab_size": 4000, "hidden_size": 512, "intermediate_size": 1500, "num_key_value_heads": 2}
    config = LlamaConfig(**sizes, num_hidden_layers=2, num_attention_heads=4)
    for seed in (1, 2):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
        model.save_pretrained(folder / str(seed), max_shard_size="20MB")
        (folder / str(seed) / "tokenizer.json").write_text("{}")
    return [str(folder / "1"), str(folder / "2")]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Two models of some 2 MB, for saves by the dozen."""
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("small")
    sizes = {"vocab_size": 500, "hidden_size": 128, "intermediate_size": 256, "num_key_value_heads": 2}
    for seed in (1, 2):
        torch.manual_seed(seed)
        config = LlamaConfig(**sizes, num_hidden_layers=2, num_attention_heads=4)
        LlamaForCausalLM(config).save_pretrained(folder / str(seed))
    return [str(folder / "1"), str(folder / "2")]


def on(function: Callable[..., Any], ranks: int, *arguments: Any) -> list[Any]:
    """Call ``function`` on ranks, with the surroundings of this moment: they are of a server's that began."""
    own = {name: value for name, value in os.environ.items() if name.startswith(("AWS_", "XDG_"))}
    return run_ranks(surrounded, ranks, own, function, *arguments, timeout=280)


def surrounded(own: dict[str, str], function: Callable[..., Any], *arguments: Any) -> Any:
    os.environ.update(own)
    return function(*arguments)


def names(place: str = PLACE) -> dict[str, int]:
    uploads = uploads_at(place)
    assert uploads is not None
    return {name: one.size for name, one in uploads.listed().items()}


def left_over(place: str = PLACE) -> list[str]:
    """What is in a place and belongs to nothing that is saved there."""
    uploads = uploads_at(place)
    assert uploads is not None
    found = uploads.listed()
    named = {"zerostart.json", "state.json"} & found.keys()
    listed = set(named)
    for marker in named:
        listed |= set(json.loads((uploads.read(marker) or (b"", ""))[0])["files"])
    return sorted(found.keys() - listed) + [one.name for one in uploads.unfinished()]


def files_digests(source: str) -> dict[str, str]:
    return file_digests(open_catalog(source))


def sharded(source: str, place: str) -> None:
    zerostart.save(zerostart.load(source, engine="fsdp2", progress=False), place, max_shard_size="20MB")


def again(first: str, second: str, place: str, local: str) -> None:
    """Save one model over another: in shards, in a single file, in shards, and of fp16."""
    models = [zerostart.load(one, engine="fsdp2", progress=False) for one in (first, second)]
    rank = torch.distributed.get_rank()
    for number, (model, how) in enumerate(
        (
            (models[0], {"max_shard_size": "20MB"}),
            (models[1], {"max_shard_size": "20MB"}),
            (models[0], {"max_shard_size": "5GB"}),
            (models[1], {"max_shard_size": "20MB", "memory_limit": 64 << 20}),
            (models[0], {"dtype": torch.float16}),
        )
    ):
        for path in (place, f"{local}/{number}"):
            report = zerostart.save(model, path, **how)  # type: ignore[arg-type]
        if rank == 0:
            # Each step is what the same save to a directory is, bit for bit.
            assert files_digests(place) == files_digests(f"{local}/{number}")
            assert zerostart.verify(place).tensors == zerostart.verify(f"{local}/{number}").tensors
            assert left_over(place) == []
            assert set(report.files) <= names(place).keys() | {f.name for f in Path(local).rglob("*")}
        torch.distributed.barrier()


def test_a_save_over_another_is_what_a_local_one_is(models: list[str], tmp_path: Path) -> None:
    on(again, 2, *models, PLACE, str(tmp_path))
    # And it loads, with its configuration and tokenizer, on another number of ranks.
    found = on(loaded, 1, PLACE)[0]
    assert found == on(loaded, 1, f"{tmp_path}/4")[0]
    assert {"config.json", "tokenizer.json", "model.safetensors"} <= names().keys()


def loaded(source: str) -> dict[str, str]:
    return zerostart.digest(zerostart.load(source, engine="fsdp2", progress=False))


def trained(source: str, place: str, wait: bool) -> list[Any]:
    """Save states to a place, go back to the first, and compare; the directory is the oracle."""
    from zerostart.state.resuming.retention import complete, prune

    model = zerostart.load(source, engine="fsdp2", progress=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    tokens = torch.arange(16).reshape(1, 16)

    def step() -> float:
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss)

    step()
    digests = zerostart.digest(model)
    for number in (1, 2, 3):
        zerostart.save_state(f"{place}/step-{number}", model, optimizer, {"step": number}, wait=wait).wait()
    expected = [step(), step()]
    assert zerostart.load_state(f"{place}/step-2", model, optimizer) == {"step": 2}
    assert zerostart.digest(model) == digests
    assert [step(), step()] == expected
    # Over the one that is there.
    zerostart.save_state(f"{place}/step-3", model, optimizer, {"step": 5}, wait=wait).wait()
    found: list[Any] = [zerostart.digest(model)]
    if torch.distributed.get_rank() == 0:
        assert len(complete(place)) == 3
        removed = prune(place, 2)
        assert [str(path) for path in removed] == [f"{place}/step-1"]
        found.append(zerostart.verify(f"{place}/step-3").tensors)
    torch.distributed.barrier()
    assert zerostart.diff(model, f"{place}/step-3").same
    return found


@pytest.mark.slow
def test_training_states(models: list[str], tmp_path: Path) -> None:
    found = on(trained, 2, models[0], f"{PLACE}/states", False)[0]
    # The model of a state is a directory by itself, and the state is a source of it as well.
    assert (
        files_digests(f"{PLACE}/states/step-3/model") == found[0] == files_digests(f"{PLACE}/states/step-3")
    )
    difference = zerostart.diff(f"{PLACE}/states/step-2", f"{PLACE}/states/step-3")
    assert difference.differing
    assert not difference.only_a
    for number in (2, 3):
        assert left_over(f"{PLACE}/states/step-{number}") == []
    assert not any(name.startswith("states/step-1/") for name in names())
    with pytest.raises(CheckpointNotFoundError):
        zerostart.load_state(f"{PLACE}/states/step-1", torch.nn.Linear(1, 1))
    # From files to files, and from a run's URL to a directory.
    from zerostart.state.converting.convert import export

    done = export(f"{PLACE}/states", f"{PLACE}/exported", dtype=torch.bfloat16, max_shard_size="10MB")
    assert len(done.files) > 1
    local = export(f"{PLACE}/states/step-3", tmp_path / "local", dtype=torch.bfloat16)
    assert files_digests(f"{PLACE}/exported") == files_digests(str(local.path))
    assert left_over(f"{PLACE}/exported") == []


@contextlib.contextmanager
def disturbed(endpoint: str, fault: Callable[[str, str, int], proxy.Fault]) -> Iterator[proxy.Proxy]:
    with (
        proxy.before(proxy.Proxy(endpoint, fault=fault)) as line,
        servers.environed(servers.environment(line.address)),
    ):
        yield line


def test_faults_are_lived_with(endpoint: str, models: list[str]) -> None:
    """Requests that are refused, that break off, and whose answers are lost: each is tried again."""

    def fault(method: str, path: str, number: int) -> proxy.Fault:
        if number % 7 == 3:
            return (503, "lost", "cut" if method == "PUT" else 500)[number // 7 % 3]
        return None

    with disturbed(endpoint, fault) as line:
        on(sharded, 2, models[0], PLACE)
        assert len(line.asked) > 30
    assert files_digests(PLACE) == files_digests(models[0])
    assert zerostart.verify(PLACE).tensors == len(files_digests(models[0]))
    assert left_over() == []


def refused(source: str, place: str) -> list[str]:
    """What each rank raises where the store takes no parts from the second rank."""
    model = zerostart.load(source, engine="fsdp2", progress=False)
    zerostart.save(model, place, max_shard_size="20MB")
    if torch.distributed.get_rank() == 1:
        os.environ["AWS_ENDPOINT_URL"] = "http://127.0.0.1:9"
        from zerostart.checkpoint.storage import s3_uploads

        s3_uploads.ATTEMPTS = 1
    with pytest.raises(WriteError) as raised:
        zerostart.save(model, place, max_shard_size="20MB")
    return [str(raised.value)]


def test_one_error_on_all_ranks_and_nothing_left(models: list[str]) -> None:
    found = on(refused, 2, models[0], PLACE)
    assert found[0] == found[1]
    assert "uploading part" in found[0][0]
    assert files_digests(PLACE) == files_digests(models[0])
    assert left_over() == []


def test_only_its_own_objects(models: list[str], endpoint: str) -> None:
    """Objects that somebody else has put there stay, and a newer one under the name of the switch counts."""
    from zerostart.state.converting.convert import export

    bucket = servers.store(endpoint)
    bucket.put("run/README.md", b"mine")
    bucket.put("run/data/model.bin", b"mine too")
    export(models[0], PLACE)
    export(models[1], PLACE, max_shard_size="20MB")
    assert bytes(bucket.get("run/README.md").bytes()) == b"mine"
    assert left_over() == ["README.md", "data/model.bin"]
    assert files_digests(PLACE) == files_digests(models[1])

    def fault(method: str, path: str, number: int) -> proxy.Fault:
        if method == "PUT" and path.endswith("model.safetensors.index.json"):
            bucket.put("run/model.safetensors.index.json", b"{}")
        return None

    with disturbed(endpoint, fault), pytest.raises(WriteError, match="somebody else saves"):
        export(models[0], PLACE, max_shard_size="10MB")
    assert bytes(bucket.get("run/model.safetensors.index.json").bytes()) == b"{}"


@pytest.mark.slow
def test_a_store_without_parts_for_several_processes(
    models: list[str], endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By obstore, as for gs:// and az://: each object is streamed by one rank, in bounded memory."""
    found = on(streamed, 2, *models, PLACE)
    assert found == [files_digests(models[0])] * 2
    assert left_over() == []


def streamed(first: str, second: str, place: str) -> dict[str, str]:
    import functools

    from zerostart.checkpoint.storage import by_obstore
    from zerostart.checkpoint.storage.obstore_uploads import ObstoreUploads

    root = f"s3://{servers.BUCKET}/"

    def uploads(url: str) -> ObstoreUploads:
        return ObstoreUploads(url, root=root, reach=functools.partial(by_obstore.writable, root))

    by_obstore.ObstoreFiles.uploads = uploads  # type: ignore[method-assign, assignment]
    one, other = (zerostart.load(source, engine="fsdp2", progress=False) for source in (first, second))
    for model, size in ((other, "20MB"), (one, "20MB"), (other, "5GB"), (one, "5GB")):
        zerostart.save(model, place, max_shard_size=size)
    return zerostart.digest(zerostart.load(place, engine="fsdp2", progress=False))


@contextlib.contextmanager
def uploading(place: str, value: float, shard: str) -> Iterator[ObjectStaging]:
    """A save that has uploaded two tensors, all of one value, and not yet completed its files."""
    uploads = uploads_at(place)
    assert uploads is not None
    staging = ObjectStaging(uploads)
    layout = plan_shards([("a", "F32", [512]), ("b", "F32", [512])], shard, "model")
    files = staging.begin_files(".", layout)
    upload = PartUploader(uploads, files, part_length(layout), 2)
    for number, file in enumerate(layout.files):
        content = file.header + torch.full(((file.size - len(file.header)) // 4,), value).numpy().tobytes()
        buffer = upload.buffer()
        buffer[: file.size] = content
        upload.put(number, 0, buffer, file.size)
        upload.end(number)
    staging.end_files(".", layout, upload.close())
    try:
        yield staging
    finally:
        staging.discard()


@pytest.mark.parametrize("shard", ["3KB", "5GB"])
def test_two_saves_to_one_place(shard: str) -> None:
    """Files of one length under the same names: each save has its own, also where the other is given up."""

    def values_there() -> set[float]:
        zerostart.verify(PLACE)
        return {float(value) for tensor in tensors_of(PLACE).values() for value in tensor}

    for order in (0, 1):
        with uploading(PLACE, 1.0, shard) as one, uploading(PLACE, 2.0, shard) as other:
            for staging, value in ((one, 1.0), (other, 2.0))[:: -1 if order else 1]:
                staging.complete({})
                assert values_there() == {value}
        assert left_over() == []
    for name in names():
        servers.store(os.environ["AWS_ENDPOINT_URL"]).delete(f"run/{name}")
    with uploading(PLACE, 1.0, shard) as one:
        with uploading(PLACE, 2.0, shard):
            pass
        one.complete({})
    assert values_there() == {1.0}
    assert left_over() == []


def tensors_of(place: str) -> dict[str, torch.Tensor]:
    from safetensors.torch import load

    uploads = uploads_at(place)
    assert uploads is not None
    document = json.loads((uploads.read("zerostart.json") or (b"{}", ""))[0])
    found = [uploads.read(name) for name in document["files"] if name.endswith(".safetensors")]
    return {name: tensor for one in found if one for name, tensor in load(one[0]).items()}


def test_a_save_that_was_taken_for_a_killed_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """It gave no sign for two minutes, and another machine has cleared it away; expect an error."""
    with uploading(PLACE, 1.0, "3KB") as one:
        with monkeypatch.context() as patch:
            patch.setattr(notes, "_is_here", lambda by: False)
            with uploading(PLACE, 2.0, "3KB") as other:
                other.complete({})
        with pytest.raises(WriteError, match="gave no sign of life"):
            one.complete({})
    zerostart.verify(PLACE)
    assert left_over() == []


BACKGROUND = """
import sys, torch, zerostart
zerostart.save_state(sys.argv[1], torch.nn.Linear(900, 900), extra={"step": 1}, wait=False)
"""


def test_a_program_waits_for_its_save(tmp_path: Path) -> None:
    """Its main thread ends while the save is under way; expect the state."""
    done = subprocess.run(
        [sys.executable, "-c", BACKGROUND, f"{PLACE}/state"], capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    assert zerostart.load_state(f"{PLACE}/state", torch.nn.Linear(900, 900)) == {"step": 1}


def test_places_that_nothing_would_find_again() -> None:
    """Stores and libraries make other names of these; expect an error before anything is made."""
    for place in ("a//b", "../a", "a/./b", "a\\b", "a\nb"):
        with pytest.raises(ConfigError, match="name another directory"):
            uploads_at(f"s3://{servers.BUCKET}/{place}")
    assert uploads_at(f"s3://{servers.BUCKET}/") is not None


SAVING = """
import sys
import torch
torch.set_num_threads(1)
import zerostart
import botocore.session, transformers
kind, first, second, place = sys.argv[1:5]
models = [zerostart.load(one, engine="fsdp2", progress=False) for one in (first, second)]
def work(which):
    if kind == "state":
        zerostart.save_state(place, models[int(which)], extra=which)
    else:
        zerostart.save(models[int(which)], place, max_shard_size="1MB" if kind == "shards" else "5GB")
"""
#: The requests at which a save is killed are dealt to so many tests.
PARTS = 4


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("kind", ["shards", "single", "state"])
def test_killed_at_every_request_in_turn(kind: str, part: int, endpoint: str, small: list[str]) -> None:
    """The old checkpoint is whole, or the new one, and the next save leaves nothing of the killed one."""
    place = f"{PLACE}/{kind}-{part}"
    old, new = (files_digests(model) for model in small)
    with worker(SAVING, [kind, *small, place], endpoint) as saving:
        assert saving.done("0")
        at, was_killed, seen = part, True, set()
        while was_killed:
            was_killed = saving.killed(at, "1")
            now = files_digests(place)
            assert now in (old, new), at
            assert now == new or was_killed
            seen.add(now == new)
            # Whoever saves next, on this machine, finds what is left.
            assert saving.done("0"), at
            assert files_digests(place) == old
            assert left_over(place) == [], at
            zerostart.verify(place)
            at += PARTS
    assert seen == {True, False}
    assert at > 2 * PARTS


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_run_saves_to_a_url_and_goes_on_from_there(
    ranks: int, checkpoints: Any, values: Any, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """On another machine, which has nothing of the run: its losses are those of a run that never stopped."""
    path, options = checkpoints("qwen3"), {"steps": 6}
    straight = on(run, ranks, values(path, "fsdp2", "straight", **options))[0]
    given = going_on(values(path, "fsdp2", **options), background=True)
    given["output"] = {"directory": PLACE}
    on(interrupted, ranks, given, 4)
    with servers.environed({"XDG_CACHE_HOME": str(tmp_path_factory.mktemp("elsewhere"))}):
        resumed = on(run, ranks, given)[0]
    assert resumed.directory == PLACE
    told = (uploads_at(PLACE).read("metrics.jsonl") or (b"", ""))[0]  # type: ignore[union-attr]
    found = [json.loads(line) for line in told.decode().splitlines()]
    assert [entry["loss"] for entry in found if "loss" in entry] == losses(straight)
    assert files_digests(PLACE) == files_digests(straight.directory)
    assert "checkpoints/step-00000006/state.json" in names()
    with pytest.raises(ConfigError, match="is not empty"):
        run({**given, "resume": None})
    with pytest.raises(ConfigError, match=r"output.overwrite is for a directory of a file system"):
        run({**given, "output": {"directory": PLACE, "overwrite": True}})


@pytest.mark.parametrize("shard", ["1MB", "5GB"])
def test_a_configuration_is_that_of_the_weights(
    shard: str, small: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the switch and what follows, and after a kill there; expect that of the new ones."""
    from zerostart.checkpoint.write import objects
    from zerostart.state.converting.convert import export

    newer = tmp_path / "newer"
    shutil.copytree(small[1], newer)
    config = json.loads((newer / "config.json").read_text())
    (newer / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 0.25}))

    def read() -> tuple[float, dict[str, str]]:
        catalog = open_catalog(PLACE)
        config = json.loads(Path(catalog.root, "config.json").read_text())
        return config["rms_norm_eps"], file_digests(catalog)

    old, new = ((eps, files_digests(one)) for eps, one in ((1e-6, small[0]), (0.25, str(newer))))
    finish, seen = objects.finish, list[tuple[float, dict[str, str]]]()

    def late(*arguments: Any) -> None:
        seen.append(read())
        finish(*arguments)
        seen.append(read())

    def killed(*arguments: Any) -> None:
        raise WriteError("killed")

    export(small[0], PLACE, max_shard_size=shard)
    assert read() == old
    with monkeypatch.context() as patch:
        patch.setattr(objects, "finish", late)
        export(newer, PLACE, max_shard_size=shard)
    assert [*seen, read()] == [new] * 3
    assert left_over() == []
    export(small[0], PLACE, max_shard_size=shard)
    with monkeypatch.context() as patch:
        patch.setattr(objects, "finish", killed)
        patch.setattr(ObjectStaging, "discard", lambda self: self._note.end())
        with pytest.raises(WriteError, match="killed"):
            export(newer, PLACE, max_shard_size=shard)
        assert read() == new


def test_credentials_that_may_not_delete(
    small: list[str], endpoint: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Saves and conversions succeed, name what stays, and later ones with other credentials remove notes."""
    from zerostart.state.converting.convert import convert, export

    def fault(method: str, path: str, number: int) -> proxy.Fault:
        return 403 if method == "DELETE" or path.endswith("?delete") else None

    export(small[0], PLACE)
    with disturbed(endpoint, fault):
        export(small[1], PLACE)
        assert ".zerostart/" in caplog.text
        assert "may delete objects" in caplog.text
        assert files_digests(PLACE) == files_digests(small[1])
        caplog.clear()
        # Where an index takes over from a single file, the removal of that is the switch.
        for _ in range(2):
            with pytest.raises(WriteError, match=r"go by what was there before, which is not removed(?!;)"):
                export(small[0], PLACE, max_shard_size="1MB")
            assert files_digests(PLACE) == files_digests(small[1])
    export(small[0], PLACE, max_shard_size="1MB")
    assert files_digests(PLACE) == files_digests(small[0])
    caplog.clear()
    with disturbed(endpoint, fault):
        convert(small[0], f"{PLACE}/converted", "dcp")
        assert ".zerostart/" in caplog.text
    assert any(name.startswith(".zerostart/") for name in names(f"{PLACE}/converted"))
    export(small[1], PLACE)
    convert(small[1], f"{PLACE}/beside", "dcp")
    assert files_digests(PLACE) == files_digests(small[1])
    assert not [name for name in names(f"{PLACE}") if ".zerostart/" in name]
