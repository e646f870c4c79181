"""A checkpoint that holds both names of a tied pair: equal or not, the outcome is transformers' own."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import zerostart
from tests.ranks import rank_outcomes, run_ranks
from tests.tiny import TinyCheckpoints
from zerostart.errors import ReadError


def with_head(checkpoints: TinyCheckpoints, out: Path, change: float) -> Path:
    """The tied tiny Qwen3 with its head written out, changed in its last element by ``change``."""
    source = checkpoints("qwen3")
    out.mkdir()
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(Path(source).glob("*.safetensors")):
        tensors |= load_file(file)
    head = tensors["model.embed_tokens.weight"].clone()
    head[-1, -1] += change
    save_file({**tensors, "lm_head.weight": head}, out / "model.safetensors", metadata={"format": "pt"})
    (out / "config.json").write_bytes((Path(source) / "config.json").read_bytes())
    return out


def load_tied(path: Path, engine: str) -> tuple[bool, dict[str, torch.Tensor]]:
    model = zerostart.load(path, engine=engine, progress=False)
    full = {name: t for name, t in zerostart.full_tensors(model, rank=None) if t is not None}
    return model.lm_head.weight is model.model.embed_tokens.weight, full


@pytest.mark.parametrize("engine", ["deepspeed", "fsdp2"])
@pytest.mark.parametrize("change", [0.0, 1.0])
def test_both_names_present(checkpoints: TinyCheckpoints, tmp_path: Path, engine: str, change: float) -> None:
    path = with_head(checkpoints, tmp_path / "both", change)
    reference = AutoModelForCausalLM.from_pretrained(path)
    expected = reference.state_dict()
    for tied, full in run_ranks(load_tied, 2, path, engine):
        assert tied == (reference.lm_head.weight is reference.model.embed_tokens.weight)
        assert full.keys() == expected.keys()
        for name, tensor in full.items():
            assert torch.equal(tensor, expected[name]), name


def load_and_fail_on_one(path: Path) -> None:
    import torch.distributed as dist

    from zerostart.loading import preparation

    if dist.get_rank() == 0:

        def broken(*_: object) -> bool:
            raise ReadError("the disk has a bad day")

        preparation._equal_part = broken
    zerostart.load(path, engine="fsdp2", progress=False)


def test_a_rank_that_fails_to_compare_fails_all(checkpoints: TinyCheckpoints, tmp_path: Path) -> None:
    path = with_head(checkpoints, tmp_path / "both", 0.0)
    for outcome in rank_outcomes(load_and_fail_on_one, 2, path):
        assert outcome.error == "zerostart.errors.ReadError"
        assert "rank 0: the disk has a bad day" in outcome.message
