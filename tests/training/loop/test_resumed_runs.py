"""Stopped runs resume with the losses of a run that never stopped."""

import json
import os
import re
import shutil
import signal
from pathlib import Path

import pytest

from tests.ranks import run_ranks
from tests.training.loop.test_run import make_config as make_config
from tests.training.loop.test_run import read_losses, read_metrics, run
from zerostart.distributed.world import World
from zerostart.errors import ConfigError
from zerostart.training.loop.checkpoints import checkpoint_to_resume

STEPS = 6


def with_checkpoints(config, **checkpoint):
    """Return the configuration with checkpoints and automatic resuming."""
    return config | {"checkpoint": {"every": 3, "keep": 2, **checkpoint}, "resume": "auto"}


def run_interrupted(config, at):
    """Run, and raise an error after step ``at``."""
    from zerostart.training.loop.runner import _Run

    step = _Run._step

    def step_or_die(self, number, batches):
        if number > at:
            raise OSError("the machine is gone")
        step(self, number, batches)

    _Run._step = step_or_die
    with pytest.raises(OSError, match="the machine is gone"):
        run(config)


def list_checkpoints(folder):
    return sorted(path.name for path in Path(folder).glob("checkpoints/*"))


@pytest.mark.parametrize("engine", ["deepspeed", pytest.param("fsdp2", marks=pytest.mark.slow)])
def test_resumed_losses_are_exact(engine, checkpoints, make_config):
    path, options = checkpoints("qwen3"), {"steps": STEPS, "accumulation": 2, "max_grad_norm": 0.5}
    straight = run_ranks(run, 2, make_config(path, engine, "straight", **options))[0]
    config = with_checkpoints(make_config(path, engine, "resumed", **options), background=engine == "fsdp2")
    run_ranks(run_interrupted, 2, config, 4)
    directory = config["output"]["directory"]
    assert list_checkpoints(directory) == ["step-00000003"]
    resumed = run_ranks(run, 2, config)
    assert read_losses(resumed[0]) == read_losses(straight)
    assert [entry["step"] for entry in read_metrics(resumed[0])] == [
        entry["step"] for entry in read_metrics(straight)
    ]
    assert resumed[0].held_out == straight.held_out
    assert (resumed[0].steps, resumed[0].first_loss) == (STEPS, straight.first_loss)
    assert all(outcome == resumed[0] for outcome in resumed)
    assert list_checkpoints(directory) == ["step-00000003", "step-00000006"]


@pytest.mark.slow
def test_checkpoints_with_the_lowest_held_out_loss_are_kept(checkpoints, make_config):
    config = make_config(checkpoints("qwen3"), steps=STEPS, evaluate_every=1, learning_rate=0.5)
    checkpoint = {"every": 1, "keep": 1, "best": 2}
    result = run_ranks(run, 2, config | {"checkpoint": checkpoint})[0]
    steps = {
        entry["held_out_loss"]: entry["step"] for entry in read_metrics(result) if "held_out_loss" in entry
    }
    best = [step for _, step in sorted(steps.items()) if step][:2]
    assert list_checkpoints(result.directory) == sorted({f"step-{step:08d}" for step in [*best, STEPS]})


def run_refused(config):
    with pytest.raises(ConfigError) as caught:
        run(config)
    return str(caught.value)


@pytest.mark.slow
def test_unsuitable_checkpoints_are_named(checkpoints, make_config, tmp_path):
    """A run that resumes before its first checkpoint starts at step 0."""
    config = with_checkpoints(make_config(checkpoints("qwen3"), output="out", steps=2), every=2)
    run_ranks(run_interrupted, 1, config, 1)
    assert list_checkpoints(config["output"]["directory"]) == []
    fresh = run_ranks(run, 1, config)[0]
    assert [entry["step"] for entry in read_metrics(fresh) if "loss" in entry] == [1, 2]
    (message,) = run_ranks(run_refused, 1, config | {"resume": None})
    assert "continue its run with resume=auto" in message
    elsewhere = config | {"output": {"directory": str(tmp_path / "other")}}
    (message,) = run_ranks(run_refused, 1, elsewhere | {"resume": str(tmp_path)})
    last = Path(config["output"]["directory"], "checkpoints", "step-00000002")
    assert f"{tmp_path} is not a complete checkpoint; the newest near it is {last}" in message
    Path(config["task"]["source"]).write_text("another text, and another. " * 40)
    shutil.rmtree(tmp_path / "other")
    elsewhere |= {"resume": str(last), "train": config["train"] | {"seed": 7, "batch_size": 1}}
    (message,) = run_ranks(run_refused, 1, elsewhere)
    assert f"{last} belongs to another run: data was " in message
    assert "; train.seed was 42 and is 7. Restore the earlier values, or start a new run" in message


