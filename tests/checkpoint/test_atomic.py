"""Saves of which readers see the whole or nothing: killed, and failing, at each call that changes a file."""

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import zerostart
from tests.checkpoint.shared_directory import KINDS, SHARDS, SINGLE, described, save_model, value_of
from tests.ranks import rank_outcomes
from tests.syscalls import FAILURES, Calls
from zerostart.checkpoint.verifying import verify
from zerostart.checkpoint.write import staging as publishing_of_checkpoints
from zerostart.checkpoint.write.staging import RenamePlan, finish_switched
from zerostart.distributed.world import World, current_world
from zerostart.state.saving.writing import open_publication

ALONE = World(0, 1, None)
#: What is saved over what: kinds, and the sizes of files.
CHANGES = {
    "shards over shards": ("model", SHARDS, SHARDS),
    "a single file over shards": ("model", SHARDS, SINGLE),
    "shards over a single file": ("model", SINGLE, SHARDS),
    "a single file over another": ("model", SINGLE, SINGLE),
    "adapters": ("adapters", SINGLE, SINGLE),
    "a state": ("state", SHARDS, SHARDS),
    "a state of single files": ("state", SINGLE, SINGLE),
}
#: Of them, those of the fast suite: the switch by an index, over a single file, and that by a document.
FAST = ("shards over a single file",)
SOME = [pytest.param(change, marks=() if change in FAST else pytest.mark.slow) for change in CHANGES]


def beside(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.parent.iterdir() if entry != path)


def all_files(path: Path) -> list[str]:
    return sorted(str(file.relative_to(path)) for file in path.rglob("*") if not file.is_dir())


@pytest.fixture
def _without_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """No power is cut here, and waiting for the disk a thousand times takes a minute."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)


def prepared(path: Path, kind: str, size: int, before: bool) -> None:
    """A directory that somebody uses, with an earlier save in it or none; and other contents beside that."""
    path.mkdir(parents=True)
    (path / "notes").write_text("mine")
    if before:
        for other in KINDS:
            if other != kind:
                KINDS[other](path, 7.0, SINGLE)
        KINDS[kind](path, 1.0, size)


def check(path: Path, kind: str, before: bool) -> float | None:
    """What is there of ``kind``, all of which is as it was saved; and of everything else."""
    found = value_of(path, kind)
    assert (path / "notes").read_text() == "mine"
    if before:
        assert verify(path).tensors
        for other in KINDS:
            assert other == kind or value_of(path, other) == 7.0
    elif found is not None:
        verify(path)
    return found


def configured(path: Path, kind: str) -> float:
    """What the configuration beside the weights is of."""
    names = {"model": "config.json", "adapters": "adapter_config.json", "state": "model/config.json"}
    value: float = json.loads((path / names[kind]).read_text())["value"]
    return value


@pytest.mark.usefixtures("_without_disk")
@pytest.mark.parametrize(
    "before",
    [
        pytest.param(False, id="nothing before", marks=pytest.mark.slow),
        pytest.param(True, id="an earlier one"),
    ],
)
@pytest.mark.parametrize("change", SOME)
def test_killed_at_any_call(
    change: str,
    before: bool,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    kind, size, then = CHANGES[change]
    calls = Calls()
    points, seen = 0, set()
    prepared(tmp_path / "begin", kind, size, before)
    while True:
        path = tmp_path / str(points) / "saved"
        shutil.copytree(tmp_path / "begin", path)
        with calls.watched(chosen=points):
            KINDS[kind](path, 2.0, then)
        if len(calls.names) <= points:
            break
        found = check(path, kind, before)
        assert found in ((1.0, 2.0) if before else (None, 2.0)), calls.names[points]
        if before:  # a plain reader may see the one before here; ours do not
            finish_switched(path)
        assert found is None or configured(path, kind) == found, calls.names[points]
        seen.add(found)
        # The next save of any kind into the directory removes what was left.
        KINDS[kind](path, 3.0, then)
        assert check(path, kind, before) == 3.0
        assert not (path / ".zerostart").exists(), f"left by a kill at {calls.names[points]}"
        left = set(all_files(path)) - set(described(path))
        assert left <= {"notes", "zerostart.json", "state.json"}, (calls.names[points], left)
        points += 1
    assert seen == ({1.0, 2.0} if before else {None, 2.0})
    assert points > 30
    with capsys.disabled():
        print(f" killed at {points} points", end="")


@pytest.mark.usefixtures("_without_disk")
@pytest.mark.parametrize(
    "number",
    [FAILURES[0], *(pytest.param(number, marks=pytest.mark.slow) for number in FAILURES[1:])],
    ids=errno.errorcode.get,
)
@pytest.mark.parametrize("change", SOME)
def test_failing_at_any_call(
    change: str, number: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kind, size, then = CHANGES[change]
    calls = Calls()
    points = told = 0
    prepared(tmp_path / "begin", kind, size, True)
    while True:
        path = tmp_path / str(points) / "saved"
        shutil.copytree(tmp_path / "begin", path)
        failure: Exception | None = None
        with calls.watched(chosen=points, error=number):
            try:
                KINDS[kind](path, 2.0, then)
            except Exception as error:
                failure = error
        if len(calls.names) <= points:
            break
        found = check(path, kind, True)
        if failure is None:  # what was replaced could not be removed
            assert found == 2.0, calls.names[points]
        else:
            assert isinstance(failure, zerostart.errors.WriteError), calls.names[points]
            assert os.strerror(number) in str(failure)
            partly = "all files are saved" in str(failure) or "only a part was saved" in str(failure)
            assert found == (2.0 if partly else 1.0), calls.names[points]
            told += 1
        KINDS[kind](path, 3.0, then)
        assert check(path, kind, True) == 3.0
        assert not (path / ".zerostart").exists()
        assert set(all_files(path)) - set(described(path)) <= {"notes", "zerostart.json", "state.json"}
        points += 1
    assert told > 20
    with capsys.disabled():
        print(f" failed at {points} points, {told} of them told", end="")


class Synced:
    """Which files and directories have been brought to the disk as they are now."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clean: set[int] = set()
        pwrite, write, fsync = os.pwrite, os.write, os.fsync

        def writing(call: Callable[..., int]) -> Callable[..., int]:
            def wrote(handle: int, *rest: object) -> int:
                self.clean.discard(os.fstat(handle).st_ino)
                return call(handle, *rest)

            return wrote

        def naming(call: Callable[..., None]) -> Callable[..., None]:
            def named(old: object, new: Path) -> None:
                call(old, new)
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
        }.items():
            monkeypatch.setattr(os, name, made)


