"""A save owns the files that it names: what others have in its directory, or put there, stays as it is."""

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
    ALONE,
    KINDS,
    SHARDS,
    SINGLE,
    configure,
    save_adapters,
    save_model,
    save_state,
    value_of,
    write,
)
from tests.ranks import run_ranks
from tests.syscalls import Calls
from zerostart.checkpoint.source import open_catalog
from zerostart.checkpoint.write.staging import finish_switched
from zerostart.errors import CheckpointError, WriteError
from zerostart.state.resuming.retention import prune
from zerostart.state.saving.writing import open_publication


@contextlib.contextmanager
def meanwhile(work: Callable[[int], None]) -> Iterator[list[int]]:
    """Inside, a thread does ``work`` again and again, with the number of the turn; gives how many it did."""
    ended, turns = threading.Event(), [0]

    def go_on() -> None:
        while not ended.is_set():
            work(turns[0] + 1)
            turns[0] += 1

    thread = threading.Thread(target=go_on)
    thread.start()
    try:
        yield turns
    finally:
        ended.set()
        thread.join()


def test_files_that_others_write_meanwhile(tmp_path: Path) -> None:
    """Replaced, appended to, made, and gone again: while saves of every kind run, nothing of it is lost."""
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

    with meanwhile(work) as turns:
        for number in range(1, 9):
            for kind, save in KINDS.items():
                save(path, number, SHARDS if number % 2 else SINGLE)
                assert value_of(path, kind) == number
    assert turns[0] > 10
    assert (path / "replaced").read_text() == str(turns[0])
    assert (path / "log").read_text().split() == [str(turn + 1) for turn in range(turns[0])]
    zerostart.verify(path)


def test_files_of_others_are_the_same_files(tmp_path: Path) -> None:
    """Inodes, modes, setgid bits and times of files and directories; also of weights that are not ours."""
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
    for number in (10, 12, 6, 8, 14):  # the Trainer's rotation may go by these times
        (path / f"checkpoint-{number}").mkdir(mode=0o2770)
        os.utime(path / f"checkpoint-{number}", (number, number))
    (path / "runs").chmod(0o2750)
    path.chmod(0o2775)

    def seen() -> dict[str, tuple[int, ...]]:
        own = {"config.json", "tokenizer.json", "zerostart.json"}
        found = {}
        for entry in path.rglob("*"):
            if entry.name not in own and not (entry.name.startswith("model") and entry.stat().st_size > 100):
                about = entry.lstat()
                found[str(entry.relative_to(path))] = (about.st_ino, about.st_mode, about.st_mtime_ns)
        return found

    before = seen()
    assert len(before) == 12
    with (path / "runs" / "events").open("a") as still_open:
        for value, size in ((2.0, SINGLE), (3.0, SHARDS), (4.0, SHARDS)):
            save_model(path, value, size)
            assert value_of(path, "model") == value
            assert {name: seen().get(name) for name in before} == before
        still_open.write("+")
    assert (path / "runs" / "events").read_text() == "runs/events+"
    assert stat.S_IMODE(path.stat().st_mode) == 0o2775
    assert (path / "model-00007-of-00009.safetensors").exists()


def test_contents_of_one_directory_do_not_know_each_other(tmp_path: Path) -> None:
    """Adapters over a model, a second adapter, a model over a state, and the state again: all stay."""
    path = tmp_path / "out"
    with open_publication(path, ALONE) as publication:
        write(publication, ".", 1.0, SHARDS, "model")
        configure(publication, "config.json", 1.0)
    for folder in ("first", "second"):
        with open_publication(path, ALONE) as publication:
            write(publication, folder, 2.0, SINGLE, "adapter_model")
    save_adapters(path, 3.0)
    save_state(path, 4.0)
    with open_publication(path, ALONE) as publication:
        write(publication, ".", 5.0, SINGLE, "diffusion_pytorch_model")
    assert [value_of(path, kind) for kind in ("model", "adapters", "state")] == [1.0, 3.0, 4.0]
    assert (path / "first" / "adapter_model.safetensors").exists()
    assert zerostart.verify(path).tensors == 3 * 7
    save_model(path, 6.0)
    assert [value_of(path, kind) for kind in ("model", "adapters", "state")] == [6.0, 3.0, 4.0]
    # What counts for a load is what was saved last.
    assert "state" not in str(open_catalog(path).files)
    assert open_catalog(path).root == str(path)
    save_state(path, 7.0)
    assert open_catalog(path).root == str(path / "model")


