"""Limits, advice, times and output formats of a forecast."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

import zerostart
from tests.tiny import TinyCheckpoints
from zerostart.cli.memory_view import show_plan
from zerostart.errors import ConfigError
from zerostart.loading.forecast import PHASES

ZERO = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1, "reduce_bucket_size": 1000}}


def find_peak(plan: Any, place: str) -> int:
    return max(getattr(m, f"{place}_bytes") for rank in plan.ranks for m in rank.memory.values())


def render(plan: Any) -> str:
    console = Console(record=True, width=120, file=io.StringIO())
    show_plan(plan, "source", console)
    return console.export_text()


def test_components_add_up_to_the_peaks(checkpoints: TinyCheckpoints) -> None:
    plan = zerostart.plan(checkpoints("qwen3_moe"), world_size=3, device_memory=10**9)
    report = plan.as_dict()
    assert plan.accelerator
    assert list(plan.ranks[0].memory) == list(PHASES)
    for rank, row in zip(plan.ranks, report["ranks"], strict=True):
        assert rank.peak_host_bytes == rank.memory["load"].host_bytes
        assert rank.peak_device_bytes == rank.memory["load"].device_bytes >= rank.device_bytes > 0
        for phase, memory in rank.memory.items():
            assert row["peaks"][phase] == {"host": memory.host_bytes, "device": memory.device_bytes}
    rank_numbers = [number for kind in report["memory"] for number in kind["ranks"]]
    assert sorted(rank_numbers) == [0, 1, 2]
    assert json.loads(json.dumps(report)) == json.loads(json.dumps(plan.as_dict()))


def test_without_an_accelerator_all_memory_is_host_memory(checkpoints: TinyCheckpoints) -> None:
    plan = zerostart.plan(checkpoints("qwen3_moe"), world_size=2)
    assert not plan.accelerator
    assert all(not memory.device for rank in plan.ranks for memory in rank.memory.values())
    assert [fit.where for fit in plan.fits] == ["host"]
    assert plan.fits[0].found
    assert plan.fits[0].ranks == 2
    assert "the device is the CPU: its memory is host memory" in render(plan)


def test_fit_is_unknown_for_more_ranks_than_one_machine_runs(checkpoints: TinyCheckpoints) -> None:
    plan = zerostart.plan(checkpoints("qwen3_moe"), world_size=9)
    assert plan.fits == ()
    assert plan.fit is None


def test_plan_that_does_not_fit_is_reported(checkpoints: TinyCheckpoints) -> None:
    path = checkpoints("qwen3", torch.bfloat16)
    options: dict[str, Any] = {"world_size": 2, "zero_stage": 1, "engine_config": ZERO}
    limit = find_peak(zerostart.plan(path, **options, device_memory=1), "device")
    assert zerostart.plan(path, **options, device_memory=limit).fit is True
    plan = zerostart.plan(path, **options, device_memory=limit - 1)
    assert plan.fit is False
    assert "Does not fit: device memory" in render(plan)


def test_times_follow_the_rates(checkpoints: TinyCheckpoints) -> None:
    """Two ranks of a machine share its storage rate."""
    path = checkpoints("qwen3_moe", torch.bfloat16)
    slow = zerostart.plan(path, world_size=2, storage_rate=1e3, interconnect_rate=1e3)
    fast = zerostart.plan(path, world_size=2, storage_rate=2e3, interconnect_rate=1e3)
    for rank, fast_rank in zip(slow.ranks, fast.ranks, strict=True):
        assert rank.read_seconds == pytest.approx(rank.read_bytes / 500, rel=0.02)
        assert rank.read_seconds == pytest.approx(2 * fast_rank.read_seconds)
    assert slow.read_seconds == max(rank.read_seconds for rank in slow.ranks)
    assert slow.rates["storage"] == 1e3


def test_replicas_share_the_storage_rate(checkpoints: TinyCheckpoints) -> None:
    path = checkpoints("qwen3", torch.bfloat16)
    config = {"replicate": 4}
    plan = zerostart.plan(path, world_size=4, engine="fsdp2", engine_config=config, storage_rate=1e3)
    assert plan.read_seconds == pytest.approx(plan.checkpoint_bytes / 1e3, rel=0.1)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("device_memory", 0),
        ("host_memory", "80GB"),
        ("storage_rate", -1.0),
        ("interconnect_rate", float("inf")),
        ("optimizer", "adamm"),
    ],
)
def test_invalid_arguments_are_refused(name: str, value: Any, checkpoints: TinyCheckpoints) -> None:
    with pytest.raises(ConfigError, match=name):
        zerostart.plan(checkpoints("qwen3"), world_size=2, **{name: value})


def test_optimizer_is_read_from_the_engine_configuration(checkpoints: TinyCheckpoints) -> None:
    path = checkpoints("qwen3")
    for section, name in (
        ({"type": "AdamW"}, "fused_adamw"),
        ({"type": "AdamW", "params": {"torch_adam": True}}, "adamw"),
        ({"type": "SGD"}, "sgd"),
    ):
        plan = zerostart.plan(path, world_size=2, engine_config={"optimizer": section})
        assert plan.optimizer == name


def run_command(*arguments: object) -> Any:
    import typer

    from zerostart.cli.plan import command

    app = typer.Typer()
    app.command()(command)
    return CliRunner().invoke(app, list(map(str, arguments)))


def test_command_line_options(checkpoints: TinyCheckpoints, tmp_path: Path) -> None:
    path = checkpoints("qwen3", torch.bfloat16)
    config = tmp_path / "ds.json"
    config.write_text(json.dumps({"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}}))
    common = (path, "--world-size", 2, "--engine-config", config, "--storage-rate", "7GB/s")
    fits = run_command(*common, "--device-memory", "80GB", "--must-fit", "--json")
    assert fits.exit_code == 0, fits.output
    report = json.loads(fits.output)
    assert report["rates"]["storage"] == 7e9
    assert report["fit"] is True
    assert report["memory"][0]["step"]["host"]["optimizer state"] > 0
    tight = run_command(*common, "--device-memory", "1KB")
    assert tight.exit_code == 0
    assert "Does not fit" in tight.output
    assert run_command(*common, "--device-memory", "1KB", "--must-fit").exit_code == 1
    assert run_command(path, "--world-size", 2, "--device-memory", "much").exit_code == 2
