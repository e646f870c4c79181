"""Course of a run: a checkpoint with a different course is not resumed."""

from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from torch import nn

from tests.ranks import run_ranks
from tests.training.language import CAUSAL, MASKED
from zerostart.distributed.world import World
from zerostart.training.config.load import parse_config
from zerostart.training.loop.course import changes, describe_course

VALUES = {
    "model": {"source": "m"},
    "task": {"name": CAUSAL, "source": "d", "held_out": 0.5},
    "train": {"steps": 6},
    "output": {"directory": "o"},
}


def make_config(**sections):
    """Return the configuration with some keys changed."""
    overrides = {name: {**VALUES.get(name, {}), **values} for name, values in sections.items()}
    return parse_config({**VALUES, **overrides})


def describe(config, data="digest"):
    return describe_course(dict(config), nn.Linear(2, 2), data, World(0, 1, None))


def find_changes(before, now):
    return changes(describe(before), describe(now))


#: Settings that are not compared: computation, folders and logging.
MAY_CHANGE = [
    {"engine": {"name": "fsdp2", "zero_stage": 2}},
    {"train": {"batch_size": 3, "accumulation": 7, "mixed_precision": "bf16", "checkpoint_blocks": True}},
    {"train": {"evaluate_every": 5}, "logging": {"every": 3}, "tracking": {"project": "other"}},
    {"output": {"directory": "elsewhere", "max_shard_size": "1MB"}, "checkpoint": {"every": 9}},
    {"model": {"source": "moved", "fp32_masters": False}},
]
MUST_NOT_CHANGE = [
    ({"train": {"learning_rate": 1.0}}, "train.learning_rate was 5e-05 and is 1.0"),
    ({"train": {"steps": 7}}, "train.steps was 6 and is 7"),
    ({"train": {"seed": 1}}, "train.seed was 42 and is 1"),
    ({"train": {"betas": [0.9, 0.99]}}, "train.betas was [0.9, 0.999] and is [0.9, 0.99]"),
    ({"train": {"schedule": "cosine"}}, "train.schedule was linear and is cosine"),
    ({"train": {"trainable": ["a"]}}, "train.trainable was None and is ['a']"),
    ({"task": {"name": MASKED}}, f"task.name was {CAUSAL} and is {MASKED}"),
]


@pytest.mark.parametrize("sections", MAY_CHANGE)
def test_how_a_step_is_computed_may_change(sections):
    assert find_changes(make_config(), make_config(**sections)) == []


@pytest.mark.parametrize(("sections", "message"), MUST_NOT_CHANGE)
def test_training_settings_must_not_change(sections, message):
    assert find_changes(make_config(), make_config(**sections)) == [message]


def test_steps_may_be_added_if_rates_do_not_depend_on_them():
    for schedule in ("constant", "constant_with_warmup", "inverse_sqrt"):
        train = {"schedule": schedule, "warmup_steps": 2}
        assert find_changes(make_config(train=train), make_config(train={**train, "steps": 60})) == []


def test_every_key_of_the_training_is_compared_unless_it_may_change():
    compared = {key.partition(".")[2] for key in describe(make_config()) if key.startswith("train.")}
    free = {"batch_size", "accumulation", "mixed_precision", "evaluate_every", "checkpoint_blocks"}
    free |= {"patience_nonfinite", "epochs"}
    assert compared | free == set(make_config().train.model_dump())
    assert not compared & free


def find_lora_changes(source, other_base, lora):
    """Return the changes of a LoRA run with other settings and another base."""
    import zerostart
    from zerostart.distributed.world import current_world
    from zerostart.training.adapt.trained import select_parameters

    courses = []
    base = {"rank": 2, "targets": ["q_proj", "v_proj"]}
    for path, settings in ((source, base), (source, {**base, **lora}), (other_base, base)):
        config = make_config(model={"source": str(path)}, lora=settings, engine={"name": "fsdp2"})
        model = zerostart.load(path, engine="fsdp2", progress=False)
        select_parameters(model, config.train, config.lora, "no", current_world())
        courses.append(describe_course(dict(config), model, "digest", current_world()))
    return [changes(courses[0], course) for course in courses]


@pytest.mark.slow
def test_lora_resumes_only_on_its_own_base(checkpoints, tmp_path):
    """The other base has equal names and shapes."""
    source = Path(checkpoints("qwen3"))
    (tmp_path / "config.json").write_bytes((source / "config.json").read_bytes())
    tensors = {name: t + 1 for file in source.glob("*.safetensors") for name, t in load_file(file).items()}
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    lora = {"alpha": 8, "targets": ["k_proj", "v_proj"]}
    ((same, other_lora, other_base),) = run_ranks(find_lora_changes, 1, source, tmp_path, lora)
    assert same == []
    assert [text.partition(" was ")[0] for text in other_lora] == ["lora.alpha", "lora.targets"]
    assert [text.partition(" was ")[0] for text in other_base] == ["a digest of the weights of model.source"]
