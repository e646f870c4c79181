"""Directories that appear whole or not at all: killed, and failing, at each call that changes a file."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import zerostart
from ranks import rank_outcomes
from syscalls import FAILURES, Calls
from zerostart.checkpoint import publishing as protocol
from zerostart.checkpoint.digest import Digests
from zerostart.checkpoint.shards import plan_shards
from zerostart.checkpoint.verifying import verify
from zerostart.checkpoint.writer import CheckpointWriter
from zerostart.distributed.world import World, current_world
from zerostart.state.publishing import publishing

ALONE = World(0, 1, None)
ENTRIES = [("a", "F32", (4, 3)), ("b", "F32", (5,)), ("c", "F32", ())]


def save(path: Path, value: float, shard_size: int | str = 40, world: World = ALONE) -> None:
    """Tensors full of ``value``, and a configuration."""
    layout = plan_shards(ENTRIES, shard_size)
    digests = Digests(ENTRIES)
    with publishing(path, world) as publication:
        if world.rank == 0:
            (publication.directory / "model").mkdir()
            with CheckpointWriter(publication.directory / "model", layout) as writer:
                for name, _, shape in ENTRIES:
                    tensor = torch.full(shape, value).reshape(-1)
                    writer.write(name, tensor.numpy().data.cast("B"))
                    digests.add(name, 0, tensor)
            text = publication.directory / "config.json"
            handle = os.open(text, os.O_WRONLY | os.O_CREAT)
            os.write(handle, str(value).encode())
            os.close(handle)
        publication.add_digests(digests.summed(world), "model")


def value_at(path: Path) -> float | None:
    """The one value that everything at ``path`` has; None where nothing is there."""
    if not path.exists():
        return None
    verify(path)
    found = {float((path / "config.json").read_text())}
    for file in (path / "model").glob("*.safetensors"):
        for tensor in load_file(file).values():
            found |= set(tensor.reshape(-1).tolist())
    (value,) = found
    return value


def beside(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.parent.iterdir() if entry != path)


def in_two_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a file system that cannot exchange directories."""
    monkeypatch.setattr(protocol, "_exchanged", lambda one, other: False)


@pytest.fixture
def _without_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """No power is cut here, and waiting for the disk a thousand times takes a minute."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)


@pytest.mark.usefixtures("_without_disk")
@pytest.mark.parametrize("steps", ["one", "two"])
@pytest.mark.parametrize("before", ["nothing", "an earlier one"])
def test_killed_at_any_call(
    before: str,
    steps: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if steps == "two":
        in_two_steps(monkeypatch)
    calls = Calls()
    with calls.watched():
        save(tmp_path / "counting", 1.0)
    points = 0
    while True:
        path = tmp_path / str(points) / "saved"
        path.parent.mkdir()
        if before != "nothing":
            save(path, 1.0, 20)
            (path / "notes").write_text("mine")
        with calls.watched(chosen=points):
            save(path, 2.0)
        if len(calls.names) <= points:
            break
        protocol.recover(path)
        found = value_at(path)
        assert found in ((1.0, 2.0) if before != "nothing" else (None, 2.0)), calls.names[points]
        save(path, 3.0)
        assert value_at(path) == 3.0
        assert beside(path) == [], f"left by a kill at {calls.names[points]}"
        assert before == "nothing" or (path / "notes").read_text() == "mine"
        points += 1
    assert points > 30
    with capsys.disabled():
        print(f" killed at {points} points", end="")


@pytest.mark.usefixtures("_without_disk")
@pytest.mark.parametrize("number", FAILURES, ids=errno.errorcode.get)
@pytest.mark.parametrize("steps", ["one", "two"])
def test_failing_at_any_call(
    steps: str,
    number: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if steps == "two":
        in_two_steps(monkeypatch)
    calls = Calls()
    points = told = 0
    while True:
        path = tmp_path / str(points) / "saved"
        path.parent.mkdir()
        save(path, 1.0, 20)
        failure: Exception | None = None
        with calls.watched(chosen=points, error=number):
            try:
                save(path, 2.0)
            except Exception as error:
                failure = error
        if len(calls.names) <= points:
            break
        found = value_at(path)
        if failure is None:  # what was replaced could not be removed
            assert found == 2.0, calls.names[points]
        else:
            assert isinstance(failure, zerostart.errors.WriteError), calls.names[points]
            assert os.strerror(number) in str(failure)
            assert found == (2.0 if "all is there" in str(failure) else 1.0), calls.names[points]
            told += 1
        save(path, 3.0)
        assert value_at(path) == 3.0
        assert beside(path) == []
        points += 1
    assert told > 25
    with capsys.disabled():
        print(f" failed at {points} points, {told} of them told", end="")


def test_files_of_others_stay(tmp_path: Path) -> None:
    """They are the same files as before, and what an earlier save has left goes."""
    path = tmp_path / "out"
    save(path, 1.0, 20)
    for name in ("notes", "runs/events", "model/README.md"):
        (path / name).parent.mkdir(exist_ok=True)
        (path / name).write_text(name)
    (path / "link").symlink_to("runs")
    (path / "empty").mkdir()
    (path / "model" / "model-00007-of-00009.safetensors").write_text("of a save of somebody else's")
    with (path / "runs" / "events").open("a") as still_open:
        save(path, 2.0, "1GB")
        still_open.write("+")
    assert value_at(path) == 2.0
    assert (path / "runs" / "events").read_text() == "runs/events+"
    assert (path / "link").readlink() == Path("runs")
    found = sorted(str(file.relative_to(path)) for file in path.rglob("*"))
    assert found == [
        "config.json", "empty", "link", "model", "model/README.md", "model/model.safetensors", "notes",
        "runs", "runs/events", "zerostart.json",
    ]  # fmt: skip


def test_a_link_goes_on_leading_to_its_directory(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    save(tmp_path / "link", 1.0)
    save(tmp_path / "link", 2.0)
    assert (tmp_path / "link").is_symlink()
    assert value_at(tmp_path / "disk") == 2.0


def test_a_save_that_goes_on_is_not_swept_away(tmp_path: Path) -> None:
    path = tmp_path / "saved"
    with publishing(path, ALONE) as publication:
        (publication.directory / "slow").write_text("still there")
        save(path, 1.0)
        assert (publication.directory / "slow").exists()
    assert (path / "slow").read_text() == "still there"


def test_places_that_cannot_be_saved_to(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(zerostart.errors.WriteError, match="file"):
            save(place, 1.0)
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_the_working_directory_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here" / "below").mkdir(parents=True)
    for place in ("here", "here/below"):
        monkeypatch.chdir(tmp_path / place)
        (tmp_path / "here" / "notes").write_text("of somebody else")
        for value in (1.0, 2.0):
            save(tmp_path / "here", value, 40 if value == 1.0 else "5GB")
            assert value_at(tmp_path / "here") == value
            assert Path.cwd() == tmp_path / place
        save(Path("saved"), 1.0)
        assert value_at(Path("saved")) == 1.0
    assert (tmp_path / "here" / "notes").read_text() == "of somebody else"
    assert beside(tmp_path / "here") == []


@pytest.mark.usefixtures("_without_disk")
def test_a_place_that_stays_never_looks_whole_and_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "is_mount", lambda self: self.name == "mounted")
    calls, points, seen = Calls(), 0, set()
    while True:
        path = tmp_path / str(points) / "mounted"
        path.mkdir(parents=True)
        save(path, 1.0)
        with calls.watched(chosen=points):
            save(path, 2.0, "5GB")
        if len(calls.names) <= points:
            break
        try:
            seen.add(value_at(path))
        except zerostart.errors.VerifyError:
            seen.add(None)
        save(path, 3.0)
        assert value_at(path) == 3.0
        assert not [entry for entry in path.iterdir() if entry.name.endswith(".saving")]
        points += 1
    assert seen == {1.0, 2.0, None}


class Synced:
    """Which files and directories have been brought to the disk as they are now."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clean: set[int] = set()
        pwrite, write, fsync, link = os.pwrite, os.write, os.fsync, os.link

        def writing(call: Callable[..., int]) -> Callable[..., int]:
            def wrote(handle: int, *rest: object) -> int:
                self.clean.discard(os.fstat(handle).st_ino)
                return call(handle, *rest)

            return wrote

        def naming(call: Callable[..., None]) -> Callable[..., None]:
            def named(old: object, new: Path, **options: object) -> None:
                call(old, new, **options)
                self.clean.discard(Path(new).parent.stat().st_ino)

            return named

        def synced(handle: int) -> None:
            fsync(handle)
            self.clean.add(os.fstat(handle).st_ino)

        for name, made in {
            "pwrite": writing(pwrite),
            "write": writing(write),
            "fsync": synced,
            "rename": naming(os.rename),
            "replace": naming(os.replace),
            "link": naming(link),
        }.items():
            monkeypatch.setattr(os, name, made)


