"""Killed or failed saves leave the old or new checkpoint."""

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import zerostart
from tests.checkpoint.shared_directory import KINDS, SHARDS, SINGLE, listed_files, save_model, value_of
from tests.ranks import rank_outcomes
from tests.syscalls import FAILURES, Calls
from zerostart.checkpoint.verifying import verify
from zerostart.checkpoint.write import staging as publishing_of_checkpoints
from zerostart.checkpoint.write.staging import RenamePlan, finish_switched
from zerostart.distributed.world import World, current_world
from zerostart.state.saving.writing import open_publication

ONE_RANK = World(0, 1, None)
#: (Kind, shard size of the old save, shard size of the new save).
CHANGES = {
    "shards over shards": ("model", SHARDS, SHARDS),
    "a single file over shards": ("model", SHARDS, SINGLE),
    "shards over a single file": ("model", SINGLE, SHARDS),
    "a single file over another": ("model", SINGLE, SINGLE),
    "adapters": ("adapters", SINGLE, SINGLE),
    "a state": ("state", SHARDS, SHARDS),
    "a state of single files": ("state", SINGLE, SINGLE),
}
#: Changes of the fast suite.
FAST = ("shards over a single file",)
CHANGE_PARAMS = [pytest.param(change, marks=() if change in FAST else pytest.mark.slow) for change in CHANGES]


def siblings(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.parent.iterdir() if entry != path)


def all_files(path: Path) -> list[str]:
    return sorted(str(file.relative_to(path)) for file in path.rglob("*") if not file.is_dir())


@pytest.fixture
def _without_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip fsync, which takes a minute in all."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)


def prepare(path: Path, kind: str, size: int, has_earlier: bool) -> None:
    """Make a used directory, optionally with earlier saves."""
    path.mkdir(parents=True)
    (path / "notes").write_text("mine")
    if has_earlier:
        for other in KINDS:
            if other != kind:
                KINDS[other](path, 7.0, SINGLE)
        KINDS[kind](path, 1.0, size)


def check(path: Path, kind: str, has_earlier: bool) -> float | None:
    """Check all other files; return the value of ``kind``."""
    value = value_of(path, kind)
    assert (path / "notes").read_text() == "mine"
    if has_earlier:
        assert verify(path).tensors
        for other in KINDS:
            assert other == kind or value_of(path, other) == 7.0
    elif value is not None:
        verify(path)
    return value


def value_of_config(path: Path, kind: str) -> float:
    """Return the value in the saved config file."""
    names = {"model": "config.json", "adapters": "adapter_config.json", "state": "model/config.json"}
    value: float = json.loads((path / names[kind]).read_text())["value"]
    return value


