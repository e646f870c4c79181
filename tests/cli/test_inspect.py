"""Test ``zerostart inspect``."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.cli.running import make_runner
from tests.tiny import TinyCheckpoints

run = make_runner("inspect")


def test_json(checkpoints: TinyCheckpoints, capsys: pytest.CaptureFixture[str]) -> None:
    folder = checkpoints("mixtral", torch.bfloat16, sharded=True)
    code, out, err = run(capsys, str(folder), "--json")
    assert (code, err) == (0, "")
    document = json.loads(out)
    assert document["architectures"] == ["MixtralForCausalLM"]
    assert document["files"] == sorted(path.name for path in folder.glob("*.safetensors"))
    expected = {name: t for file in document["files"] for name, t in load_file(folder / file).items()}
    assert {t["name"]: t["shape"] for t in document["tensors"]} == {
        n: list(t.shape) for n, t in expected.items()
    }
    assert document["parameters"] == sum(tensor.numel() for tensor in expected.values())
    assert document["checkpoint_bytes"] == 2 * document["parameters"]
    assert document["dtypes"]["BF16"]["tensors"] == len(expected)
    assert document["largest_tensor_bytes"] == max(tensor.nbytes for tensor in expected.values())
    assert expected[document["largest_tensor"]].nbytes == document["largest_tensor_bytes"]
    for entry in document["tensors"]:
        assert entry["dtype"] == "BF16"
        with (folder / entry["file"]).open("rb") as file:
            file.seek(entry["offset"])
            data = file.read(entry["nbytes"])
        assert data == bytes(expected[entry["name"]].flatten().view(torch.uint8).numpy())


def test_names_are_printed_without_markup(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_file({"[bold]x[/bold]": torch.zeros(2), "[/]": torch.zeros(1)}, tmp_path / "[red].safetensors")
    code, out, _ = run(capsys, str(tmp_path))
    assert code == 0
    assert "[bold]x[/bold]" in out
    assert "not stated" in out


def test_failures_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.zeros(200)}, path)
    path.write_bytes(path.read_bytes()[:-1])
    code, out, err = run(capsys, str(tmp_path))
    assert code == 1
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert str(path) in err
    assert "'a'" in err
    assert run(capsys, str(tmp_path / "absent"))[0] == 1
