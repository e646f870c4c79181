"""Output directory of a run: files of earlier runs, and two runs at once."""

import json
from pathlib import Path

import pytest

from tests.checkpoint.shared_directory import save_model
from tests.ranks import run_ranks
from tests.training.loop.locks import hold_lock
from tests.training.loop.test_resumed_runs import list_checkpoints, run_interrupted, with_checkpoints
from tests.training.loop.test_run import make_config as make_config
from tests.training.loop.test_run import read_losses, read_metrics, run
from zerostart.distributed.world import World
from zerostart.errors import ConfigError, WriteError
from zerostart.training.config.load import parse_config
from zerostart.training.loop.output_directory import claim_output, remove_earlier_run

WORLD = World(0, 1, None)


def claim(values):
    config = parse_config(values)
    media = [dataset.source for dataset in config.media.sets] if config.media else []
    output = config.output
    resumes = config.resume == "auto"
    return claim_output(output.directory, config.model.source, media, output.overwrite, resumes, WORLD)


def run_old_and_new(old, new, straight):
    """Run straight, then old, then new over old until it dies without a checkpoint."""
    result = run(straight)
    run(old)
    Path(old["output"]["directory"], "checkpoints", "notes.txt").write_text("the user's own")
    run_interrupted({**new, "resume": None, "output": {**new["output"], "overwrite": True}}, 1)
    return result


@pytest.mark.slow
def test_overwritten_run_is_not_resumed(checkpoints, make_config):
    """The old run has other weights, so resuming it would change the losses."""
    old = with_checkpoints(make_config(checkpoints("qwen3"), steps=2, learning_rate=0.3), every=2)
    new = with_checkpoints(make_config(checkpoints("qwen3"), steps=3), every=3)
    (straight,) = run_ranks(
        run_old_and_new, 1, old, new, make_config(checkpoints("qwen3"), output="straight", steps=3)
    )
    assert list_checkpoints(old["output"]["directory"]) == ["notes.txt"]
    (resumed,) = run_ranks(run, 1, new)
    assert [entry["step"] for entry in read_metrics(resumed) if "loss" in entry] == [1, 2, 3]
    assert read_losses(resumed) == read_losses(straight)
    directory = Path(resumed.directory)
    assert list_checkpoints(directory) == ["notes.txt", "step-00000003"]
    assert not [entry.name for entry in directory.iterdir() if entry.name.startswith(".")]


def write_checkpoint(folder, name, saved_at):
    (folder / name).mkdir(parents=True)
    extra = (
        {"step": saved_at, "sequences": 0, "schedule": {}} if name.startswith("step-") else {"step": saved_at}
    )
    document = {"format": 1, "saved_at_ns": saved_at, "extra": extra, "files": {"weights": {"bytes": 0}}}
    (folder / name / "weights").touch()
    (folder / name / "state.json").write_text(json.dumps(document))
    return folder / name


def test_resuming_removes_later_checkpoints(tmp_path):
    folder = tmp_path / "checkpoints"
    first, second, third = (write_checkpoint(folder, f"step-0000000{n}", n) for n in (1, 2, 3))
    user_folder = write_checkpoint(folder, "by-hand", 9)
    (tmp_path / "samples" / "step-00000000").mkdir(parents=True)
    (tmp_path / "link").symlink_to(folder)
    start = tmp_path / "link" / second.name
    remove_earlier_run(tmp_path, start)
    assert not third.exists()
    assert sorted(folder.iterdir()) == [user_folder, first, second]
    assert (tmp_path / "samples" / "step-00000000").is_dir()


def test_user_files_are_kept(tmp_path):
    """Notes next to files of a run stay, and all of a damaged checkpoint."""
    folder = tmp_path / "checkpoints"
    first, second, damaged = (write_checkpoint(folder, f"step-0000000{n}", n) for n in (1, 2, 3))
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
    later = write_checkpoint(folder, "step-00000005", 5)
    remove_earlier_run(tmp_path, write_checkpoint(folder, "step-00000004", 4))
    assert not later.exists()


@pytest.mark.slow
def test_two_runs_cannot_share_a_directory(make_config, tmp_path):
    config = make_config("nowhere")
    directory = Path(config["output"]["directory"])
    with claim(config):
        pass
    assert list(directory.iterdir()) == []
    lock = directory / ".run.lock"
    with hold_lock(lock), pytest.raises(WriteError, match=r"another run uses output\.directory"):
        claim(config).__enter__()
    with claim(config):  # the lock file of a killed run does not block
        assert lock.is_file()


@pytest.mark.parametrize(
    ("source", "output"), [("base", "base"), ("out/base", "out"), ("link", "base"), ("base", "base/vae")]
)
def test_source_is_not_overwritten(source, output, make_config, tmp_path, monkeypatch):
    """Refuse the source, its parent, a component and a link; allow a run inside."""
    monkeypatch.chdir(tmp_path)
    for folder in (source.replace("link", "base"), output):
        Path(folder).mkdir(parents=True, exist_ok=True)
        Path(folder, "config.json").write_text("{}")
    Path("link").symlink_to("base")
    before = sorted(tmp_path.rglob("*"))
    config = make_config(source) | {"output": {"directory": output, "overwrite": True}}
    with pytest.raises(ConfigError, match="which the run trains from"), claim(config):
        pass
    assert sorted(tmp_path.rglob("*")) == before
    Path("base", "run").mkdir(parents=True, exist_ok=True)
    Path("base", "run", "metrics.jsonl").touch()
    config["output"]["directory"] = "base/run"
    with claim(config):
        pass


def test_output_directory_in_the_data_is_refused(make_config, tmp_path):
    """It may be next to the data and next to a table."""
    config = make_config("model") | {"task": {"name": "flow-matching"}, "media": {}}
    (tmp_path / "data" / "deep").mkdir(parents=True)
    (tmp_path / "data" / "metadata.csv").write_text("image,prompt\n")
    (tmp_path / "link").symlink_to(tmp_path / "data" / "deep")
    source = str(tmp_path / "data")
    config["media"]["source"] = source
    for inside in ("data", "data/out", "link/out"):
        config["output"] = {"directory": str(tmp_path / inside)}
        with (
            pytest.raises(ConfigError, match=r"output\.directory .* lies inside media\.source"),
            claim(config),
        ):
            pass
    assert not (tmp_path / "data" / "out").exists()
    for outside, media in (("database", source), ("data/out", f"{source}/metadata.csv")):
        config["output"] = {"directory": str(tmp_path / outside)}
        config["media"]["source"] = media
        with claim(config):
            pass
