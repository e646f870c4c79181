"""What the commands print, in narrow and in wide terminals: no word cut, no number parted from its unit."""

import io
import json
import re

import pytest
import torch
from rich.console import Console
from safetensors.torch import save_file

import zerostart
from zerostart.cli import main
from zerostart.cli.memory_view import show_comparison, show_plan
from zerostart.live.report import Report
from zerostart.transfer import PeakMeter
from zerostart.transfer.meter import peak_bytes

WIDTHS = (60, 80, 100, 120)
BORDERS = re.compile("[━─┃│┏┓└┘┡┩┳┴╇┼]+")


def printed(width, show):
    """What ``show`` prints to a terminal of ``width`` columns, its lines checked."""
    file = io.StringIO()
    show(Console(width=width, file=file, force_terminal=True, color_system=None))
    return checked(file.getvalue(), width)


def checked(text, width):
    assert "…" not in text, text
    assert all(len(line.rstrip()) <= width for line in text.splitlines()), text
    return text


def cells(text):
    """The cells of all tables, and the lines that belong to none."""
    return {cell.strip() for line in text.splitlines() for cell in BORDERS.split(line)}


@pytest.mark.parametrize("width", WIDTHS)
def test_a_plan(width, checkpoints):
    given = {"world_size": 37, "device_memory": 10**9, "host_memory": 10**10, "storage_rate": 7e9}
    made = zerostart.plan(checkpoints("qwen3_moe"), **given)
    found = cells(printed(width, lambda console: show_plan(made, "a/checkpoint", console)))
    headings = ("ranks", "reads", "operations", "time", "memory", "load", "initialize", "first step")
    assert found >= {*headings, "device", "host", "< 1 ms"}
    assert any(re.fullmatch(r"\d+\.\d kB", cell) for cell in found)
    assert not any("e-" in cell for cell in found)


@pytest.mark.parametrize("width", WIDTHS)
def test_forecast_and_measurement(width):
    told = [{"read_bytes": 3_000_000, "peak_host_bytes": 157, "peak_device_bytes": 0, "read_seconds": 39e-6}]
    small = [{**told[0], "peak_host_bytes": 6_700_000, "seconds": {"read": 0.01}}]
    found = printed(width, lambda console: show_comparison(told, small, console))
    assert cells(found) >= {"forecast", "measured", "3.0 MB", "6.7 MB", "157 bytes", "< 1 ms", "10 ms"}
    assert re.findall(r"[\d.]+%", found) == ["100.0%"], "only what was read is to be compared"
    told = [{**told[0], "peak_host_bytes": 157_000_000, "read_seconds": 1.5}]
    big = [{**told[0], "peak_host_bytes": 160_000_000, "seconds": {"read": 2.0}}]
    found = printed(width, lambda console: show_comparison(told, big, console))
    assert re.findall(r"[\d.]+%", found) == ["100.0%", "101.9%", "133.3%"]
    uncounted = [{**big[0], "peak_device_bytes": None}]
    assert "unknown" in cells(printed(width, lambda console: show_comparison(told, uncounted, console)))


def test_figures_that_an_accelerator_does_not_give():
    """As of a device whose allocator counts nothing: no figure, and not a figure of nothing."""
    if torch.accelerator.is_available():
        pytest.skip("torch asks the accelerator that is there, and takes no other")
    with PeakMeter(torch.device("mps")) as meter:
        assert peak_bytes(meter.device) is None
    assert meter.device_bytes is None
    assert meter.host_bytes >= 0
    text = str(Report(phases={"total": 1.0}, peak_device_bytes=meter.device_bytes))
    assert "on the host, unknown on the device" in text


def inspected(capsys, monkeypatch, width, path):
    monkeypatch.setenv("COLUMNS", str(width))
    with pytest.raises(SystemExit) as ended:
        main(["inspect", str(path)])
    assert not ended.value.code
    return capsys.readouterr().out


@pytest.mark.parametrize("width", WIDTHS)
def test_an_inspection(width, capsys, monkeypatch, tmp_path):
    name = "model.language_model.layers.11.self_attn.some_projection.weight"
    save_file({name: torch.zeros(1234, 56)}, tmp_path / "model.safetensors")
    found = inspected(capsys, monkeypatch, width, tmp_path)
    assert "…" not in found
    assert cells(found) >= {"tensors", "parameters", "bytes", "69,104", "276.4 kB", "shape", "[1234, 56]"}
    column = "".join(line.split("│")[1].strip() for line in found.splitlines() if line.startswith("│"))
    assert name in column


@pytest.mark.parametrize("width", WIDTHS)
def test_an_inspection_of_a_pipeline(width, capsys, monkeypatch, tmp_path):
    parts = {"transformer": "FluxTransformer2DModel", "text_encoder_2": "T5EncoderModel"}
    index = {name: ["diffusers", kind] for name, kind in parts.items()}
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": "FluxPipeline", **index}))
    for name in parts:
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
        tensors = {"a": torch.zeros(1234, 5678), "b": torch.zeros(1, dtype=torch.bfloat16)}
        save_file(tensors, tmp_path / name / "model.safetensors")
    found = inspected(capsys, monkeypatch, width, tmp_path)
    assert "…" not in found
    headings = {"component", "class", "dtypes", "tensors", "parameters", "bytes"}
    assert cells(found) >= {*headings, "7,006,653", "28.0 MB", *parts, *parts.values(), "F32, BF16"}
