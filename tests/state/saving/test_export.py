"""``zerostart export``: plain transformers opens the result."""

import json
import resource
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.foreign_checkpoints import write_dcp, write_deepspeed
from tests.ranks import run_ranks
from tests.tiny import TinyCheckpoints
from zerostart.cli import main
from zerostart.state.converting.convert import convert


def run_export(*arguments: str) -> int:
    with pytest.raises(SystemExit) as exit_info:
        main(["export", *arguments])
    return int(exit_info.value.code or 0)


@pytest.mark.slow
def test_zero_3_checkpoint_opens_in_plain_transformers(tmp_path: Path) -> None:
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
    from transformers import AutoModelForCausalLM

    source, out = str(tmp_path / "run"), tmp_path / "out"
    run_ranks(write_deepspeed, 2, source, 3, True, True)
    assert run_export(source, str(out), "--dtype", "bfloat16") == 0
    expected = get_fp32_state_dict_from_zero_checkpoint(source, lazy_mode=False)
    model = AutoModelForCausalLM.from_pretrained(out)
    assert model.dtype == torch.bfloat16
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, expected[name].bfloat16()), name
    # Like save_pretrained, the export writes a tied parameter under one name.
    assert "lm_head.weight" not in load_file(out / "model.safetensors")
    assert not (out / "zero_to_fp32.py").exists()


@pytest.mark.slow
def test_distributed_checkpoint_keeps_its_values(tmp_path: Path) -> None:
    source, out = str(tmp_path / "dcp"), tmp_path / "out"
    expected = run_ranks(write_dcp, 2, source, True)[0]
    exported = convert(source, out, max_shard_size="20KB", replace=True)
    assert len(exported.files) > 1
    weights: dict[str, torch.Tensor] = {}
    for file in exported.files:
        weights |= load_file(out / file)
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


def test_ordinary_checkpoint_keeps_its_tensors(tmp_path: Path, checkpoints: TinyCheckpoints) -> None:
    folder = checkpoints("qwen3", torch.bfloat16, sharded=True)
    exported = convert(folder, tmp_path / "out", replace=True)
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    before = {name: t for file in set(index.values()) for name, t in load_file(folder / file).items()}
    after = {name: t for file in exported.files for name, t in load_file(tmp_path / "out" / file).items()}
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_newest_checkpoint_of_a_run_is_exported(tmp_path: Path, checkpoints: TinyCheckpoints) -> None:
    folder = checkpoints("qwen3", torch.bfloat16)
    for step in (9, 10):
        shutil.copytree(folder, tmp_path / "run" / f"checkpoint-{step}")
    weights = load_file(folder / "model.safetensors")
    newest = {name: tensor + 1 for name, tensor in weights.items()}
    save_file(newest, tmp_path / "run" / "checkpoint-10" / "model.safetensors")
    convert(tmp_path / "run", tmp_path / "out", replace=True)
    exported = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(exported[name], newest[name]) for name in newest)


def test_whole_numbers_and_quantised_types_are_not_cast(tmp_path: Path) -> None:
    tensors = {
        "a": torch.arange(6, dtype=torch.int64),
        "b": torch.randn(5).to(torch.float8_e4m3fn),
        "c": torch.randn(3, 4),
        "empty": torch.empty(0, 3),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    convert(tmp_path / "model.safetensors", tmp_path / "out", dtype=torch.float16, replace=True)
    exported = load_file(tmp_path / "out" / "model.safetensors")
    assert {name: t.dtype for name, t in exported.items()} == {
        "a": torch.int64,
        "b": torch.float8_e4m3fn,
        "c": torch.float16,
        "empty": torch.float16,
    }
    assert torch.equal(exported["c"], tensors["c"].half())


def measure_export_memory(source: str, out: str) -> int:
    """Return the export's growth of peak memory, in bytes."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    convert(source, out, replace=True)
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024


@pytest.mark.slow
def test_memory_is_bounded(tmp_path: Path) -> None:
    save_file({"large": torch.zeros(300_000_000)}, tmp_path / "model.safetensors")
    added = run_ranks(measure_export_memory, 1, str(tmp_path / "model.safetensors"), str(tmp_path / "out"))[0]
    assert added < 256 << 20
