"""Flow matching on several ranks: losses and weights of one process in plain torch that sees all examples."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.optim.optimizer import register_optimizer_step_pre_hook

from tests.ranks import run_ranks
from tests.training.diffusion.flow_items import (
    FAMILIES,
    configured,
    losses_alone,
    mean_alone,
    opened,
    recorded_run,
    train_alone,
)
from tests.training.diffusion.flow_pipelines import PIPELINES, drawn_by, save_pipeline

#: What the runner promises in fp32: of losses relative, of weights relative to their norm.
EXACT = 1e-5
#: A key's bias shifts all scores of a query alike, which a softmax does not feel: its gradient is rounding,
#: of which AdamW makes steps as large as of any.
UNFELT = "token_refiner.refiner_blocks.0.attn.to_k.bias"


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
        if name.endswith(UNFELT):
            continue
        wrong = torch.linalg.vector_norm(found[name].double() - tensor.double())
        assert wrong <= EXACT * max(1.0, torch.linalg.vector_norm(tensor.double())), name


def check(values, family, ranks):
    """That a run is that of one process, and its losses are its own."""
    found = run_ranks(recorded_run, ranks, values, timeout=280)
    train = values["train"]
    steps = by_steps(found, train.get("accumulation", 1))[-len(found[0]["losses"]) :]
    losses, weights = train_alone(values, family, steps)
    assert found[0]["losses"] == pytest.approx(losses, rel=EXACT)
    folder = "transformer" if values["output"].get("pipeline") else "."
    assert_equal_weights(saved(Path(found[0]["directory"], folder)), weights)
    assert losses[0] != losses[-1]
    return found


CASES = [
    (family, engine, stage, checkpointing)
    for family in FAMILIES
    for engine, stage in (("deepspeed", 2), ("deepspeed", 3), ("fsdp2", 3))
    for checkpointing in (False, True, "offload")
]


def test_a_run_is_that_of_one_process(tmp_path):
    """Texts of several lengths; a step is of 2 batches of 2 on 2 ranks, over the end of an epoch of 12.

    The last block's text goes nowhere: without a gradient it does not decay.
    """
    values = configured(tmp_path, "qwen-image", "deepspeed", 3, accumulation=2, weight_decay=0.5)
    found = check(values, "qwen-image", 2)
    assert found[0]["items"] == [8, 8, 8]
    draws = {(number, t) for rank in found for batch in rank["batches"] for number, t, _ in batch}
    assert len(draws) == 24  # in another epoch an example has another time


@pytest.mark.slow
def test_on_fsdp2_and_with_what_is_held_out(tmp_path):
    values = configured(tmp_path, "wan", "fsdp2", 3, weight_decay=0.5)
    values["task"] |= {"held_out": 0.25, "shift": 2.0, "sampling": "logit-normal"}
    values["output"]["pipeline"] = True
    found = check(values, "wan", 2)
    scheduler = Path("scheduler", "scheduler_config.json")
    assert Path(found[0]["directory"], scheduler).samefile(Path(values["model"]["source"], scheduler))
    assert Path(found[0]["directory"], "model_index.json").is_file()
    assert all(number < 9 for rank in found for batch in rank["batches"] for number, _, _ in batch)
    assert found[0]["held_out"].keys() == {0, 3}
    assert found[0]["held_out"] == found[1]["held_out"]


@pytest.mark.slow
@pytest.mark.parametrize(("family", "engine", "stage", "blocks"), CASES)
def test_every_family_is_trained_as_by_one_process(family, engine, stage, blocks, tmp_path):
    values = configured(tmp_path, family, engine, stage, steps=30, weight_decay=0.1, checkpoint_blocks=blocks)
    check(values, family, 2)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "engine", "stage"), [("wan", "deepspeed", 2), ("qwen-image", "fsdp2", 3)])
def test_buckets_of_batches(family, engine, stage, tmp_path):
    """Latents of two sizes, in a step of 3 batches a rank, each of one; held-out batches are not full."""
    values = configured(tmp_path, family, engine, stage, count=41, sizes=2, accumulation=3, weight_decay=0.1)
    values["task"] |= {"held_out": 0.17, "shift": 2.0}
    found = check(values, family, 2)
    items = torch.load(values["task"]["path"])
    shapes = [{items[number]["latents"].shape for number, *_ in batch} for batch in found[0]["batches"]]
    assert all(len(shape) == 1 for shape in shapes)
    assert len(set.union(*shapes)) == 2
    held = {number: (number, *drawn) for rank in found for number, *drawn in rank["held"]}
    assert sorted(held) == list(range(34, 41))
    draws, model = list(held.values()), opened(values, family)
    with torch.no_grad():
        before = mean_alone(model, items, family, draws).item()
        model.load_state_dict(saved(found[0]["directory"]))
        after = mean_alone(model, items, family, draws).item()
    assert found[0]["held_out"] == pytest.approx({0: before, 3: after}, rel=EXACT)


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "stage"), [("fsdp2", 0), ("deepspeed", 0), ("deepspeed", 1)])
def test_replicas_of_what_is_not_used_whole(engine, stage, tmp_path):
    """The last block's text of Qwen-Image goes nowhere: DDP has to look for such gradients."""
    check(configured(tmp_path, "qwen-image", engine, stage, weight_decay=0.5), "qwen-image", 2)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
