"""Two checkpoints, tensor by tensor."""

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


def made(path: Path, tensors: Tensors) -> Path:
    path.mkdir()
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


def a_few() -> Tensors:
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


def changed() -> Tensors:
    tensors = a_few()
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


def test_two_checkpoints(tmp_path: Path) -> None:
    a, b = made(tmp_path / "a", a_few()), made(tmp_path / "b", changed())
    found = zerostart.diff(a, b)
    assert sorted(found.equal) == ["same", "small"]
    assert found.only_a == ("gone",)
    assert found.only_b == ("new",)
    assert found.differing["values"].elements == 2
    assert found.differing["values"].largest == pytest.approx(2.0, abs=1e-6)
    assert found.differing["zeros"][:2] == (0.0, 1)
    assert math.isnan(found.differing["nan"].largest)
    assert found.differing["nan"].elements == 1
    assert found.differing["shape"].note == "shapes [6, 2] and [2, 6]"
    assert found.differing["dtype"] == (0.0, 0, "dtypes F32 and BF16")
    assert found.differing["counts"][:2] == (10.0, 1)
    assert found.differing["flags"][:2] == (1.0, 1)
    assert found.differing["waves"][0] == pytest.approx(3.0, abs=1e-6)
    assert not found.same
    assert zerostart.diff(a, a).same
    assert set(zerostart.diff(b, b).equal) == set(changed())


def test_other_files_same_tensors(checkpoints: TinyCheckpoints, tmp_path: Path) -> None:
    """In one file, in many, or in torch's own with transposed views: it is the tensors that are compared."""
    one, many = checkpoints("qwen3_moe"), checkpoints("qwen3_moe", sharded=True)
    tensors: Tensors = {}
    for file in one.glob("*.safetensors"):
        tensors |= load_file(file)
    turned = {n: t.t().contiguous().t() if t.dim() == 2 else t for n, t in tensors.items()}
    torch.save(turned, tmp_path / "pytorch_model.bin")
    for other in (many, tmp_path, one / "model.safetensors"):
        assert zerostart.diff(one, other).same
        assert zerostart.diff(str(other), one).same


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = made(tmp_path / "a", a_few()), made(tmp_path / "b", changed())
    for arguments, code in (([a, a], 0), ([a, b], 1), ([a, b, "--json"], 1), ([a, tmp_path / "none"], 1)):
        with pytest.raises(SystemExit) as ended:
            main(["diff", *map(str, arguments)])
        assert ended.value.code == code
        out, error = capsys.readouterr()
        if "--json" in arguments:
            document = json.loads(out)
            assert document["only_b"] == ["new"]
            assert document["differing"]["values"]["elements"] == 2
            assert document["differing"]["nan"]["largest"] is None
        elif code and b in arguments:
            assert "values: 2 elements differ, by 2 at most" in out
        elif code:
            assert error.startswith("error: ")
        else:
            assert out == "11 equal, 0 differing, 0 only in a, 0 only in b\n"


def test_training_states(checkpoints: TinyCheckpoints, tmp_path: Path) -> None:
    """Each other by what lies in their folders; with checkpoints of models by their model alone."""
    source = checkpoints("qwen3")
    model = zerostart.load(source, engine="fsdp2", progress=False)
    a, b = tmp_path / "a", tmp_path / "b"
    zerostart.save_state(a, model)
    zerostart.verify(a)
    assert zerostart.diff(a, source).same
    with torch.no_grad():
        next(model.parameters()).add_(1)
    zerostart.save_state(b, model)
    found = zerostart.diff(a, b)
    assert list(found.differing) == ["model/model.embed_tokens.weight"]
    assert {name.partition("/")[0] for name in found.equal} >= {"model"}
    assert list(zerostart.diff(source, b).differing) == ["model.embed_tokens.weight"]


def live(source: Path, edited: Path) -> None:
    for engine in ("deepspeed", "fsdp2"):
        model = zerostart.load(source, engine=engine, progress=False)
        assert zerostart.diff(model, source).same
        assert list(zerostart.diff(edited, model).differing) == ["model.embed_tokens.weight"]
        assert zerostart.diff(model, model).same


@pytest.mark.slow
def test_live_models_are_compared_as_they_are_saved(checkpoints: TinyCheckpoints) -> None:
    source = checkpoints("qwen3_moe_aligned")

    def edit(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.embed_tokens.weight"][0, 0] += 1

    run_ranks(live, 2, source, checkpoints.edited(source, "edited", edit))
