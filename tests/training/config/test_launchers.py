"""A run under ``accelerate launch``: its file agrees with the configuration, or the run says where not."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.ranks import run_ranks
from tests.tiny import TinyCheckpoints
from zerostart.cli import main
from zerostart.errors import ConfigError, EngineError
from zerostart.training.config.configuration import TrainConfig
from zerostart.training.config.engine_config import with_launcher
from zerostart.training.config.load import load_config, parse_config

ENGINES = [(name, stage) for name in ("deepspeed", "fsdp2") for stage in range(4)]


def environment(file: Path) -> dict[str, str]:
    """What accelerate's launcher puts into the environment of each rank."""
    from accelerate.commands import launch
    from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env

    given = ["--config_file", str(file), "--main_process_port", "0", "script.py"]
    args, defaults, from_file = launch._validate_launch_command(
        launch.launch_command_parser().parse_args(given)
    )
    before = dict(os.environ)
    if args.use_deepspeed:
        fields = [*defaults.deepspeed_config, *(["mixed_precision"] if from_file else [])]
        args.deepspeed_fields_from_accelerate_config = ",".join(fields)
        made = prepare_deepspeed_cmd_env(args)[1]
    else:
        made = prepare_multi_gpu_env(args)
    names = ("ACCELERATE", "FSDP")
    return {k: v for k, v in made.items() if k.startswith(names) and before.get(k) != v}


