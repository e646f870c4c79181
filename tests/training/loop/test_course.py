"""What decides the course of a run: no checkpoint of another one is gone on from, however it fits."""

from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from torch import nn

from tests.ranks import run_ranks
from tests.training.language import CAUSAL, MASKED
from zerostart.distributed.world import World
from zerostart.training.config.load import parse_config
from zerostart.training.loop.course import changes, describe_course

GIVEN = {
    "model": {"source": "m"},
    "task": {"name": CAUSAL, "source": "d", "held_out": 0.5},
    "train": {"steps": 6},
    "output": {"directory": "o"},
}


def changed(**sections):
    """The configuration with some keys of some sections of another value."""
    made = {name: {**GIVEN.get(name, {}), **values} for name, values in sections.items()}
    return parse_config({**GIVEN, **made})


def course(config, data="digest"):
    return describe_course(dict(config), nn.Linear(2, 2), data, World(0, 1, None))


def between(before, now):
    return changes(course(before), course(now))


#: What is not compared: how the same is computed, where things go, what is looked at.
MAY_CHANGE = [
    {"engine": {"name": "fsdp2", "zero_stage": 2}},
    {"train": {"batch_size": 3, "accumulation": 7, "mixed_precision": "bf16", "checkpoint_blocks": True}},
    {"train": {"evaluate_every": 5}, "logging": {"every": 3}, "tracking": {"project": "other"}},
    {"output": {"directory": "elsewhere", "max_shard_size": "1MB"}, "checkpoint": {"every": 9}},
    {"model": {"source": "moved", "fp32_masters": False}},
]
DECIDES = [
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
    assert between(changed(), changed(**sections)) == []


@pytest.mark.parametrize(("sections", "told"), DECIDES)
def test_what_a_step_is_may_not(sections, told):
    assert between(changed(), changed(**sections)) == [told]


def test_steps_may_be_added_where_rates_do_not_depend_on_them():
    for schedule in ("constant", "constant_with_warmup", "inverse_sqrt"):
        train = {"schedule": schedule, "warmup_steps": 2}
        assert between(changed(train=train), changed(train={**train, "steps": 60})) == []


def test_every_key_of_the_training_is_compared_unless_it_may_change():
    told = {key.partition(".")[2] for key in course(changed()) if key.startswith("train.")}
    free = {"batch_size", "accumulation", "mixed_precision", "evaluate_every", "checkpoint_blocks"}
    free |= {"patience_nonfinite", "epochs"}
    assert told | free == set(changed().train.model_dump())
    assert not told & free


def of_lora(source, other, lora):
    """The course of a LoRA of ``source``, and what that of ``lora``, and one of ``other``, departs in."""
    import zerostart
    from zerostart.distributed.world import current_world
    from zerostart.training.adapt.trained import select_parameters

    found = []
    base = {"rank": 2, "targets": ["q_proj", "v_proj"]}
    for path, settings in ((source, base), (source, {**base, **lora}), (other, base)):
        config = changed(model={"source": str(path)}, lora=settings, engine={"name": "fsdp2"})
        model = zerostart.load(path, engine="fsdp2", progress=False)
        select_parameters(model, config.train, config.lora, "no", current_world())
        found.append(describe_course(dict(config), model, "digest", current_world()))
    return [changes(found[0], one) for one in found]


@pytest.mark.slow
def test_a_lora_goes_on_over_its_own_base_alone(checkpoints, tmp_path):
    """Another base of the same names and shapes; other adapters of as many tensors; another alpha."""
    source = Path(checkpoints("qwen3"))
    (tmp_path / "config.json").write_bytes((source / "config.json").read_bytes())
    tensors = {name: t + 1 for file in source.glob("*.safetensors") for name, t in load_file(file).items()}
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    lora = {"alpha": 8, "targets": ["k_proj", "v_proj"]}
    ((same, other_lora, other_base),) = run_ranks(of_lora, 1, source, tmp_path, lora)
    assert same == []
    assert [text.partition(" was ")[0] for text in other_lora] == ["lora.alpha", "lora.targets"]
    assert [text.partition(" was ")[0] for text in other_base] == ["a digest of the weights of model.source"]
