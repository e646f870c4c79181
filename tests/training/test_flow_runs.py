"""Flow matching on several ranks: losses and weights of one process in plain torch that sees all examples."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.training.flow_items import FAMILIES, configured, recorded_run, train_alone

from ranks import run_ranks

#: What the runner promises in fp32: of losses relative, of weights relative to their norm.
EXACT = 1e-5


def by_steps(ranks, accumulation):
    """What was drawn for each step, by all ranks."""
    batches = [rank["batches"] for rank in ranks]
    steps = len(batches[0]) // accumulation
    return [
        [
            one
            for rank in batches
            for batch in rank[k * accumulation : (k + 1) * accumulation]
            for one in batch
        ]
        for k in range(steps)
    ]


def saved(directory):
    """Everything in the weights files of a directory."""
    tensors = {}
    for file in sorted(Path(directory).glob("*.safetensors")):
        tensors |= load_file(file)
    return tensors


def assert_equal_weights(found, wanted):
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        wrong = torch.linalg.vector_norm(found[name].double() - tensor.double())
        assert wrong <= EXACT * max(1.0, torch.linalg.vector_norm(tensor.double())), name


def check(values, family, ranks):
    """That a run is that of one process, and its losses are its own."""
    found = run_ranks(recorded_run, ranks, values, timeout=280)
    train = values["train"]
    steps = by_steps(found, train.get("accumulation", 1))[-len(found[0]["losses"]) :]
    losses, weights = train_alone(values, family, steps)
    assert found[0]["losses"] == pytest.approx(losses, rel=EXACT)
    assert_equal_weights(saved(found[0]["directory"]), weights)
    assert losses[0] != losses[-1]
    return found


CASES = [
    (family, engine, stage, checkpointing)
    for family in FAMILIES
    for engine, stage in (("deepspeed", 2), ("deepspeed", 3), ("fsdp2", 3))
    for checkpointing in (False, True, "offload")
]


def test_a_run_is_that_of_one_process(tmp_path):
    """Texts of several lengths; a step is of 2 batches of 2 on 2 ranks, over the end of an epoch of 12."""
    values = configured(tmp_path, "qwen-image", "deepspeed", 3, accumulation=2)
    found = check(values, "qwen-image", 2)
    assert found[0]["items"] == [8, 8, 8]
    draws = {(number, t) for rank in found for batch in rank["batches"] for number, t, _ in batch}
    assert len(draws) == 24  # in another epoch an example has another time


def test_on_fsdp2_and_with_what_is_held_out(tmp_path):
    values = configured(tmp_path, "wan", "fsdp2", 3)
    values["task"] |= {"held_out": 0.25, "shift": 2.0, "sampling": "logit-normal"}
    found = check(values, "wan", 2)
    assert all(number < 9 for rank in found for batch in rank["batches"] for number, _, _ in batch)
    assert found[0]["held_out"].keys() == {0, 3}
    assert found[0]["held_out"] == found[1]["held_out"]


@pytest.mark.slow
@pytest.mark.parametrize(("family", "engine", "stage", "checkpointing"), CASES)
def test_every_family_is_trained_as_by_one_process(family, engine, stage, checkpointing, tmp_path):
    values = configured(tmp_path, family, engine, stage, steps=30, checkpoint_blocks=checkpointing)
    check(values, family, 2)
