"""The output directory of a run: what an earlier one has left there, and two runs at the same time."""

import json
from pathlib import Path

import pytest

from tests.checkpoint.shared_directory import save_model
from tests.ranks import run_ranks
from tests.training.loop.held_locks import lock_held
from tests.training.loop.test_resumed_runs import going_on, interrupted, steps_in
from tests.training.loop.test_run import losses, metrics, run
from tests.training.loop.test_run import values as values
from zerostart.distributed.world import World
from zerostart.errors import ConfigError, WriteError
from zerostart.training.config.load import parse_config
from zerostart.training.loop.output_directory import (
    claim_output,
    remove_earlier_run,
)

ALONE = World(0, 1, None)


def claim(given):
    config = parse_config(given)
    media = [one.source for one in config.media.sets] if config.media else []
    output = config.output
    resumes = config.resume == "auto"
    return claim_output(output.directory, config.model.source, media, output.overwrite, resumes, ALONE)


def overwritten(old, new, straight):
    """A run that never stops; an old one; and one that overwrites that and dies before its checkpoint."""
    result = run(straight)
    run(old)
    Path(old["output"]["directory"], "checkpoints", "notes.txt").write_text("the user's own")
    interrupted({**new, "resume": None, "output": {**new["output"], "overwrite": True}}, 1)
    return result


@pytest.mark.slow
def test_nothing_goes_on_from_what_was_overwritten(checkpoints, values):
    """The old run's weights are other ones: whoever went on from them would have other losses."""
    old = going_on(values(checkpoints("qwen3"), steps=2, learning_rate=0.3), every=2)
    new = going_on(values(checkpoints("qwen3"), steps=3), every=3)
    (straight,) = run_ranks(
        overwritten, 1, old, new, values(checkpoints("qwen3"), output="straight", steps=3)
    )
    assert steps_in(old["output"]["directory"]) == ["notes.txt"]
    (again,) = run_ranks(run, 1, new)
    assert [entry["step"] for entry in metrics(again) if "loss" in entry] == [1, 2, 3]
    assert losses(again) == losses(straight)
    directory = Path(again.directory)
    assert steps_in(directory) == ["notes.txt", "step-00000003"]
    assert not [entry.name for entry in directory.iterdir() if entry.name.startswith(".")]


def checkpoint(folder, name, saved_at):
    (folder / name).mkdir(parents=True)
    extra = (
        {"step": saved_at, "sequences": 0, "schedule": {}} if name.startswith("step-") else {"step": saved_at}
    )
    document = {"format": 1, "saved_at_ns": saved_at, "extra": extra, "files": {"weights": {"bytes": 0}}}
    (folder / name / "weights").touch()
    (folder / name / "state.json").write_text(json.dumps(document))
    return folder / name


def untouched(path):
    """What changes when somebody else writes, replaces or moves it; being read does not count."""
    found = path.stat()
    return found.st_ino, found.st_mode, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def test_going_on_from_an_earlier_checkpoint_leaves_no_later_one(tmp_path):
    folder = tmp_path / "checkpoints"
    first, second, third = (checkpoint(folder, f"step-0000000{n}", n) for n in (1, 2, 3))
    own = checkpoint(folder, "by-hand", 9)
    (tmp_path / "samples" / "step-00000000").mkdir(parents=True)
    (tmp_path / "link").symlink_to(folder)
    given = tmp_path / "link" / second.name
    remove_earlier_run(tmp_path, given)
    assert not third.exists()
    assert sorted(folder.iterdir()) == [own, first, second]
    assert (tmp_path / "samples" / "step-00000000").is_dir()


def test_files_of_others_stay_wherever_they_are(tmp_path):
    """Beside those of a checkpoint, of an export, of an average, of samples; and of what is damaged all."""
    folder = tmp_path / "checkpoints"
    first, second, damaged = (checkpoint(folder, f"step-0000000{n}", n) for n in (1, 2, 3))
    places = [first, second, tmp_path / "samples" / "step-00000001", tmp_path / "exports" / "step-1"]
    for place in (*places, tmp_path / "ema"):
        place.mkdir(parents=True, exist_ok=True)
        (place / "notes").write_text("mine")
    (damaged / "state.json").write_text("{")
    (places[2] / "0-a-dog.png").touch()
    (tmp_path / "samples" / ".git").mkdir()
    (folder / ".cache").mkdir()
    save_model(tmp_path / "exports" / "step-1", 1.0)
    remove_earlier_run(tmp_path, None)
    files = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    assert files == {
        *(str((place / "notes").relative_to(tmp_path)) for place in (*places, tmp_path / "ema")),
        f"checkpoints/{damaged.name}/state.json",
        f"checkpoints/{damaged.name}/weights",
    }
    assert (tmp_path / "samples" / ".git").is_dir()
    assert (folder / ".cache").is_dir()
    again = checkpoint(folder, "step-00000005", 5)
    remove_earlier_run(tmp_path, checkpoint(folder, "step-00000004", 4))
    assert not again.exists()


@pytest.mark.slow
def test_two_runs_are_not_in_one_directory(values, tmp_path):
    given = values("nowhere")
    directory = Path(given["output"]["directory"])
    with claim(given):
        pass
    assert list(directory.iterdir()) == []
    lock = directory / ".run.lock"
    with lock_held(lock), pytest.raises(WriteError, match="another run is at work in"):
        claim(given).__enter__()
    with claim(given):  # what a killed run has left locks nobody out
        assert lock.is_file()


@pytest.mark.parametrize(
    ("source", "output"), [("base", "base"), ("out/base", "out"), ("link", "base"), ("base", "base/vae")]
)
def test_what_is_trained_from_is_not_overwritten(source, output, values, tmp_path, monkeypatch):
    """The place itself, one around it, one of its parts, and by another name; a run's own in it may go."""
    monkeypatch.chdir(tmp_path)
    for folder in (source.replace("link", "base"), output):
        Path(folder).mkdir(parents=True, exist_ok=True)
        Path(folder, "config.json").write_text("{}")
    Path("link").symlink_to("base")
    before = sorted(tmp_path.rglob("*"))
    given = values(source) | {"output": {"directory": output, "overwrite": True}}
    with (
        pytest.raises(ConfigError, match="which the run trains from"),
        claim(given),
    ):
        pass
    assert sorted(tmp_path.rglob("*")) == before
    Path("base", "run").mkdir(parents=True, exist_ok=True)
    Path("base", "run", "metrics.jsonl").touch()
    given["output"]["directory"] = "base/run"
    with claim(given):
        pass


def test_an_output_directory_within_the_data_is_refused(values, tmp_path):
    """By whatever path it is named; next to the data, and next to a table, it may be."""
    given = values("model") | {"task": {"name": "flow-matching"}, "media": {}}
    (tmp_path / "data" / "deep").mkdir(parents=True)
    (tmp_path / "data" / "metadata.csv").write_text("image,prompt\n")
    (tmp_path / "link").symlink_to(tmp_path / "data" / "deep")
    source = str(tmp_path / "data")
    given["media"]["source"] = source
    for inside in ("data", "data/out", "link/out"):
        given["output"] = {"directory": str(tmp_path / inside)}
        with (
            pytest.raises(ConfigError, match=r"output\.directory .* lies inside media\.source"),
            claim(given),
        ):
            pass
    assert not (tmp_path / "data" / "out").exists()
    for beside, named in (("database", source), ("data/out", f"{source}/metadata.csv")):
        given["output"] = {"directory": str(tmp_path / beside)}
        given["media"]["source"] = named
        with claim(given):
            pass
