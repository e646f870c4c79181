"""Configuration files: accepted values and error messages."""

import pytest

import tests.extending.rows  # noqa: F401  # registers itself
from zerostart.errors import ConfigError
from zerostart.training.config.engine_config import engine_config
from zerostart.training.config.load import load_config, parse_config

YAML = """
model: {source: somewhere}
task: {name: "tests.training.language:MaskedLanguage", source: text.txt}
train: {steps: 10, learning_rate: 5e-5, mixed_precision: no}
output: {directory: out}
"""


def fill_engine_config(config, ranks=2, hidden_size=None):
    return engine_config(config.engine, config.train, config.precision, ranks, hidden_size)


@pytest.fixture
def path(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(YAML)
    return file


def test_defaults_overrides_and_yaml_spellings(path):
    config = load_config(path, ["train.steps=3", "engine.name=fsdp2", "tracking.trackers=[tensorboard]"])
    assert (config.train.steps, config.engine.name, config.tracking.trackers) == (3, "fsdp2", ["tensorboard"])
    assert config.train.learning_rate == 5e-5  # YAML itself takes 5e-5 for a string
    assert config.train.mixed_precision == "no"  # and a bare no for false
    assert config.dtype == "float32"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.step=3", "unknown key train.step; did you mean train.steps"),
        ("trane.steps=3", "unknown key trane; did you mean train"),
        ("train.steps=many", "train.steps: .*integer.*'many'"),
        ("model.source=", "model.source: .*string"),
        ("task.name=lm", "task.name: 'lm' is unknown; choose one of flow-matching"),
        ("engine.name=ddp", ": engine='ddp' is unknown; choose one of deepspeed, fsdp2"),
        ("engine.zero_stage=4", ": zero_stage=4 is not available on deepspeed"),
        ("train.steps", "an override has the form KEY=VALUE"),
        ("train.steps.more=1", "train.steps.more=1.*steps is a value"),
        ("train.steps=[", "train.steps=.*not valid YAML"),
        ("train={steps: 1, steps: 2}", "train=.*line 1, .*steps is given twice"),
        ("tracking.project=2026-02-30", "tracking.project=.*not valid YAML: day"),
        ("output.max_shard_size=5 apples", "output.max_shard_size: '5 apples' is not a size"),
        ("train.steps=yes", "train.steps: .*valid integer, not True"),
        ("train.learning_rate=.inf", "train.learning_rate: .*finite number, not inf"),
        ("train.steps=1" + "0" * 30, "train.steps: .*less than or equal to 9223372036854775807"),
        ("train.betas=[0.9, 1.0]", "train.betas.1: Input should be less than 1"),
        ("train.seed=4294967295", "train.seed: Input should be less than or equal to 4294901760"),
        ("output.directory=''", "output.directory: .*at least 1 character"),
        ("ema.decay=.nan", "ema.decay: .*finite number|ema.decay: .*greater"),
        ("checkpoint.best=1", "checkpoint.best compares held-out losses: hold examples out"),
        ("model.dtype=bfloat16", "model.dtype bfloat16 contradicts train.mixed_precision no"),
    ],
)
def test_mistakes_are_named(path, override, message):
    with pytest.raises(ConfigError, match=message):
        load_config(path, [override])


def test_missing_file_section_and_key(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot read .*absent\.yaml: No such file"):
        load_config(tmp_path / "absent.yaml")
    with pytest.raises(ConfigError, match=r"model is required.*output is required"):
        parse_config({"task": {"name": "flow-matching"}, "train": {"steps": 1}})


def test_fp16_is_for_deepspeed(path):
    assert load_config(path, ["train.mixed_precision=fp16"]).dtype == "float16"
    with pytest.raises(ConfigError, match=r"fp16 is not available with engine.name fsdp2; use no or bf16"):
        load_config(path, ["train.mixed_precision=fp16", "engine.name=fsdp2"])


def test_deepspeed_config_is_complete_and_auto_is_filled(path):
    zero = (
        "{train_batch_size: auto, zero_optimization: {stage3_prefetch_bucket_size: auto, sub_group_size: 5}}"
    )
    config = load_config(path, ["train.batch_size=2", "train.accumulation=3", f"engine.config={zero}"])
    filled = fill_engine_config(config, 4, 100)
    assert filled["train_batch_size"] == 24
    assert filled["train_micro_batch_size_per_gpu"] == 2
    assert filled["gradient_clipping"] == 1.0
    expected = {"stage": 3, "stage3_prefetch_bucket_size": 9000, "sub_group_size": 5}
    assert filled["zero_optimization"] == expected
    assert "auto" not in str(filled)


def test_engine_config_must_not_contradict(path):
    for value, message in (
        ("{gradient_clipping: 0.5}", "engine.config.gradient_clipping is 0.5.*make it 1.0"),
        ("{bf16: {enabled: true}}", "engine.config.bf16.enabled is True"),
        ("{optimizer: {type: Adam}}", "engine.config.optimizer: .*section train"),
        ("{tensor_parallel: {autotp_size: 2}}", "engine.config has 2 ranks share tensors"),
    ):
        config = load_config(path, [f"engine.config={value}"])
        with pytest.raises(ConfigError, match=message):
            fill_engine_config(config)


def test_fsdp2_config(path):
    import torch

    overrides = ["engine.name=fsdp2", "engine.config={wrap: [Block]}"]
    config = load_config(path, [*overrides, "train.mixed_precision=bf16"])
    settings = fill_engine_config(config)
    assert (settings["wrap"], settings["mp_policy"].param_dtype) == (["Block"], torch.bfloat16)
    with pytest.raises(ConfigError, match=r"engine.config.mesh is unknown for fsdp2"):
        fill_engine_config(load_config(path, ["engine.name=fsdp2", "engine.config={mesh: 1}"]))


def test_resume_options(path):
    assert load_config(path, ["resume=auto"]).resume == "auto"
    assert load_config(path, ["resume=out/checkpoints/step-00000010"]).resume.endswith("step-00000010")
    with pytest.raises(ConfigError, match=r"override 'resume\.path=auto': resume is a value"):
        load_config(path, ["resume=auto", "resume.path=auto"])


def test_registered_engine(path):
    config = load_config(path, ["engine.name=rows", "engine.config={depth: 2}", "model.dtype=bfloat16"])
    assert fill_engine_config(config) == {"depth": 2}
    assert config.dtype == "bfloat16"
    assert load_config(path, ["engine.name=rows", "train.mixed_precision=bf16"]).dtype == "float32"
    with pytest.raises(ConfigError, match="zero_stage=2 is not available on rows"):
        load_config(path, ["engine.name=rows", "engine.zero_stage=2"])


def test_a_file_in_another_encoding_is_named(tmp_path):
    (tmp_path / "run.yaml").write_bytes(b"model: {source: \xe9}")
    with pytest.raises(ConfigError, match=r"run\.yaml is not UTF-8 text"):
        load_config(tmp_path / "run.yaml")
