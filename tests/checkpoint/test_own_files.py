"""A save replaces only files that its manifest lists."""

import contextlib
import errno
import json
import os
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import zerostart
from tests.checkpoint.shared_directory import (
    KINDS,
    ONE_RANK,
    SHARDS,
    SINGLE,
    save_adapters,
    save_model,
    save_state,
    value_of,
    write,
    write_config,
)
from tests.ranks import run_ranks
from tests.syscalls import Calls
from zerostart.checkpoint.source import open_catalog
from zerostart.checkpoint.write.staging import finish_switched
from zerostart.errors import CheckpointError, WriteError
from zerostart.state.resuming.retention import prune
from zerostart.state.saving.writing import open_publication


@contextlib.contextmanager
def repeat_in_thread(work: Callable[[int], None]) -> Iterator[list[int]]:
    """Repeat ``work(turn)`` in a thread; yield the turns."""
    stop, turns = threading.Event(), [0]

    def repeat() -> None:
        while not stop.is_set():
            work(turns[0] + 1)
            turns[0] += 1

    thread = threading.Thread(target=repeat)
    thread.start()
    try:
        yield turns
    finally:
        stop.set()
        thread.join()


def test_concurrent_writes_of_others_survive(tmp_path: Path) -> None:
    """Another writer's files survive saves of every kind."""
    path = tmp_path / "out"
    path.mkdir()
    (path / "log").write_text("")

    def work(turn: int) -> None:
        (path / "new").write_text(str(turn))
        (path / "new").replace(path / "replaced")
        with (path / "log").open("a") as log:
            log.write(f"{turn}\n")
        (path / f"temporary-{turn}").write_text("")
        (path / f"temporary-{turn}").unlink()

    with repeat_in_thread(work) as turns:
        for number in range(1, 9):
            for kind, save in KINDS.items():
                save(path, number, SHARDS if number % 2 else SINGLE)
                assert value_of(path, kind) == number
    assert turns[0] > 10
    assert (path / "replaced").read_text() == str(turns[0])
    assert (path / "log").read_text().split() == [str(turn + 1) for turn in range(turns[0])]
    zerostart.verify(path)


def test_foreign_files_keep_their_identity(tmp_path: Path) -> None:
    """Inodes, modes, setgid bits and times stay."""
    path = tmp_path / "out"
    save_model(path, 1.0)
    for name in (
        "notes",
        "runs/events",
        "model/README.md",
        "model-00007-of-00009.safetensors",
        "a.safetensors",
    ):
        (path / name).parent.mkdir(exist_ok=True)
        (path / name).write_text(name)
        (path / name).chmod(0o640)
    (path / "link").symlink_to("runs")
    for number in (10, 12, 6, 8, 14):  # the Trainer's rotation may sort by time
        (path / f"checkpoint-{number}").mkdir(mode=0o2770)
        os.utime(path / f"checkpoint-{number}", (number, number))
    (path / "runs").chmod(0o2750)
    path.chmod(0o2775)

    def snapshot() -> dict[str, tuple[int, ...]]:
        ours = {"config.json", "tokenizer.json", "zerostart.json"}
        files = {}
        for entry in path.rglob("*"):
            if entry.name not in ours and not (entry.name.startswith("model") and entry.stat().st_size > 100):
                status = entry.lstat()
                files[str(entry.relative_to(path))] = (status.st_ino, status.st_mode, status.st_mtime_ns)
        return files

    before = snapshot()
    assert len(before) == 12
    with (path / "runs" / "events").open("a") as events:
        for value, size in ((2.0, SINGLE), (3.0, SHARDS), (4.0, SHARDS)):
            save_model(path, value, size)
            assert value_of(path, "model") == value
            assert {name: snapshot().get(name) for name in before} == before
        events.write("+")
    assert (path / "runs" / "events").read_text() == "runs/events+"
    assert stat.S_IMODE(path.stat().st_mode) == 0o2775
    assert (path / "model-00007-of-00009.safetensors").exists()