@pytest.mark.parametrize("kind", KINDS)
def test_everything_is_on_the_disk_before_readers_go_by_it(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every file and every name: no power cut finds a document or an index of what is not there."""
    path = tmp_path / "saved"
    KINDS[kind](path, 1.0, SHARDS)
    (path / "notes").write_text("mine")
    synced = Synced(monkeypatch)
    switched, replace = publishing_of_checkpoints._switch, os.replace
    seen: list[str] = []

    def replaced(source: Path, target: Path) -> None:
        name = str(Path(target).relative_to(path)) if path in Path(target).parents else ""
        if seen and name == seen[-1]:
            assert Path(source).stat().st_ino in synced.clean
            if name.endswith(".index.json") or name == "state.json":
                folders = {path / Path(name).parent}
                if name == "state.json":
                    folders |= {path / "model", path / "state"}
                for folder in folders:
                    assert folder.stat().st_ino in synced.clean, folder
                    for file in folder.glob("*.safetensors"):
                        assert file.stat().st_ino in synced.clean, file
        replace(source, target)

    def switch(place: Path, staged: Path, plan: RenamePlan) -> None:
        seen.append(plan.switch)
        switched(place, staged, plan)

    monkeypatch.setattr(os, "replace", replaced)
    monkeypatch.setattr(publishing_of_checkpoints, "_switch", switch)
    # What was there before is on the disk.
    synced.clean |= {entry.stat().st_ino for entry in path.rglob("*.safetensors")}
    KINDS[kind](path, 2.0, SHARDS)
    assert value_of(path, kind) == 2.0
    assert path.stat().st_ino in synced.clean
    assert seen


def test_nothing_is_left_of_a_save_that_failed(tmp_path: Path) -> None:
    with pytest.raises(zerostart.errors.WriteError, match="No space left on device; nothing was saved"):
        fail_on(0, tmp_path / "new" / "folders" / "saved", full)
    assert list(tmp_path.iterdir()) == []


def fail_on(rank: int, path: Path, make: Callable[[], BaseException]) -> None:
    world = current_world()
    with open_publication(path, world) as publication:
        (publication.directory / f"of {world.rank}").write_text("x")
        if world.rank == rank:
            raise make()


def full() -> BaseException:
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_fails(rank: int, tmp_path: Path) -> None:
    save_model(tmp_path / "saved", 1.0)
    outcomes = rank_outcomes(fail_on, 2, rank, tmp_path / "saved", full)
    assert {outcome.error for outcome in outcomes} == {"zerostart.errors.WriteError"}
    assert len({outcome.message for outcome in outcomes}) == 1
    assert "No space left on device; nothing was saved" in outcomes[0].message
    assert value_of(tmp_path / "saved", "model") == 1.0
    assert beside(tmp_path / "saved") == []