@pytest.fixture
def launched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The configuration of a run under a launcher with this file, as the run sees it."""

    def make(file: dict[str, Any], **run: Any) -> TrainConfig:
        path = tmp_path / "launcher.yaml"
        path.write_text(yaml.safe_dump({"num_processes": 2, "num_machines": 1, **file}))
        with monkeypatch.context() as patch:
            for name, value in environment(path).items():
                patch.setenv(name, value)
            train = {"steps": 1, "mixed_precision": "bf16", **run.pop("train", {})}
            given = {"model": {"source": "x"}, "data": {"source": "x"}, "task": {"name": "causal-lm"}}
            return with_launcher(parse_config(given | {"train": train, "output": {"directory": "x"}, **run}))

    return make


FSDP = {
    "fsdp_version": 2,
    "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    "fsdp_reshard_after_forward": True,
}
FSDP2 = {"name": "fsdp2"}
ZERO = {"name": "deepspeed"}


def fsdp(**more: Any) -> dict[str, Any]:
    return {"distributed_type": "FSDP", "fsdp_config": FSDP | more, "mixed_precision": "bf16"}


def zero(**more: Any) -> dict[str, Any]:
    return {"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": 3} | more}


@pytest.mark.parametrize(("engine", "stage"), ENGINES)
def test_the_files_of_config_agree(
    engine: str, stage: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for own in (False, True) if engine == "deepspeed" else (False,):
        out = tmp_path / f"{own}.yaml"
        more = ["--zero-stage", str(stage), "--accelerate", *(["--deepspeed"] if own else [])]
        with pytest.raises(SystemExit) as ended:
            main(["config", "causal-lm", str(out), "--engine", engine, *more])
        assert ended.value.code == 0
        config = load_config(out)
        with monkeypatch.context() as patch:
            for name, value in environment(out.with_suffix(".accelerate.yaml")).items():
                patch.setenv(name, value)
            found = with_launcher(config)
        assert found.model_copy(update={"engine": config.engine}) == config
        assert found.engine.name == engine


def test_a_run_that_names_no_engine_has_the_launchers_or_one_that_is_there(
    launched: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for section in ({}, {"engine": {"zero_stage": 3}}, {"engine": {"name": None}}):
        assert launched(fsdp(), **section).engine.name == "fsdp2"
        assert launched(zero(), **section).engine.name == "deepspeed"
        found = launched({"distributed_type": "MULTI_GPU"}, **section).engine  # ranks, and no engine
        assert (found.name, found.given) == ("deepspeed", None)
    assert launched(zero(), engine=ZERO).engine.given == "deepspeed"
    monkeypatch.setitem(sys.modules, "deepspeed", None)  # Python's own word for: it cannot be imported
    assert launched({"distributed_type": "MULTI_GPU"}).engine.name == "fsdp2"


def test_what_the_launcher_says_becomes_the_engines_configuration(launched: Any, tmp_path: Path) -> None:
    found = launched(fsdp(fsdp_transformer_layer_cls_to_wrap="Block,Other"), engine=FSDP2)
    assert found.engine.config == {"reshard_after_forward": True, "wrap": ["Block", "Other"]}
    checkpointing = fsdp(fsdp_activation_checkpointing=True, fsdp_reshard_after_forward=False)
    found = launched(checkpointing, engine={**FSDP2, "zero_stage": 2}, train={"checkpoint_blocks": True})
    assert found.engine.config == {}
    offloaded = zero(offload_optimizer_device="cpu", gradient_accumulation_steps=4, gradient_clipping=0.5)
    train = {"accumulation": 4, "max_grad_norm": 0.5}
    found = launched(offloaded, train=train, engine={"config": {"zero_optimization": {"sub_group_size": 7}}})
    assert found.engine.config["zero_optimization"] == {
        "sub_group_size": 7,
        "offload_optimizer": {"device": "cpu"},
    }
    file = tmp_path / "ds.json"
    file.write_text('{"bf16": {"enabled": true}, "zero_optimization": {"stage": 3, "reduce_bucket_size": 9}}')
    found = launched(
        {"distributed_type": "DEEPSPEED", "deepspeed_config": {"deepspeed_config_file": str(file)}}
    )
    assert found.engine.config["zero_optimization"] == {"reduce_bucket_size": 9}


REFUSED: list[tuple[dict[str, Any], dict[str, Any], type[Exception], str]] = [
    (
        fsdp(),
        {"engine": ZERO},
        EngineError,
        "ACCELERATE_USE_FSDP=true, but this run shards with DeepSpeed ZeRO-3",
    ),
    (zero(), {"engine": FSDP2}, EngineError, "ACCELERATE_USE_DEEPSPEED=true, but .* FSDP2"),
    (fsdp(), {"engine": {**FSDP2, "zero_stage": 0}}, EngineError, "shards with DistributedDataParallel"),
    (
        fsdp(fsdp_version=1, fsdp_reshard_after_forward="FULL_SHARD"),
        {"engine": FSDP2},
        ConfigError,
        "version: 1",
    ),
    (fsdp(fsdp_offload_params=True), {"engine": FSDP2}, ConfigError, "fsdp_offload_params of the launcher"),
    (
        fsdp(fsdp_auto_wrap_policy="SIZE_BASED_WRAP"),
        {"engine": FSDP2},
        ConfigError,
        "policy: SIZE_BASED_WRAP",
    ),
    (
        fsdp(fsdp_auto_wrap_policy="NO_WRAP"),
        {"engine": FSDP2},
        ConfigError,
        "policy: NO_WRAP of the launcher",
    ),
    (
        fsdp(),
        {"engine": {**FSDP2, "zero_stage": 2}},
        ConfigError,
        "stage: 3, but this run's configuration has engine.zero_stage",
    ),
    (
        fsdp(fsdp_activation_checkpointing=True),
        {"engine": FSDP2},
        ConfigError,
        "fsdp_activation_checkpointing: True, but this run's configuration has train.checkpoint_blocks",
    ),
    (
        fsdp(),
        {"engine": {**FSDP2, "config": {"reshard_after_forward": False}}},
        ConfigError,
        "engine.config.reshard_after_forward is False, but the launcher's configuration makes it True",
    ),
    (
        {**fsdp(), "mixed_precision": "fp16"},
        {"engine": FSDP2},
        ConfigError,
        "mixed_precision: fp16, but this run's configuration has train.mixed_precision: bf16",
    ),
    (
        {**fsdp(), "dynamo_config": {"dynamo_backend": "INDUCTOR"}},
        {"engine": FSDP2},
        ConfigError,
        "dynamo_backend: inductor, but zerostart train does not compile",
    ),
    (
        zero(zero_stage=2),
        {},
        ConfigError,
        "zero_optimization.stage: 2, but this run's configuration has engine.zero_stage: 3",
    ),
    (
        zero(gradient_clipping=0.5),
        {},
        ConfigError,
        "gradient_clipping: 0.5, but this run's configuration has train.max_grad_norm",
    ),
    (
        zero(gradient_accumulation_steps=2),
        {},
        ConfigError,
        "gradient_accumulation_steps: 2, but this run's configuration has train.accumulation: 1",
    ),
    (
        {"distributed_type": "DEEPSPEED", "deepspeed_config": {"deepspeed_config_file": "/nowhere.json"}},
        {},
        ConfigError,
        "deepspeed_config_file /nowhere.json of the launcher's configuration is not a readable JSON",
    ),
]


@pytest.mark.parametrize(("file", "run", "kind", "message"), REFUSED)
def test_differences_are_named(file: Any, run: Any, kind: Any, message: str, launched: Any) -> None:
    with pytest.raises(kind, match=message):
        launched(file, **run)


def run_values(source: Path, folder: Path, tokenizer: Path, engine: str) -> dict[str, Any]:
    text = folder / "text.txt"
    text.write_text("the cat sat on the mat, and the dog sat on the cat. " * 40)
    data = {"source": str(text), "tokenizer": str(tokenizer), "sequence_length": 16}
    return {
        "model": {"source": str(source)},
        "data": data,
        "task": {"name": "causal-lm"},
        "engine": {"name": engine},
        "train": {"steps": 3, "batch_size": 2, "learning_rate": 1e-2},
        "output": {"directory": str(folder / f"{engine}-plain")},
    }


def losses(values: dict[str, Any], environment: dict[str, str]) -> tuple[float | None, float | None]:
    """First and last loss of a run on this rank."""
    from zerostart.training.loop.runner import train

    os.environ.update(environment)  # of a process of its own
    result = train(parse_config(values))
    return result.first_loss, result.last_loss


@pytest.mark.parametrize(
    ("engine", "file"),
    [("fsdp2", fsdp()), pytest.param("deepspeed", zero(gradient_clipping=1.0), marks=pytest.mark.slow)],
)
def test_a_launched_run_is_the_plain_one(
    engine: str, file: dict[str, Any], checkpoints: TinyCheckpoints, tokenizer_path: Path, tmp_path: Path
) -> None:
    """accelerate neither wraps the model a second time, nor reads the launcher's settings once more."""
    path = tmp_path / "launcher.yaml"
    path.write_text(yaml.safe_dump({"num_processes": 2, "num_machines": 1, **file, "mixed_precision": "no"}))
    values = run_values(checkpoints("qwen3"), tmp_path, tokenizer_path, engine)
    launched = run_ranks(losses, 2, values, environment(path), timeout=200)
    values["output"] = {"directory": str(tmp_path / "plain")}
    plain = run_ranks(losses, 2, values, {}, timeout=200)
    assert launched == plain
    assert plain[0][1] < plain[0][0]


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "file"), [("fsdp2", fsdp()), ("deepspeed", zero())])
def test_under_the_launcher_itself(
    engine: str, file: dict[str, Any], checkpoints: TinyCheckpoints, tokenizer_path: Path, tmp_path: Path
) -> None:
    values = run_values(checkpoints("qwen3"), tmp_path, tokenizer_path, engine)
    run, launcher = tmp_path / "run.yaml", tmp_path / "launcher.yaml"
    run.write_text(yaml.safe_dump(values))
    ranks = {"num_processes": 2, "num_machines": 1, "mixed_precision": "no"}
    launcher.write_text(yaml.safe_dump({**file, **ranks}))
    module = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(launcher)]
    command = Path(sys.executable).with_name("zerostart")
    found = subprocess.run(
        [*module, "--main_process_port", "0", "--no_python", str(command), "train", str(run)],
        capture_output=True,
        text=True,
        timeout=280,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert found.returncode == 0, found.stdout + found.stderr
    assert "trained after 3 steps" in found.stdout
    assert (Path(values["output"]["directory"]) / "model.safetensors").is_file()