def test_kinds_share_one_directory(tmp_path: Path) -> None:
    """Models, adapters and states do not replace each other."""
    path = tmp_path / "out"
    with open_publication(path, ONE_RANK) as publication:
        write(publication, ".", 1.0, SHARDS, "model")
        write_config(publication, "config.json", 1.0)
    for folder in ("first", "second"):
        with open_publication(path, ONE_RANK) as publication:
            write(publication, folder, 2.0, SINGLE, "adapter_model")
    save_adapters(path, 3.0)
    save_state(path, 4.0)
    with open_publication(path, ONE_RANK) as publication:
        write(publication, ".", 5.0, SINGLE, "diffusion_pytorch_model")
    assert [value_of(path, kind) for kind in ("model", "adapters", "state")] == [1.0, 3.0, 4.0]
    assert (path / "first" / "adapter_model.safetensors").exists()
    assert zerostart.verify(path).tensors == 3 * 7
    save_model(path, 6.0)
    assert [value_of(path, kind) for kind in ("model", "adapters", "state")] == [6.0, 3.0, 4.0]
    # A load uses the last save.
    assert "state" not in str(open_catalog(path).files)
    assert open_catalog(path).root == str(path)
    save_state(path, 7.0)
    assert open_catalog(path).root == str(path / "model")


def test_edited_tokenizer_is_kept(tmp_path: Path) -> None:
    """Only unchanged saved files are replaced."""
    path = tmp_path / "out"
    path.mkdir()
    (path / "tokenizer.json").write_text("the script's own")
    save_model(path, 1.0)
    assert (path / "tokenizer.json").read_text() == "the script's own"
    assert json.loads((path / "config.json").read_text()) == {"value": 1.0}
    (path / "tokenizer.json").unlink()
    for value in (2.0, 3.0):
        save_model(path, value)
        assert json.loads((path / "tokenizer.json").read_text()) == {"value": value}
    (path / "tokenizer.json").write_text("edited")
    save_model(path, 4.0)
    assert (path / "tokenizer.json").read_text() == "edited"
    assert zerostart.verify(path).tensors == 3


HOSTILE = ["../above.txt", "{0}/above.txt", "a/../../above.txt", "mine.safetensors", "link/above.txt", "mine"]