def test_a_tokenizer_of_somebodys_own(tmp_path: Path) -> None:
    """Files beside weights are written where they are not there, or were ours and are as they were."""
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
def test_made_up_documents_lead_nowhere(kind: str, tmp_path: Path) -> None:
    """Neither documents nor an index make a save remove or write what is not its own, inside or outside."""
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
def test_links_lead_nowhere(name: str, tmp_path: Path) -> None:
    """A link in the place of a file goes, in that of a directory it is an error; no target is touched."""
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
def test_a_made_up_plan_does_no_harm(plan: Any, tmp_path: Path) -> None:
    path = tmp_path / "out"
    (path / ".zerostart" / "0123456789ab").mkdir(parents=True)
    (path / "link").symlink_to(tmp_path)
    (path / ".zerostart" / "0123456789ab" / "above").write_text("of somebody else")
    for file in (tmp_path / "above", path / "notes"):
        file.write_text("kept")
    (path / ".zerostart" / "0123456789ab.plan").write_text(json.dumps(plan))
    save_model(path, 1.0)
    assert (tmp_path / "above").read_text() == (path / "notes").read_text() == "kept"
    assert not (path / ".zerostart").exists()


@pytest.mark.parametrize("link", ["0123456789ab", "0123456789ab/folder"])
def test_a_reader_moves_no_files_through_links(link: str, tmp_path: Path) -> None:
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


def test_a_reader_finishes_a_save_that_was_killed_after_its_switch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would read new weights with the old configuration; where it may not write, it says so."""

    def values() -> tuple[float | None, float]:
        return value_of(path, "model"), json.loads((path / "config.json").read_text())["value"]

    calls, path = Calls(), tmp_path / "out"
    save_model(path, 1.0)
    with calls.watched():
        save_model(path, 1.0)
    # Twice: every other save finds the usual names free, and makes fewer calls.
    for at in sorted(2 * [*range(len(calls.names))]):
        with Calls().watched(chosen=at):
            save_model(path, 3.0)
        if values() == (3.0, 1.0):
            break
        save_model(path, 1.0)
    assert values() == (3.0, 1.0)
    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", denied)
        with pytest.raises(CheckpointError, match=r"config\.json belongs to an earlier checkpoint"):
            open_catalog(path)
    open_catalog(path)
    assert values() == (3.0, 3.0)
    assert not (path / ".zerostart").exists()


def denied(*_: object, **__: object) -> None:
    raise OSError(errno.EROFS, os.strerror(errno.EROFS))


#: What ranks that know nothing of each other save, and where.
JOBS = [("model", "out", 1.0), ("state", "out", 4.0), ("model", "out", 2.0), ("adapters", "out", 3.0)]


def save_often(folder: Path, count: int) -> None:
    kind, place, value = JOBS[torch.distributed.get_rank()]
    for _ in range(count):
        KINDS[kind](folder / place, value, SHARDS)
        save_model(folder / "beside", value)


@pytest.mark.parametrize(("size", "count"), [(2, 10), pytest.param(4, 300, marks=pytest.mark.slow)])
def test_processes_save_at_once(size: int, count: int, tmp_path: Path) -> None:
    """Of the same kind, of others, and beside: each ends well, and what is there is whole."""
    run_ranks(save_often, size, tmp_path, count, timeout=400)
    for kind in {kind for kind, _, _ in JOBS[:size]}:
        assert value_of(tmp_path / "out", kind) in [value for k, _, value in JOBS if k == kind]
    assert value_of(tmp_path / "beside", "model") is not None
    for place in ("out", "beside"):
        zerostart.verify(tmp_path / place)
        assert not (tmp_path / place / ".zerostart").exists()


def test_a_prune_that_was_killed_is_finished_by_the_next_one(tmp_path: Path) -> None:
    points = 0
    while True:
        folder = tmp_path / str(points)
        for number in range(2):
            save_state(folder / f"step-{number}", number)
        calls = Calls()
        with calls.watched(chosen=points):
            prune(folder, 1)
        if len(calls.names) <= points:
            break
        there = folder / "step-0" / "state.json" in list(folder.glob("*/state.json"))
        assert not there or zerostart.verify(folder / "step-0").tensors == 6
        prune(folder, 1)
        # A kill before the last step leaves an empty directory.
        found = sorted(path.name for path in folder.iterdir() if any(path.iterdir()))
        assert found == ["step-1"], calls.names[points]
        points += 1
    assert points > 10
