"""HTML page of a forecast: figures of the plan and escaped names."""

from pathlib import Path

import pytest
import torch
from rich.filesize import decimal
from safetensors.torch import save_file
from typer.testing import CliRunner

import zerostart
from tests.tiny import TinyCheckpoints
from zerostart.loading.forecast.page import page_of

HOSTILE = "a</script><img src=x onerror=alert(1)>\"' &amp;"


def test_page_shows_the_figures_of_the_plan(checkpoints: TinyCheckpoints) -> None:
    plan = zerostart.plan(checkpoints("qwen3_moe", torch.bfloat16), 4, zero_stage=2, device_memory=10**6)
    page = page_of(plan, "source")
    assert "<strong>does not fit</strong>: device memory" in page
    for memory in plan.ranks[0].memory.values():
        for name, nbytes in {**memory.host, **memory.device}.items():
            assert f'title="{name} {decimal(nbytes)}"' in page
    assert page.count("<script") == 0


def test_names_are_escaped(tmp_path: Path) -> None:
    save_file({HOSTILE: torch.ones(2), "weight": torch.ones(1, 1)}, tmp_path / "model.safetensors")
    plan = zerostart.plan(tmp_path / "model.safetensors", 1, model=lambda: torch.nn.Linear(1, 1))
    page = page_of(plan, HOSTILE)
    assert "<img" not in page
    assert "<script" not in page
    assert "&lt;img src=x" in page


def test_plan_command_writes_a_page(checkpoints: TinyCheckpoints, tmp_path: Path) -> None:
    import typer

    from zerostart.cli.plan import command

    application = typer.Typer()
    application.command()(command)
    file = tmp_path / "plan.html"
    common = [str(checkpoints("qwen3")), "--world-size", "2", "--html"]
    assert CliRunner().invoke(application, [*common, str(file)]).exit_code == 0
    assert file.read_text(encoding="utf-8").startswith("<!doctype html>")
    with pytest.raises(zerostart.ZerostartError, match="the page cannot be written"):
        CliRunner().invoke(application, [*common, str(tmp_path / "no" / "x")], catch_exceptions=False)