@pytest.mark.usefixtures("_without_disk")
@pytest.mark.parametrize(
    "has_earlier",
    [
        pytest.param(False, id="empty directory", marks=pytest.mark.slow),
        pytest.param(True, id="earlier save"),
    ],
)
@pytest.mark.parametrize("change", CHANGE_PARAMS)
def test_kill_at_any_call_leaves_a_whole_save(
    change: str,
    has_earlier: bool,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    kind, size, new_size = CHANGES[change]
    calls = Calls()
    points, values = 0, set()
    prepare(tmp_path / "begin", kind, size, has_earlier)
    while True:
        path = tmp_path / str(points) / "saved"
        shutil.copytree(tmp_path / "begin", path)
        with calls.watch(chosen=points):
            KINDS[kind](path, 2.0, new_size)
        if len(calls.names) <= points:
            break
        value = check(path, kind, has_earlier)
        assert value in ((1.0, 2.0) if has_earlier else (None, 2.0)), calls.names[points]
        if has_earlier:  # transformers may read the earlier save here; zerostart may not
            finish_switched(path)
        assert value is None or value_of_config(path, kind) == value, calls.names[points]
        values.add(value)
        # The next save of any kind removes leftovers.
        KINDS[kind](path, 3.0, new_size)
        assert check(path, kind, has_earlier) == 3.0
        assert not (path / ".zerostart").exists(), f"left by a kill at {calls.names[points]}"
        unlisted = set(all_files(path)) - set(listed_files(path))
        assert unlisted <= {"notes", "zerostart.json", "state.json"}, (calls.names[points], unlisted)
        points += 1
    assert values == ({1.0, 2.0} if has_earlier else {None, 2.0})
    assert points > 30
    with capsys.disabled():
        print(f" killed at {points} points", end="")


@pytest.mark.usefixtures("_without_disk")
@pytest.mark.parametrize(
    "number",
    [FAILURES[0], *(pytest.param(number, marks=pytest.mark.slow) for number in FAILURES[1:])],
    ids=errno.errorcode.get,
)
@pytest.mark.parametrize("change", CHANGE_PARAMS)
def test_failure_at_any_call_leaves_a_whole_save(
    change: str, number: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kind, size, new_size = CHANGES[change]
    calls = Calls()
    points = errors = 0
    prepare(tmp_path / "begin", kind, size, True)
    while True:
        path = tmp_path / str(points) / "saved"
        shutil.copytree(tmp_path / "begin", path)
        failure: Exception | None = None
        with calls.watch(chosen=points, error=number):
            try:
                KINDS[kind](path, 2.0, new_size)
            except Exception as error:
                failure = error
        if len(calls.names) <= points:
            break
        value = check(path, kind, True)
        if failure is None:  # only deleting the old files failed
            assert value == 2.0, calls.names[points]
        else:
            assert isinstance(failure, zerostart.errors.WriteError), calls.names[points]
            assert os.strerror(number) in str(failure)
            is_partial = "all files are saved" in str(failure) or "only a part was saved" in str(failure)
            assert value == (2.0 if is_partial else 1.0), calls.names[points]
            errors += 1
        KINDS[kind](path, 3.0, new_size)
        assert check(path, kind, True) == 3.0
        assert not (path / ".zerostart").exists()
        assert set(all_files(path)) - set(listed_files(path)) <= {"notes", "zerostart.json", "state.json"}
        points += 1
    assert errors > 20
    with capsys.disabled():
        print(f" failed at {points} points, {errors} with an error", end="")


class SyncTracker:
    """Track which files and directories are synced to disk."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clean: set[int] = set()
        pwrite, write, fsync = os.pwrite, os.write, os.fsync

        def track_writes(call: Callable[..., int]) -> Callable[..., int]:
            def write_and_mark(handle: int, *arguments: object) -> int:
                self.clean.discard(os.fstat(handle).st_ino)
                return call(handle, *arguments)

            return write_and_mark

        def track_renames(call: Callable[..., None]) -> Callable[..., None]:
            def rename_and_mark(old: object, new: Path) -> None:
                call(old, new)
                self.clean.discard(Path(new).parent.stat().st_ino)

            return rename_and_mark

        def sync(handle: int) -> None:
            fsync(handle)
            self.clean.add(os.fstat(handle).st_ino)

        for name, wrapper in {
            "pwrite": track_writes(pwrite),
            "write": track_writes(write),
            "fsync": sync,
            "rename": track_renames(os.rename),
            "replace": track_renames(os.replace),
        }.items():
            monkeypatch.setattr(os, name, wrapper)


@pytest.mark.parametrize("kind", KINDS)
def test_files_are_synced_before_readers_see_them(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power cut loses no file that an index lists."""
    path = tmp_path / "saved"
    KINDS[kind](path, 1.0, SHARDS)
    (path / "notes").write_text("mine")
    tracker = SyncTracker(monkeypatch)
    original_switch, replace = publishing_of_checkpoints._switch, os.replace
    switches: list[str] = []

    def check_and_replace(source: Path, target: Path) -> None:
        name = str(Path(target).relative_to(path)) if path in Path(target).parents else ""
        if switches and name == switches[-1]:
            assert Path(source).stat().st_ino in tracker.clean
            if name.endswith(".index.json") or name == "state.json":
                folders = {path / Path(name).parent}
                if name == "state.json":
                    folders |= {path / "model", path / "state"}
                for folder in folders:
                    assert folder.stat().st_ino in tracker.clean, folder
                    for file in folder.glob("*.safetensors"):
                        assert file.stat().st_ino in tracker.clean, file
        replace(source, target)

    def switch(folder: Path, staged: Path, plan: RenamePlan) -> None:
        switches.append(plan.switch)
        original_switch(folder, staged, plan)

    monkeypatch.setattr(os, "replace", check_and_replace)
    monkeypatch.setattr(publishing_of_checkpoints, "_switch", switch)
    # The earlier save is on disk.
    tracker.clean |= {entry.stat().st_ino for entry in path.rglob("*.safetensors")}
    KINDS[kind](path, 2.0, SHARDS)
    assert value_of(path, kind) == 2.0
    assert path.stat().st_ino in tracker.clean
    assert switches


def test_failed_save_leaves_no_files(tmp_path: Path) -> None:
    with pytest.raises(zerostart.errors.WriteError, match="No space left on device; nothing was saved"):
        fail_on(0, tmp_path / "new" / "folders" / "saved", disk_full)
    assert list(tmp_path.iterdir()) == []


def fail_on(rank: int, path: Path, make_error: Callable[[], BaseException]) -> None:
    world = current_world()
    with open_publication(path, world) as publication:
        (publication.directory / f"of {world.rank}").write_text("x")
        if world.rank == rank:
            raise make_error()


def disk_full() -> BaseException:
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_failing_rank_fails_all(rank: int, tmp_path: Path) -> None:
    save_model(tmp_path / "saved", 1.0)
    outcomes = rank_outcomes(fail_on, 2, rank, tmp_path / "saved", disk_full)
    assert {outcome.error for outcome in outcomes} == {"zerostart.errors.WriteError"}
    assert len({outcome.message for outcome in outcomes}) == 1
    assert "No space left on device; nothing was saved" in outcomes[0].message
    assert value_of(tmp_path / "saved", "model") == 1.0
    assert siblings(tmp_path / "saved") == []
