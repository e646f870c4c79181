"""Runs that are stopped and go on: their losses are those of the run that never stopped."""

import json
import os
import re
import shutil
import signal
from pathlib import Path

import pytest

from tests.ranks import run_ranks
from tests.training.loop.test_run import losses, metrics, run
from tests.training.loop.test_run import values as values
from zerostart.distributed.world import World
from zerostart.errors import ConfigError
from zerostart.training.loop.checkpoints import checkpoint_to_resume

STEPS = 6


def going_on(given, **checkpoint):
    """The configuration of a run with checkpoints that goes on by itself."""
    return given | {"checkpoint": {"every": 3, "keep": 2, **checkpoint}, "resume": "auto"}


def interrupted(given, at):
    """A run that dies after step ``at``, with what is on the disk then."""
    from zerostart.training.loop.runner import _Run

    step = _Run._step

    def dying(self, number, batches):
        if number > at:
            raise OSError("the machine is gone")
        step(self, number, batches)

    _Run._step = dying
    with pytest.raises(OSError, match="the machine is gone"):
        run(given)


def steps_in(folder):
    return sorted(path.name for path in Path(folder).glob("checkpoints/*"))


@pytest.mark.parametrize("engine", ["deepspeed", pytest.param("fsdp2", marks=pytest.mark.slow)])
def test_the_losses_go_on_exactly(engine, checkpoints, values):
    path, options = checkpoints("qwen3"), {"steps": STEPS, "accumulation": 2, "max_grad_norm": 0.5}
    straight = run_ranks(run, 2, values(path, engine, "straight", **options))[0]
    given = going_on(values(path, engine, "resumed", **options), background=engine == "fsdp2")
    run_ranks(interrupted, 2, given, 4)
    directory = given["output"]["directory"]
    assert steps_in(directory) == ["step-00000003"]
    resumed = run_ranks(run, 2, given)
    assert losses(resumed[0]) == losses(straight)
    assert [entry["step"] for entry in metrics(resumed[0])] == [entry["step"] for entry in metrics(straight)]
    assert resumed[0].held_out == straight.held_out
    assert (resumed[0].steps, resumed[0].first_loss) == (STEPS, straight.first_loss)
    assert all(one == resumed[0] for one in resumed)
    assert steps_in(directory) == ["step-00000003", "step-00000006"]


@pytest.mark.slow
def test_the_checkpoints_of_the_lowest_held_out_loss_stay(checkpoints, values):
    given = values(checkpoints("qwen3"), steps=STEPS, evaluate_every=1, learning_rate=0.5)
    kept = {"every": 1, "keep": 1, "best": 2}
    result = run_ranks(run, 2, given | {"checkpoint": kept})[0]
    told = {entry["held_out_loss"]: entry["step"] for entry in metrics(result) if "held_out_loss" in entry}
    best = [step for _, step in sorted(told.items()) if step][:2]
    assert steps_in(result.directory) == sorted({f"step-{step:08d}" for step in [*best, STEPS]})


def refused(given):
    with pytest.raises(ConfigError) as caught:
        run(given)
    return str(caught.value)


@pytest.mark.slow
def test_what_cannot_be_gone_on_with_is_named(checkpoints, values, tmp_path):
    """And a run that was asked to go on before it had a checkpoint begins anew."""
    given = going_on(values(checkpoints("qwen3"), output="out", steps=2), every=2)
    run_ranks(interrupted, 1, given, 1)
    assert steps_in(given["output"]["directory"]) == []
    fresh = run_ranks(run, 1, given)[0]
    assert [entry["step"] for entry in metrics(fresh) if "loss" in entry] == [1, 2]
    (message,) = run_ranks(refused, 1, given | {"resume": None})
    assert "continue its run with resume=auto" in message
    elsewhere = given | {"output": {"directory": str(tmp_path / "other")}}
    (message,) = run_ranks(refused, 1, elsewhere | {"resume": str(tmp_path)})
    last = Path(given["output"]["directory"], "checkpoints", "step-00000002")
    assert f"{tmp_path} is not a complete checkpoint; the newest near it is {last}" in message
    Path(given["task"]["source"]).write_text("another text, and another. " * 40)
    shutil.rmtree(tmp_path / "other")
    elsewhere |= {"resume": str(last), "train": given["train"] | {"seed": 7, "batch_size": 1}}
    (message,) = run_ranks(refused, 1, elsewhere)
    assert f"{last} belongs to another run: data was " in message
    assert "; train.seed was 42 and is 7. Restore the earlier values, or start a new run" in message


