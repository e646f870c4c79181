"""Runs whose ranks share sequences: those of one process, whatever is packed, padded, held out or resumed."""

import math

import pytest

from tests.ranks import run_ranks
from tests.training.loop import test_run, test_weighing
from tests.training.loop.test_resumed_runs import going_on, interrupted
from tests.training.loop.test_run import losses, run
from tests.training.loop.test_weighing import EXACT, alone, first_step
from zerostart.errors import ConfigError
from zerostart.training.config.load import parse_config

running, weighing = test_run.values, test_weighing.values

SOURCE = "qwen3_even"
CASES = [
    ("deepspeed", 2, 2),
    ("fsdp2", 3, 2),
    ("deepspeed", 1, 2),
    ("deepspeed", 3, 2),
    ("deepspeed", 2, 4),
    ("deepspeed", 3, 4),
    ("fsdp2", 1, 2),
    ("fsdp2", 3, 4),
]


def but(fast):
    """All cases, of which only ``fast`` is not slow."""
    return [pytest.param(*case, marks=[] if case == fast else pytest.mark.slow) for case in CASES]


def shared(given, engine, stage, size=2):
    return given | {"engine": {"name": engine, "zero_stage": stage, "sequence_parallel": size}}


@pytest.mark.parametrize(("engine", "stage", "world"), but(("deepspeed", 2, 2)))
def test_a_padded_step_is_that_of_one_process(engine, stage, world, checkpoints, weighing):
    """Batches of padded sequences, one of which predicts nothing; a step of two of them on each two ranks."""
    source = checkpoints(SOURCE)
    given = shared(weighing(source, "causal-lm", engine, stage, 4 // world * 2), engine, stage)
    given["train"] |= {"batch_size": 1, "accumulation": 4 // (world // 2)}
    ranks = run_ranks(first_step, world, given, timeout=200)
    batches = [batch for rank in ranks[::2] for batch in rank["batches"]]
    loss, gradients = alone(source, "causal-lm", batches)
    norm = math.sqrt(sum(gradient.square().sum().item() for gradient in gradients.values()))
    for rank in ranks:
        assert rank["metrics"]["loss"] == pytest.approx(loss, rel=EXACT)
        assert rank["metrics"]["gradient_norm"] == pytest.approx(norm, rel=EXACT)
        wrong = sum((rank["gradients"][n].double() - gradients[n]).square().sum() for n in gradients)
        assert math.sqrt(wrong) < EXACT * norm


@pytest.mark.parametrize(("engine", "stage", "world"), but(("fsdp2", 3, 2)))
def test_a_run_is_that_of_one_process(engine, stage, world, checkpoints, running):
    """Packed sequences, and what is held out."""
    path = checkpoints(SOURCE)
    options = {"max_grad_norm": 0.5, "weight_decay": 0.1}
    groups = world // 2
    straight = run_ranks(run, 1, running(path, output="one", batch_size=8, **options))[0]
    given = running(path, output="shared", batch_size=4 // groups, accumulation=2, **options)
    found = run_ranks(run, world, shared(given, engine, stage))
    assert losses(found[0]) == pytest.approx(losses(straight), rel=1e-5)
    assert found[0].held_out == pytest.approx(straight.held_out, rel=1e-5)
    assert all(one == found[0] for one in found)


CHANGES = [
    (("deepspeed", 3, 2), ("deepspeed", 3, 1)),
    *(
        pytest.param(*pair, marks=pytest.mark.slow)
        for pair in (
            (("deepspeed", 2, 1), ("deepspeed", 3, 2)),
            (("fsdp2", 3, 2), ("deepspeed", 2, 2)),
            (("deepspeed", 1, 2), ("fsdp2", 3, 1)),
        )
    ),
]


@pytest.mark.parametrize(("first", "second"), CHANGES)
def test_a_run_goes_on_where_others_share(first, second, checkpoints, running):
    """On two ranks; a step sees 8 sequences, whether both see the same or each half of them."""
    path, options = checkpoints(SOURCE), {"max_grad_norm": 0.5}
    straight = run_ranks(run, 1, running(path, output="one", batch_size=8, **options))[0]

    def given(engine, stage, size):
        made = running(path, output="shared", batch_size=4, accumulation=size, **options)
        return going_on(shared(made, engine, stage, size))

    run_ranks(interrupted, 2, given(*first), 4)
    found = run_ranks(run, 2, given(*second))
    assert losses(found[0]) == pytest.approx(losses(straight), rel=1e-5)
    assert found[0].held_out == pytest.approx(straight.held_out, rel=1e-5)


def test_only_what_looks_back_is_shared():
    given = {"model": {"source": "x"}, "data": {"source": "x"}, "train": {"steps": 1}}
    given |= {"output": {"directory": "x"}, "engine": {"sequence_parallel": 2}, "task": {"name": "masked-lm"}}
    with pytest.raises(ConfigError, match=r"sequence_parallel 2 is not available with task.name masked-lm"):
        parse_config(given)