def test_everything_is_on_the_disk_before_it_has_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every file, every name, and the place itself: no power cut finds a half of it there."""
    save(tmp_path / "saved", 1.0)
    (tmp_path / "saved" / "notes").write_text("mine")
    synced = Synced(monkeypatch)
    exchanged = protocol._exchanged
    seen: list[Path] = []

    def exchange(new: Path, old: Path) -> bool:
        for path in (new, *new.rglob("*")):
            seen.append(path)
            assert path.stat().st_ino in synced.clean or path.name == "notes", path
        synced.clean.discard(new.parent.stat().st_ino)
        return exchanged(new, old)

    monkeypatch.setattr(protocol, "_exchanged", exchange)
    save(tmp_path / "saved", 2.0)
    assert tmp_path.stat().st_ino in synced.clean
    assert {"zerostart.json", "config.json", "notes", "model"} <= {path.name for path in seen}


def test_nothing_is_left_of_a_save_that_failed(tmp_path: Path) -> None:
    with pytest.raises(zerostart.errors.WriteError, match="No space left on device; nothing was saved"):
        fail_on(0, tmp_path / "new" / "folders" / "saved", full)
    assert list(tmp_path.iterdir()) == []


def fail_on(rank: int, path: Path, make: Callable[[], BaseException]) -> None:
    world = current_world()
    with publishing(path, world) as publication:
        (publication.directory / f"of {world.rank}").write_text("x")
        if world.rank == rank:
            raise make()


def full() -> BaseException:
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_fails(rank: int, tmp_path: Path) -> None:
    save(tmp_path / "saved", 1.0)
    outcomes = rank_outcomes(fail_on, 2, rank, tmp_path / "saved", full)
    assert {outcome.error for outcome in outcomes} == {"zerostart.errors.WriteError"}
    assert len({outcome.message for outcome in outcomes}) == 1
    assert "No space left on device; nothing was saved" in outcomes[0].message
    assert value_at(tmp_path / "saved") == 1.0
    assert beside(tmp_path / "saved") == []


def save_by_all(path: Path) -> None:
    save(path, 5.0, world=current_world())


def test_ranks_save_together(tmp_path: Path) -> None:
    outcomes = rank_outcomes(save_by_all, 2, tmp_path / "saved")
    assert [outcome.ok for outcome in outcomes] == [True, True], outcomes[0].describe()
    assert value_at(tmp_path / "saved") == 5.0