#: Engine and ranks before and after, and the relative error of the losses (0.0: equal bits).
MOVES = [
    ({"name": "deepspeed"}, 2, {"name": "fsdp2"}, 1, 1e-5),
    ({"name": "fsdp2"}, 2, {"name": "deepspeed"}, 1, 1e-5),
    ({"name": "deepspeed", "zero_stage": 2}, 4, {"name": "deepspeed"}, 2, 1e-5),
    ({"name": "deepspeed"}, 1, {"name": "deepspeed", "zero_stage": 1}, 4, 1e-5),
    ({"name": "deepspeed", "zero_stage": 1}, 2, {"name": "deepspeed", "zero_stage": 1}, 2, 0.0),
    ({"name": "deepspeed", "zero_stage": 0}, 2, {"name": "deepspeed", "zero_stage": 0}, 2, 0.0),
    ({"name": "fsdp2", "zero_stage": 0}, 2, {"name": "fsdp2", "zero_stage": 0}, 2, 0.0),
]


@pytest.mark.slow
@pytest.mark.parametrize(("first", "before", "second", "after", "tolerance"), MOVES)
def test_run_resumes_on_other_engines_and_ranks(
    first, before, second, after, tolerance, checkpoints, make_config
):
    """A step has 4 sequences, and an epoch of 12 ends within the run."""
    path = checkpoints("qwen3")

    def configure(engine, ranks, output):
        config = make_config(path, output=output, steps=6, batch_size=1, accumulation=4 // ranks)
        config["task"] |= {"sequence_length": 128, "held_out": 0.25}
        return config | {"engine": engine}

    straight = run_ranks(run, before, configure(first, before, "straight"))[0]
    assert read_metrics(straight)
    run_ranks(run_interrupted, before, with_checkpoints(configure(first, before, "resumed"), every=3), 5)
    resumed = run_ranks(run, after, with_checkpoints(configure(second, after, "resumed"), every=3))[0]
    if tolerance:
        assert read_losses(resumed) == pytest.approx(read_losses(straight), rel=tolerance)
    else:
        assert read_losses(resumed) == read_losses(straight)


def run_and_stop(config, at):
    """Run, and send SIGTERM in step ``at``."""
    from zerostart.training.loop.session import Session

    update = Session.update
    steps = []

    def update_and_stop(self):
        steps.append(None)
        if len(steps) == at:
            os.kill(os.getpid(), signal.SIGTERM)
        return update(self)

    Session.update = update_and_stop
    return run(config)


@pytest.mark.slow
def test_stopped_run_resumes(checkpoints, make_config):
    straight = run_ranks(run, 2, make_config(checkpoints("qwen3"), output="straight", steps=STEPS))[0]
    config = with_checkpoints(make_config(checkpoints("qwen3"), output="resumed", steps=STEPS), every=100)
    early = run_ranks(run_and_stop, 2, config, 3)[0]
    assert (early.steps, early.stopped) == (3, True)
    assert read_losses(run_ranks(run, 2, config)[0]) == read_losses(straight)


def test_wrong_path_suggests_the_newest_checkpoint(tmp_path):
    """Wrong paths: output directory, checkpoints folder, folder in a checkpoint, removed step."""
    folder = tmp_path / "run" / "checkpoints"
    for step in (1, 2):
        checkpoint = folder / f"step-0000000{step}"
        (checkpoint / "model").mkdir(parents=True)
        document = {"format": 1, "saved_at_ns": step, "extra": {}, "files": {}}
        (checkpoint / "state.json").write_text(json.dumps(document))
    newest, old = folder / "step-00000002", folder / "step-00000001"
    wrong_paths = (tmp_path, tmp_path / "run", folder, newest / "model", folder / "step-00000007")
    for wrong, state in (*((path, newest) for path in wrong_paths), (old / "model", old)):
        message = f"{wrong} is not a complete checkpoint; the newest near it is {state}"
        with pytest.raises(ConfigError, match=re.escape(message)):
            checkpoint_to_resume(str(wrong), tmp_path / "other", World(0, 1, None))
    with pytest.raises(ConfigError, match=r"is none .leave resume out to begin at step 0"):
        checkpoint_to_resume(str(tmp_path / "a" / "b" / "c" / "d"), tmp_path, World(0, 1, None))
    assert checkpoint_to_resume("auto", tmp_path / "other", World(0, 1, None)) is None
