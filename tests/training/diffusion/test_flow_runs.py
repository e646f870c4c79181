"""Flow matching on several ranks equals plain torch in one process."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.optim.optimizer import register_optimizer_step_pre_hook

from tests.ranks import run_ranks
from tests.training.diffusion.flow_items import (
    FAMILIES,
    compute_loss,
    load_transformer,
    make_config,
    run_and_record,
    train_model,
    train_reference,
)
from tests.training.diffusion.flow_pipelines import PIPELINES, draw_with_pipeline, save_pipeline

#: Error that the runner promises in fp32, relative to a loss or to the norm of a weight.
RTOL = 1e-5
#: AdamW's default of 1e-8 turns the rounding of a gradient near zero into a full step.
EPS = {"eps": 1e-6}
#: A bias of attention keys, which has no effect on the softmax: AdamW turns the rounding in its gradient into
#: full steps.
KEY_BIAS = "token_refiner.refiner_blocks.0.attn.to_k.bias"


def group_by_step(ranks, accumulation):
    """Return the draws of each step, of all ranks."""
    batches = [rank["batches"] for rank in ranks]
    steps = len(batches[0]) // accumulation
    return [
        [
            draw
            for rank in batches
            for batch in rank[k * accumulation : (k + 1) * accumulation]
            for draw in batch
        ]
        for k in range(steps)
    ]


def load_weights(directory):
    tensors = {}
    for file in sorted(Path(directory).glob("*.safetensors")):
        tensors |= load_file(file)
    return tensors


def assert_equal_weights(actual, expected):
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        if name.endswith(KEY_BIAS):
            continue
        wrong = torch.linalg.vector_norm(actual[name].double() - tensor.double())
        assert wrong <= RTOL * max(1.0, torch.linalg.vector_norm(tensor.double())), name


def check_run(values, family, ranks):
    """Compare losses and weights of a run with those of one process."""
    results = run_ranks(run_and_record, ranks, values, timeout=280)
    train = values["train"]
    steps = group_by_step(results, train.get("accumulation", 1))[-len(results[0]["losses"]) :]
    losses, weights = train_reference(values, family, steps)
    assert results[0]["losses"] == pytest.approx(losses, rel=RTOL)
    folder = "transformer" if values["output"].get("pipeline") else "."
    assert_equal_weights(load_weights(Path(results[0]["directory"], folder)), weights)
    assert losses[0] != losses[-1]
    return results


CASES = [
    (family, engine, stage, checkpointing)
    for family in FAMILIES
    for engine, stage in (("deepspeed", 2), ("deepspeed", 3), ("fsdp2", 3))
    for checkpointing in (False, True, "offload")
]


def test_run_equals_one_process(tmp_path):
    """Use texts of several lengths, accumulation, and steps across the end of an epoch.

    The text of the last block has no gradient, so it must not decay.
    """
    values = make_config(tmp_path, "qwen-image", "deepspeed", 3, accumulation=2, weight_decay=0.5)
    results = check_run(values, "qwen-image", 2)
    assert results[0]["items"] == [8, 8, 8]
    draws = {(number, t) for rank in results for batch in rank["batches"] for number, t, _ in batch}
    assert len(draws) == 24  # an example has another time in each epoch


@pytest.mark.slow
def test_fsdp2_with_held_out_examples(tmp_path):
    values = make_config(tmp_path, "wan", "fsdp2", 3, weight_decay=0.5)
    values["task"] |= {"held_out": 0.25, "shift": 2.0, "sampling": "logit-normal"}
    values["output"]["pipeline"] = True
    results = check_run(values, "wan", 2)
    scheduler = Path("scheduler", "scheduler_config.json")
    assert Path(results[0]["directory"], scheduler).samefile(Path(values["model"]["source"], scheduler))
    assert Path(results[0]["directory"], "model_index.json").is_file()
    assert all(number < 9 for rank in results for batch in rank["batches"] for number, _, _ in batch)
    assert results[0]["held_out"].keys() == {0, 3}
    assert results[0]["held_out"] == results[1]["held_out"]


@pytest.mark.slow
@pytest.mark.parametrize(("family", "engine", "stage", "blocks"), CASES)
def test_every_family_equals_one_process(family, engine, stage, blocks, tmp_path):
    values = make_config(
        tmp_path,
        family,
        engine,
        stage,
        steps=30,
        weight_decay=0.1,
        checkpoint_blocks=blocks,
        optimizer_args=EPS,
    )
    check_run(values, family, 2)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "engine", "stage"), [("wan", "deepspeed", 2), ("qwen-image", "fsdp2", 3)])
def test_buckets_of_batches(family, engine, stage, tmp_path):
    """A batch has latents of one size; held-out batches may be partly filled."""
    values = make_config(tmp_path, family, engine, stage, count=41, sizes=2, accumulation=3, weight_decay=0.1)
    values["task"] |= {"held_out": 0.17, "shift": 2.0}
    results = check_run(values, family, 2)
    items = torch.load(values["task"]["path"])
    shapes = [{items[number]["latents"].shape for number, *_ in batch} for batch in results[0]["batches"]]
    assert all(len(shape) == 1 for shape in shapes)
    assert len(set.union(*shapes)) == 2
    held_out = {number: (number, *draw) for rank in results for number, *draw in rank["held"]}
    assert sorted(held_out) == list(range(34, 41))
    draws, model = list(held_out.values()), load_transformer(values, family)
    with torch.no_grad():
        before = compute_loss(model, items, family, draws).item()
        model.load_state_dict(load_weights(results[0]["directory"]))
        after = compute_loss(model, items, family, draws).item()
    assert results[0]["held_out"] == pytest.approx({0: before, 3: after}, rel=RTOL)


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "stage"), [("fsdp2", 0), ("deepspeed", 0), ("deepspeed", 1)])
def test_replicas_with_unused_parameters(engine, stage, tmp_path):
    """The last text block of Qwen-Image gets no gradient, which DDP must detect."""
    check_run(make_config(tmp_path, "qwen-image", engine, stage, weight_decay=0.5), "qwen-image", 2)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
def test_decay_with_sub_groups_and_offload(stage, tmp_path):
    values = make_config(tmp_path, "qwen-image", "deepspeed", stage, weight_decay=0.5)
    settings = {"sub_group_size": 20_000, "offload_optimizer": {"device": "cpu"}}
    values["engine"]["config"] = {"zero_optimization": settings, "zero_force_ds_cpu_optimizer": False}
    check_run(values, "qwen-image", 2)


@pytest.mark.slow
def test_replicas_except_for_rounding_in_gradients(tmp_path):
    """AdamW turns a gradient of 1e-9, which is mostly rounding, into a full step.

    Z-Image has such a gradient in one of 32768 elements for times: it is 5e-5 off, like one process in fp32
    against fp64.
    """
    values = make_config(tmp_path, "z-image", "fsdp2", 0)
    results = run_ranks(run_and_record, 2, values, timeout=280)
    first_gradients, model = {}, load_transformer(values, "z-image")

    def record_gradients(*_):
        for name, parameter in model.named_parameters():
            first_gradients.setdefault(name, parameter.grad.clone())

    hook = register_optimizer_step_pre_hook(record_gradients)
    try:
        losses = train_model(model, values, "z-image", group_by_step(results, 1))
    finally:
        hook.remove()
    assert results[0]["losses"] == pytest.approx(losses, rel=RTOL)
    weights = load_weights(results[0]["directory"])
    for name, tensor in model.state_dict().items():
        rounding = first_gradients[name].abs() < 1e-8  # AdamW's eps; a gradient of zero makes no step
        assert (rounding & (first_gradients[name] != 0)).sum() <= max(2, 1e-4 * tensor.numel()), name
        weights[name][rounding] = tensor[rounding]
    assert_equal_weights(weights, model.state_dict())


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize(("engine", "stage"), [("deepspeed", 2), ("deepspeed", 3), ("fsdp2", 3)])
@pytest.mark.parametrize("family", FAMILIES)
def test_run_resumes_on_other_ranks(family, engine, stage, ranks, tmp_path):
    """The run fails after step 17 of 30, and resumes from step 15."""
    values = make_config(
        tmp_path, family, engine, stage, steps=30, batch_size=3, weight_decay=0.1, optimizer_args=EPS
    )
    values |= {"checkpoint": {"every": 15}, "resume": "auto"}
    first = run_ranks(run_and_record, 2, values, 17, timeout=280)
    values["train"]["batch_size"] = 6 // ranks
    second = run_ranks(run_and_record, ranks, values, timeout=280)
    steps = [*group_by_step(first, 1)[:15], *group_by_step(second, 1)]
    losses, weights = train_reference(values, family, steps)
    assert second[0]["losses"] == pytest.approx(losses, rel=RTOL)
    assert_equal_weights(load_weights(second[0]["directory"]), weights)


@pytest.mark.slow
@pytest.mark.parametrize("family", PIPELINES)
def test_saved_pipeline_draws_as_the_trained_model(family, tmp_path):
    """Compare the saved pipeline with the source pipeline that has the final weights."""
    values = make_config(tmp_path, family, "deepspeed", 3)
    values["model"]["source"] = str(save_pipeline(tmp_path / "pipeline", family))
    values["output"]["pipeline"] = True
    result = run_ranks(run_and_record, 2, values, timeout=280)[0]
    picture = draw_with_pipeline(result["directory"], family)
    assert torch.equal(picture, draw_with_pipeline(values["model"]["source"], family, result["weights"]))
    assert not torch.equal(picture, draw_with_pipeline(values["model"]["source"], family))


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "stage"), [("deepspeed", 2), ("deepspeed", 3), ("fsdp2", 3)])
@pytest.mark.parametrize("family", FAMILIES)
def test_bf16_losses_are_near(family, engine, stage, tmp_path):
    """Times are rounded to bfloat16, and latents are mixed at the rounded times."""
    values = make_config(tmp_path, family, engine, stage, mixed_precision="bf16")
    values["task"]["held_out"] = 0.25
    result = run_ranks(run_and_record, 1, values, timeout=280)[0]
    unit = 1000 if family in ("wan", "hunyuan-video", "ltx2") else 1  # the unit of times in its pipeline
    times = unit * torch.tensor([t for batch in result["batches"] for _, t, _ in batch])
    torch.testing.assert_close(times, times.bfloat16().float(), rtol=1e-6, atol=0)
    losses, _ = train_reference(values, family, group_by_step([result], 1)[:1])
    assert result["losses"][0] == pytest.approx(losses[0], rel=0.03)
    assert all(loss == loss for loss in result["losses"])
