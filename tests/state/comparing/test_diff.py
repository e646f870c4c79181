"""``zerostart.diff``: compare two checkpoints tensor by tensor."""

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import zerostart
from tests.ranks import run_ranks
from tests.tiny import TinyCheckpoints
from zerostart.cli import main

Tensors = dict[str, torch.Tensor]


def write(path: Path, tensors: Tensors) -> Path:
    path.mkdir()
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


def old_tensors() -> Tensors:
    torch.manual_seed(0)
    return {
        "same": torch.randn(7, 5),
        "values": torch.randn(300, 5000),
        "zeros": torch.zeros(4),
        "nan": torch.tensor([1.0, math.nan, math.inf]),
        "shape": torch.randn(6, 2),
        "dtype": torch.arange(6, dtype=torch.float32),
        "counts": torch.arange(5),
        "flags": torch.tensor([True, False]),
        "small": torch.randn(40).to(torch.float8_e4m3fn),
        "waves": torch.randn(4, dtype=torch.complex64),
        "gone": torch.randn(2),
    }


def new_tensors() -> Tensors:
    tensors = old_tensors()
    tensors["values"][250, 3] += 0.5
    tensors["values"][0, 0] -= 2.0
    tensors["zeros"][1] = -0.0
    tensors["nan"][0] = math.nan
    tensors["shape"] = tensors["shape"].reshape(2, 6).clone()
    tensors["dtype"] = tensors["dtype"].to(torch.bfloat16)
    tensors["counts"][4] = 14
    tensors["flags"][1] = True
    tensors["waves"][2] += 3j
    tensors["new"] = tensors.pop("gone")
    return tensors


def test_differences_by_tensor(tmp_path: Path) -> None:
    a, b = (write(tmp_path / "a", old_tensors()), write(tmp_path / "b", new_tensors()))
    difference = zerostart.diff(a, b)
    assert sorted(difference.equal) == ["same", "small"]
    assert difference.only_a == ("gone",)
    assert difference.only_b == ("new",)
    assert difference.differing["values"].elements == 2
    assert difference.differing["values"].largest == pytest.approx(2.0, abs=1e-6)
    assert difference.differing["zeros"][:2] == (0.0, 1)
    assert math.isnan(difference.differing["nan"].largest)
    assert difference.differing["nan"].elements == 1
    assert difference.differing["shape"].note == "shapes [6, 2] and [2, 6]"
    assert difference.differing["dtype"] == (0.0, 0, "dtypes F32 and BF16")
    assert difference.differing["counts"][:2] == (10.0, 1)
    assert difference.differing["flags"][:2] == (1.0, 1)
    assert difference.differing["waves"][0] == pytest.approx(3.0, abs=1e-6)
    assert not difference.same
    assert zerostart.diff(a, a).same
    assert set(zerostart.diff(b, b).equal) == set(new_tensors())


def test_same_tensors_in_other_file_layouts(checkpoints: TinyCheckpoints, tmp_path: Path) -> None:
    single_file, sharded = checkpoints("qwen3_moe"), checkpoints("qwen3_moe", sharded=True)
    tensors: Tensors = {}
    for file in single_file.glob("*.safetensors"):
        tensors |= load_file(file)
    transposed = {n: t.t().contiguous().t() if t.dim() == 2 else t for n, t in tensors.items()}
    torch.save(transposed, tmp_path / "pytorch_model.bin")
    for other_form in (sharded, tmp_path, single_file / "model.safetensors"):
        assert zerostart.diff(single_file, other_form).same
        assert zerostart.diff(str(other_form), single_file).same


def test_diff_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = (write(tmp_path / "a", old_tensors()), write(tmp_path / "b", new_tensors()))
    for arguments, code in (([a, a], 0), ([a, b], 1), ([a, b, "--json"], 1), ([a, tmp_path / "none"], 1)):
        with pytest.raises(SystemExit) as exit_info:
            main(["diff", *map(str, arguments)])
        assert exit_info.value.code == code
        out, errors = capsys.readouterr()
        if "--json" in arguments:
            document = json.loads(out)
            assert document["only_b"] == ["new"]
            assert document["differing"]["values"]["elements"] == 2
            assert document["differing"]["nan"]["largest"] is None
        elif code and b in arguments:
            assert "values: 2 elements differ, by 2 at most" in out
        elif code:
            assert errors.startswith("error: ")
        else:
            assert out == "11 equal, 0 differing, 0 only in a, 0 only in b\n"


def test_training_states(checkpoints: TinyCheckpoints, tmp_path: Path) -> None:
    """States compare by all folders, or by their model."""
    source = checkpoints("qwen3")
    model = zerostart.load(source, engine="fsdp2", progress=False)
    a, b = tmp_path / "a", tmp_path / "b"
    zerostart.save_state(a, model)
    zerostart.verify(a)
    assert zerostart.diff(a, source).same
    with torch.no_grad():
        next(model.parameters()).add_(1)
    zerostart.save_state(b, model)
    difference = zerostart.diff(a, b)
    assert list(difference.differing) == ["model/model.embed_tokens.weight"]
    assert {name.partition("/")[0] for name in difference.equal} >= {"model"}
    assert list(zerostart.diff(source, b).differing) == ["model.embed_tokens.weight"]


def compare_live_models(source: Path, edited: Path) -> None:
    for engine in ("deepspeed", "fsdp2"):
        model = zerostart.load(source, engine=engine, progress=False)
        assert zerostart.diff(model, source).same
        assert list(zerostart.diff(edited, model).differing) == ["model.embed_tokens.weight"]
        assert zerostart.diff(model, model).same


@pytest.mark.slow
def test_live_models_compare_equal_to_their_checkpoint(checkpoints: TinyCheckpoints) -> None:
    source = checkpoints("qwen3_moe_aligned")

    def edit(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.embed_tokens.weight"][0, 0] += 1

    run_ranks(compare_live_models, 2, source, checkpoints.edited(source, "edited", edit))