@pytest.mark.parametrize("kind", KINDS)
def test_forged_manifests_are_harmless(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "out"
    path.mkdir()
    (path / "link").symlink_to(tmp_path)
    for file in (tmp_path / "above.txt", path / "mine.safetensors", path / "mine", path / "config.jso"):
        file.write_text("kept")
    names = [name.format(tmp_path) for name in HOSTILE]
    files = {name: {"bytes": 4} for name in names}
    for name, text in {
        "zerostart.json": {"format": 1, "files": files},
        "state.json": {"format": 1, "files": files},
        "model.safetensors.index.json": {"weight_map": {str(n): name for n, name in enumerate(names)}},
    }.items():
        (path / name).write_text(json.dumps(text))
    for value in (1.0, 2.0):
        KINDS[kind](path, value, SHARDS)
        assert value_of(path, kind) == value
    for file in (tmp_path / "above.txt", path / "mine.safetensors", path / "mine"):
        assert file.read_text() == "kept"
    assert (path / "link").is_symlink()
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["above.txt", "out"]


@pytest.mark.parametrize("name", [".zerostart", "model", "second", "model.safetensors", "state.json"])
def test_links_are_not_followed(name: str, tmp_path: Path) -> None:
    """Linked files are replaced; linked directories are an error."""
    path, outside = tmp_path / "out", tmp_path / "outside"
    path.mkdir()
    outside.mkdir()
    target = outside / "file" if "." in name[1:] else outside
    (outside / "file").write_text("kept")
    (path / name).symlink_to(target)
    for kind, save in KINDS.items():
        try:
            save(path, 1.0, SINGLE)
        except WriteError:
            assert target == outside
        else:
            assert value_of(path, kind) == 1.0
    assert [entry.name for entry in outside.iterdir()] == ["file"]
    assert (outside / "file").read_text() == "kept"


@pytest.mark.parametrize(
    "plan",
    [
        {"marker": "zerostart.json", "switch": "gone", "drop": ["../above"]},
        {"marker": "zerostart.json", "switch": "gone", "after": ["link/above"], "drop": ["link/above"]},
        {"marker": "zerostart.json", "switch": "gone", "drop": [None]},
        {"marker": "zerostart.json", "switch": "gone", "before": {"notes": "../above"}},
        {"marker": "notes", "switch": "gone"},
        {"marker": "", "switch": "", "over": "../above"},
        {"marker": "", "switch": "gone", "folders": [""], "drop": [""]},
        {"marker": "", "switch": "gone", "drop": "notes"},
        {"marker": "", "switch": "gone", "before": {"x": "\ud800"}},
        {"marker": "/etc/passwd", "switch": ""},
        {"marker": [], "switch": {}},
        {"marker": "", "switch": "gone", "before": ["x"]},
        {"other": 1},
        7,
    ],
)  # fmt: skip
def test_forged_rename_plans_are_harmless(plan: Any, tmp_path: Path) -> None:
    path = tmp_path / "out"
    (path / ".zerostart" / "0123456789ab").mkdir(parents=True)
    (path / "link").symlink_to(tmp_path)
    (path / ".zerostart" / "0123456789ab" / "above").write_text("another's file")
    for file in (tmp_path / "above", path / "notes"):
        file.write_text("kept")
    (path / ".zerostart" / "0123456789ab.plan").write_text(json.dumps(plan))
    save_model(path, 1.0)
    assert (tmp_path / "above").read_text() == (path / "notes").read_text() == "kept"
    assert not (path / ".zerostart").exists()


@pytest.mark.parametrize("link", ["0123456789ab", "0123456789ab/folder"])
def test_readers_move_no_files_through_links(link: str, tmp_path: Path) -> None:
    path, outside = tmp_path / "out", tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_text("kept")
    (path / ".zerostart" / link).parent.mkdir(parents=True)
    (path / ".zerostart" / link).symlink_to(outside)
    name = link.partition("/")[2] + "/secret"
    plan = {"marker": "", "switch": "gone", "after": [name.lstrip("/")]}
    (path / ".zerostart" / "0123456789ab.plan").write_text(json.dumps(plan))
    finish_switched(path)
    assert (outside / "secret").read_text() == "kept"


def test_readers_finish_a_save_killed_after_its_switch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise readers get new weights with the old config."""

    def values() -> tuple[float | None, float]:
        return value_of(path, "model"), json.loads((path / "config.json").read_text())["value"]

    calls, path = Calls(), tmp_path / "out"
    save_model(path, 1.0)
    with calls.watch():
        save_model(path, 1.0)
    # Twice, because every other save finds the standard names free and makes fewer calls.
    for at in sorted(2 * [*range(len(calls.names))]):
        with Calls().watch(chosen=at):
            save_model(path, 3.0)
        if values() == (3.0, 1.0):
            break
        save_model(path, 1.0)
    assert values() == (3.0, 1.0)
    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", refuse_read_only)
        with pytest.raises(CheckpointError, match=r"config\.json belongs to an earlier checkpoint"):
            open_catalog(path)
    open_catalog(path)
    assert values() == (3.0, 3.0)
    assert not (path / ".zerostart").exists()


def refuse_read_only(*_: object, **__: object) -> None:
    raise OSError(errno.EROFS, os.strerror(errno.EROFS))


#: (Kind, folder, value) that each of several independent processes saves.
JOBS = [("model", "out", 1.0), ("state", "out", 4.0), ("model", "out", 2.0), ("adapters", "out", 3.0)]


def save_often(folder: Path, count: int) -> None:
    kind, subfolder, value = JOBS[torch.distributed.get_rank()]
    for _ in range(count):
        KINDS[kind](folder / subfolder, value, SHARDS)
        save_model(folder / "shared", value)


@pytest.mark.parametrize(("size", "count"), [(2, 10), pytest.param(4, 300, marks=pytest.mark.slow)])
def test_processes_save_at_once(size: int, count: int, tmp_path: Path) -> None:
    run_ranks(save_often, size, tmp_path, count, timeout=400)
    for kind in {kind for kind, _, _ in JOBS[:size]}:
        assert value_of(tmp_path / "out", kind) in [value for k, _, value in JOBS if k == kind]
    assert value_of(tmp_path / "shared", "model") is not None
    for name in ("out", "shared"):
        zerostart.verify(tmp_path / name)
        assert not (tmp_path / name / ".zerostart").exists()


def test_next_prune_finishes_a_killed_one(tmp_path: Path) -> None:
    points = 0
    while True:
        folder = tmp_path / str(points)
        for number in range(2):
            save_state(folder / f"step-{number}", number)
        calls = Calls()
        with calls.watch(chosen=points):
            prune(folder, 1)
        if len(calls.names) <= points:
            break
        is_listed = folder / "step-0" / "state.json" in list(folder.glob("*/state.json"))
        assert not is_listed or zerostart.verify(folder / "step-0").tensors == 6
        prune(folder, 1)
        # A kill before the last call leaves an empty directory.
        folders = sorted(path.name for path in folder.iterdir() if any(path.iterdir()))
        assert folders == ["step-1"], calls.names[points]
        points += 1
    assert points > 10