#: What is trained, by how many; where it goes on, by how many; how near the losses are (0.0: the same bits).
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
def test_it_goes_on_elsewhere(first, before, second, after, tolerance, checkpoints, values):
    """A step is of 4 sequences everywhere, and an epoch, which ends within the run, of 12."""
    path = checkpoints("qwen3")

    def configured(engine, ranks, output):
        given = values(path, output=output, steps=6, batch_size=1, accumulation=4 // ranks)
        given["task"] |= {"sequence_length": 128, "held_out": 0.25}
        return given | {"engine": engine}

    straight = run_ranks(run, before, configured(first, before, "straight"))[0]
    assert metrics(straight)
    run_ranks(interrupted, before, going_on(configured(first, before, "resumed"), every=3), 5)
    resumed = run_ranks(run, after, going_on(configured(second, after, "resumed"), every=3))[0]
    if tolerance:
        assert losses(resumed) == pytest.approx(losses(straight), rel=tolerance)
    else:
        assert losses(resumed) == losses(straight)


def stopped(given, at):
    """A run that is asked to stop in step ``at``."""
    from zerostart.training.loop.session import Session

    update = Session.update
    steps = []

    def interrupting(self):
        steps.append(None)
        if len(steps) == at:
            os.kill(os.getpid(), signal.SIGTERM)
        return update(self)

    Session.update = interrupting
    return run(given)


@pytest.mark.slow
def test_a_run_that_is_asked_to_stop_goes_on(checkpoints, values):
    straight = run_ranks(run, 2, values(checkpoints("qwen3"), output="straight", steps=STEPS))[0]
    given = going_on(values(checkpoints("qwen3"), output="resumed", steps=STEPS), every=100)
    early = run_ranks(stopped, 2, given, 3)[0]
    assert (early.steps, early.stopped) == (3, True)
    assert losses(run_ranks(run, 2, given)[0]) == losses(straight)


def test_a_wrong_path_is_answered_with_the_newest_state(tmp_path):
    """The output directory, its folder of checkpoints, a folder in one, and a step that was removed."""
    folder = tmp_path / "run" / "checkpoints"
    for step in (1, 2):
        place = folder / f"step-0000000{step}"
        (place / "model").mkdir(parents=True)
        document = {"format": 1, "saved_at_ns": step, "extra": {}, "files": {}}
        (place / "state.json").write_text(json.dumps(document))
    newest, old = folder / "step-00000002", folder / "step-00000001"
    wrong_paths = (tmp_path, tmp_path / "run", folder, newest / "model", folder / "step-00000007")
    for wrong, state in (*((path, newest) for path in wrong_paths), (old / "model", old)):
        message = f"{wrong} is not a complete checkpoint; the newest near it is {state}"
        with pytest.raises(ConfigError, match=re.escape(message)):
            checkpoint_to_resume(str(wrong), tmp_path / "other", World(0, 1, None))
    with pytest.raises(ConfigError, match=r"is none .leave resume out to begin at step 0"):
        checkpoint_to_resume(str(tmp_path / "a" / "b" / "c" / "d"), tmp_path, World(0, 1, None))
    assert checkpoint_to_resume("auto", tmp_path / "other", World(0, 1, None)) is None