def test_decay_where_optimizers_step_parts(stage, tmp_path):
    """Sub-groups of ZeRO-3, and states on the host."""
    values = configured(tmp_path, "qwen-image", "deepspeed", stage, weight_decay=0.5)
    settings = {"sub_group_size": 20_000, "offload_optimizer": {"device": "cpu"}}
    values["engine"]["config"] = {"zero_optimization": settings, "zero_force_ds_cpu_optimizer": False}
    check(values, "qwen-image", 2)


@pytest.mark.slow
def test_replicas_but_for_gradients_that_are_rounding(tmp_path):
    """AdamW makes a step as large as any of a gradient of 1e-9, of which fp32 has a digit or two.

    Z-Image on DDP has one element so of 32768 of what times go through: it is 5e-5 off, as one process is
    off what it has in fp64; all others are near enough.
    """
    values = configured(tmp_path, "z-image", "fsdp2", 0)
    found = run_ranks(recorded_run, 2, values, timeout=280)
    first, model = {}, opened(values, "z-image")

    def look(*_):
        for name, parameter in model.named_parameters():
            first.setdefault(name, parameter.grad.clone())

    looking = register_optimizer_step_pre_hook(look)
    try:
        losses = losses_alone(model, values, "z-image", by_steps(found, 1))
    finally:
        looking.remove()
    assert found[0]["losses"] == pytest.approx(losses, rel=EXACT)
    weights = saved(found[0]["directory"])
    for name, tensor in model.state_dict().items():
        rounding = first[name].abs() < 1e-8  # AdamW's eps; of no gradient at all there is no step
        assert (rounding & (first[name] != 0)).sum() <= max(2, 1e-4 * tensor.numel()), name
        weights[name][rounding] = tensor[rounding]
    assert_equal_weights(weights, model.state_dict())


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize(("engine", "stage"), [("deepspeed", 2), ("deepspeed", 3), ("fsdp2", 3)])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_run_goes_on_on_other_ranks(family, engine, stage, ranks, tmp_path):
    """It dies after step 17 of 30 on 2 ranks, and goes on from 15 on 1 or 3; a step is of 6 examples."""
    values = configured(tmp_path, family, engine, stage, steps=30, batch_size=3, weight_decay=0.1)
    values |= {"checkpoint": {"every": 15}, "resume": "auto"}
    first = run_ranks(recorded_run, 2, values, 17, timeout=280)
    values["train"]["batch_size"] = 6 // ranks
    second = run_ranks(recorded_run, ranks, values, timeout=280)
    steps = [*by_steps(first, 1)[:15], *by_steps(second, 1)]
    losses, weights = train_alone(values, family, steps)
    assert second[0]["losses"] == pytest.approx(losses, rel=EXACT)
    assert_equal_weights(saved(second[0]["directory"]), weights)


@pytest.mark.slow
@pytest.mark.parametrize("family", PIPELINES)
def test_a_pipeline_draws_what_the_trained_model_does(family, tmp_path):
    """That of diffusers, opened from what was saved, and with the weights that were in memory in the end."""
    values = configured(tmp_path, family, "deepspeed", 3)
    values["model"]["source"] = str(save_pipeline(tmp_path / "pipeline", family))
    values["output"]["pipeline"] = True
    found = run_ranks(recorded_run, 2, values, timeout=280)[0]
    picture = drawn_by(found["directory"], family)
    assert torch.equal(picture, drawn_by(values["model"]["source"], family, found["weights"]))
    assert not torch.equal(picture, drawn_by(values["model"]["source"], family))


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "stage"), [("deepspeed", 2), ("deepspeed", 3), ("fsdp2", 3)])
@pytest.mark.parametrize("family", FAMILIES)
def test_in_bf16_the_losses_are_near(family, engine, stage, tmp_path):
    """Times are told in 16 bits, and latents mixed at just these."""
    values = configured(tmp_path, family, engine, stage, mixed_precision="bf16")
    values["task"]["held_out"] = 0.25
    found = run_ranks(recorded_run, 1, values, timeout=280)[0]
    unit = 1000 if family in ("wan", "hunyuan-video", "ltx2") else 1  # as its pipeline tells times
    told = unit * torch.tensor([t for batch in found["batches"] for _, t, _ in batch])
    torch.testing.assert_close(told, told.bfloat16().float(), rtol=1e-6, atol=0)
    losses, _ = train_alone(values, family, by_steps([found], 1)[:1])
    assert found["losses"][0] == pytest.approx(losses[0], rel=0.03)
    assert all(loss == loss for loss in found["losses"])
