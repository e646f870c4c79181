"""Arguments of a wrong type are refused by name, alike on every rank."""

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import zerostart
from tests.ranks import run_ranks
from zerostart.engines import choose_engine
from zerostart.errors import ConfigError


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tensor_parallel": 2.0}, "tensor_parallel=2.0 is not accepted; give a whole number"),
        ({"zero_stage": True}, "zero_stage=True is not accepted; give a whole number"),
        ({"exchange": "maybe"}, "exchange='maybe' is not accepted; give True or False"),
        ({"strict": "no"}, "strict='no' is not accepted; give True or False"),
        ({"dtype": "half_float"}, "dtype='half_float' is not a torch dtype; try"),
        ({"dtype": 16}, "dtype=16 is not a torch dtype; try float32, bfloat16 or float16"),
        ({"dtype": torch.int8}, "dtype=torch.int8 must be a floating torch.dtype"),
        ({"memory_limit": 1}, "memory_limit=1 must be a number of bytes, at least 65536"),
        (
            {"engine_config": 3},
            "engine_config=3 is not accepted; give a dictionary or the path of a JSON file",
        ),
    ],
)
def test_a_wrong_type_is_refused_by_name(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}"):
        zerostart.load({}, torch.nn.Identity, engine="fsdp2", progress=False, **arguments)


def load_by_names(config: Path) -> tuple[str, torch.dtype, str, str]:
    """Load without an engine's name, and then without a configuration file on rank 1."""
    import torch.distributed as dist

    make, weights = (lambda: torch.nn.Linear(1, 1, bias=False)), {"weight": torch.ones(1, 1)}
    options: dict[str, Any] = {"dtype": "bfloat16", "engine_config": config, "progress": False}
    model = zerostart.load(weights, make, **options)
    first = zerostart.report(model).engine
    os.environ |= {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
    second = zerostart.report(zerostart.load(weights, make, **{**options, "engine_config": None})).engine
    del os.environ["ACCELERATE_USE_FSDP"]
    dist.barrier()
    if dist.get_rank() == 1:
        options["engine_config"] = config.with_name("absent.json")
    try:
        zerostart.load(weights, make, **options)
    except ConfigError as error:
        return first, next(model.parameters()).dtype, second, str(error)
    raise AssertionError("loaded with a configuration that is not there")


@pytest.mark.slow
def test_dtype_names_and_configuration_paths(tmp_path: Path) -> None:
    """Read both, use the launcher's engine, and fail on all ranks together."""
    config = tmp_path / "ds.json"
    config.write_text('{"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": 1}')
    for first, dtype, second, message in run_ranks(load_by_names, 2, config):
        assert (first, dtype, second) == ("deepspeed", torch.bfloat16, "fsdp2")
        assert message.startswith("rank 1: engine_config: ")
        assert str(config.with_name("absent.json")) in message


def load_with_own(engine: str, options: list[dict[str, Any]]) -> str:
    """Load with other options on each rank; return the error, or "" without one."""
    import torch.distributed as dist

    def make() -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))

    config = options[dist.get_rank()]
    if isinstance(path := config.get("engine_config"), str):
        config = {"engine_config": Path(path, str(dist.get_rank()))}
    try:
        zerostart.load(make().state_dict(), make, engine=engine, progress=False, **config)
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "first", "second", "message"),
    [
        (
            "fsdp2",
            {},
            {"dtype": "bfloat16"},
            r"this rank has 0.weight \(torch.bfloat16.*torch.float32",
        ),
        (
            "fsdp2",
            {"engine_config": {"wrap": ["0"]}},
            {},
            r"nothing, but rank 0 has .*wrap: list\['0'\]",
        ),
    ],
)
def test_different_arguments_on_ranks_are_refused(
    engine: str, first: dict[str, Any], second: dict[str, Any], message: str
) -> None:
    """Without the check, the first exchange of tensors would fail or hang."""
    messages = run_ranks(load_with_own, 2, engine, [first, second])
    assert messages[0] == messages[1]
    assert re.search(message, messages[0])


@pytest.mark.slow
def test_configuration_files_may_differ_only_in_paths_and_logs(tmp_path: Path) -> None:
    """Accept another disk and log on a rank, and refuse other ZeRO settings."""
    path = {"engine_config": str(tmp_path)}
    for rank in range(2):
        zero = {"stage": 3, "offload_param": {"device": "cpu", "nvme_path": str(tmp_path / f"nvme{rank}")}}
        other_keys = {"train_micro_batch_size_per_gpu": 1, "tensorboard": {"enabled": rank == 0}}
        (tmp_path / str(rank)).write_text(json.dumps({"zero_optimization": zero, **other_keys}))
    zero3 = {"stage": 3, "stage3_param_persistence_threshold": 0}
    files = ({"zero_optimization": {"stage": 3}}, {"zero_optimization": zero3})
    assert run_ranks(load_with_own, 2, "deepspeed", [path, path]) == ["", ""]
    for rank, config in enumerate(files):
        (tmp_path / str(rank)).write_text(json.dumps(config))
    for message in run_ranks(load_with_own, 2, "deepspeed", [path, path]):
        assert "engine_config zero_optimization.stage3_param_persistence_threshold=0, but rank 0" in message


def test_a_launcher_with_fsdp1_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """accelerate's default, version 1, would wrap the FSDP2 model."""
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    weights = {"weight": torch.ones(1, 1)}
    with pytest.raises(ConfigError, match=r"set up FSDP version 1, .*--fsdp_version 2 .*name an engine"):
        zerostart.load(weights, lambda: torch.nn.Linear(1, 1, bias=False), progress=False)
    monkeypatch.setenv("FSDP_VERSION", "2")
    assert choose_engine().name == "fsdp2"


def test_the_report_says_why_the_engine_was_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    def first_line(engine: str | None = None) -> str:
        weights, make = {"weight": torch.ones(1, 1)}, lambda: torch.nn.Linear(1, 1, bias=False)
        forecast = zerostart.plan(weights, 1, engine, model=make)
        report = zerostart.report(zerostart.load(weights, make, engine=engine, progress=False))
        assert (forecast.engine, forecast.engine_reason) == (report.engine, report.engine_reason)
        return str(report).partition(", rank")[0]

    assert first_line("fsdp2") == "Loaded on fsdp2 (as asked for)"
    assert first_line() == "Loaded on deepspeed (the first installed of deepspeed, fsdp2)"
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "deepspeed", None)  # makes its import fail
        assert first_line() == "Loaded on fsdp2 (the only engine installed)"
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_VERSION", "2")
    assert first_line() == "Loaded on fsdp2 (set up by the launcher)"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "distributed_type: DEEPSPEED\n",
            "is not valid JSON .*: give a JSON file; an accelerate",
        ),
        ("[1]", "is a JSON list and not an object: give a JSON file"),
        (None, "configuration: not a regular file, so it is not a configuration file"),
    ],
)
def test_a_configuration_that_cannot_be_read(text: str | None, message: str, tmp_path: Path) -> None:
    """Advise no new download, and do not wait for a pipe without a writer."""
    path = tmp_path / "configuration"
    path.write_text(text) if text is not None else os.mkfifo(path)
    with pytest.raises(ConfigError, match=message) as caught:
        zerostart.load({}, torch.nn.Identity, engine_config=path)
    assert "download" not in str(caught.value)
