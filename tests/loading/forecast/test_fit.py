"""Limits, advice, times, and the forms of a plan."""

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


def peak(made: Any, where: str) -> int:
    return max(getattr(m, f"{where}_bytes") for rank in made.ranks for m in rank.memory.values())


def shown(made: Any) -> str:
    console = Console(record=True, width=120, file=io.StringIO())
    show_plan(made, "source", console)
    return console.export_text()


def test_components_add_up_to_the_peaks(checkpoints: TinyCheckpoints) -> None:
    made = zerostart.plan(checkpoints("qwen3_moe"), world_size=3, device_memory=10**9)
    plain = made.as_dict()
    assert made.accelerator
    assert list(made.ranks[0].memory) == list(PHASES)
    for rank, told in zip(made.ranks, plain["ranks"], strict=True):
        assert rank.peak_host_bytes == rank.memory["load"].host_bytes
        assert rank.peak_device_bytes == rank.memory["load"].device_bytes >= rank.device_bytes > 0
        for phase, memory in rank.memory.items():
            assert told["peaks"][phase] == {"host": memory.host_bytes, "device": memory.device_bytes}
    of_classes = [number for kind in plain["memory"] for number in kind["ranks"]]
    assert sorted(of_classes) == [0, 1, 2]
    assert json.loads(json.dumps(plain)) == json.loads(json.dumps(made.as_dict()))


def test_without_an_accelerator_all_memory_is_the_hosts(checkpoints: TinyCheckpoints) -> None:
    made = zerostart.plan(checkpoints("qwen3_moe"), world_size=2)
    assert not made.accelerator
    assert all(not memory.device for rank in made.ranks for memory in rank.memory.values())
    assert [fit.where for fit in made.fits] == ["host"]
    assert made.fits[0].found
    assert made.fits[0].ranks == 2
    assert "the device is the CPU: its memory is host memory" in shown(made)


def test_a_machine_is_no_measure_of_a_job_that_it_cannot_run(checkpoints: TinyCheckpoints) -> None:
    made = zerostart.plan(checkpoints("qwen3_moe"), world_size=9)
    assert made.fits == ()
    assert made.fit is None


def test_what_does_not_fit_is_told(checkpoints: TinyCheckpoints) -> None:
    path = checkpoints("qwen3", torch.bfloat16)
    given: dict[str, Any] = {"world_size": 2, "zero_stage": 1, "engine_config": ZERO}
    limit = peak(zerostart.plan(path, **given, device_memory=1), "device")
    assert zerostart.plan(path, **given, device_memory=limit).fit is True
    made = zerostart.plan(path, **given, device_memory=limit - 1)
    assert made.fit is False
    assert "Does not fit: device memory" in shown(made)


def test_times_follow_the_rates(checkpoints: TinyCheckpoints) -> None:
    """Two ranks of a machine get half of what storage gives to it, each."""
    path = checkpoints("qwen3_moe", torch.bfloat16)
    slow = zerostart.plan(path, world_size=2, storage_rate=1e3, interconnect_rate=1e3)
    fast = zerostart.plan(path, world_size=2, storage_rate=2e3, interconnect_rate=1e3)
    for rank, other in zip(slow.ranks, fast.ranks, strict=True):
        assert rank.read_seconds == pytest.approx(rank.read_bytes / 500, rel=0.02)
        assert rank.read_seconds == pytest.approx(2 * other.read_seconds)
    assert slow.read_seconds == max(rank.read_seconds for rank in slow.ranks)
    assert slow.rates["storage"] == 1e3


def test_replicas_share_what_storage_gives(checkpoints: TinyCheckpoints) -> None:
    path = checkpoints("qwen3", torch.bfloat16)
    config = {"replicate": 4}
    made = zerostart.plan(path, world_size=4, engine="fsdp2", engine_config=config, storage_rate=1e3)
    assert made.read_seconds == pytest.approx(made.checkpoint_bytes / 1e3, rel=0.1)


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
def test_what_makes_no_sense_is_refused(name: str, value: Any, checkpoints: TinyCheckpoints) -> None:
    with pytest.raises(ConfigError, match=name):
        zerostart.plan(checkpoints("qwen3"), world_size=2, **{name: value})


def test_the_optimizer_of_a_configuration_is_taken(checkpoints: TinyCheckpoints) -> None:
    path = checkpoints("qwen3")
    for section, name in (
        ({"type": "AdamW"}, "fused_adamw"),
        ({"type": "AdamW", "params": {"torch_adam": True}}, "adamw"),
        ({"type": "SGD"}, "sgd"),
    ):
        made = zerostart.plan(path, world_size=2, engine_config={"optimizer": section})
        assert made.optimizer == name


def command(*arguments: object) -> Any:
    import typer

    from zerostart.cli.plan import command as plan

    app = typer.Typer()
    app.command()(plan)
    return CliRunner().invoke(app, list(map(str, arguments)))


def test_the_command_line(checkpoints: TinyCheckpoints, tmp_path: Path) -> None:
    path = checkpoints("qwen3", torch.bfloat16)
    config = tmp_path / "ds.json"
    config.write_text(json.dumps({"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}}))
    common = (path, "--world-size", 2, "--engine-config", config, "--storage-rate", "7GB/s")
    fits = command(*common, "--device-memory", "80GB", "--must-fit", "--json")
    assert fits.exit_code == 0, fits.output
    made = json.loads(fits.output)
    assert made["rates"]["storage"] == 7e9
    assert made["fit"] is True
    assert made["memory"][0]["step"]["host"]["optimizer state"] > 0
    tight = command(*common, "--device-memory", "1KB")
    assert tight.exit_code == 0
    assert "Does not fit" in tight.output
    assert command(*common, "--device-memory", "1KB", "--must-fit").exit_code == 1
    assert command(path, "--world-size", 2, "--device-memory", "much").exit_code == 2
