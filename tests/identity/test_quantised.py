"""Quantised checkpoints, dequantised on the way into shards: equal to transformers' dequantised load."""

import json
import traceback
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import zerostart
from tests.identity.snapshots import Snapshot, differences, pretrained
from tests.quantised import DEEPSEEK, QUANTISED, deepseek_v3_fp8
from tests.ranks import run_ranks

BF16 = torch.bfloat16


@dataclass(frozen=True)
class Task:
    """One load: the checkpoint, the dtype asked for, the chunk size, and what it has to equal."""

    name: str
    path: Path
    dtype: torch.dtype | None
    chunk_size: int | None
    reference: Path


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> list[Task]:
    folder = tmp_path_factory.mktemp("quantised")
    made = []
    for name, make in QUANTISED.items():
        path = make(folder / name)
        for dtype, chunk in ((None, None), (torch.float32, 1 << 16)):
            reference = folder / f"{name}-{dtype}.pt"
            whole = Snapshot.of(pretrained(path, dtype))
            if dtype is not None:
                # Transformers leaves what is not quantised in the dtype stored, whatever dtype was asked for.
                whole.state = {name: tensor.to(dtype) for name, tensor in whole.state.items()}
            torch.save(whole, reference)
            made.append(Task(f"{name}-{dtype}", path, dtype, chunk, reference))
    return made


@pytest.mark.parametrize("engine", ["deepspeed", "fsdp2"])
@pytest.mark.parametrize("world_size", [1, pytest.param(2, marks=pytest.mark.slow), 3])
def test_equal_to_the_dequantised_load(engine: str, world_size: int, tasks: list[Task]) -> None:
    for rank, lines in enumerate(run_ranks(compare, world_size, engine, tasks)):
        assert not lines, f"rank {rank}:\n" + "\n".join(lines)


def compare(engine: str, tasks: list[Task]) -> list[str]:
    """On a rank: the differences of every task."""
    lines: list[str] = []
    for task in tasks:
        reference = torch.load(task.reference, weights_only=False)
        try:
            model = zerostart.load(
                task.path, engine=engine, dtype=task.dtype, chunk_size=task.chunk_size, progress=False
            )
            lines += [f"{task.name}: {line}" for line in differences(model, reference, engine)]
            report = zerostart.report(model)
            if report.read_bytes > 1.3 * sum(f.stat().st_size for f in task.path.glob("*.safetensors")):
                lines.append(f"{task.name}: {report.read_bytes} bytes read")
        except Exception:
            lines.append(f"{task.name}: {traceback.format_exc()}")
    return lines


def test_blocks_that_the_edge_of_a_weight_cuts_off(tmp_path: Path) -> None:
    """DeepSeek-V3 has them; transformers refuses them, or is wrong. The formula is of the model's release."""
    path = deepseek_v3_fp8(tmp_path / "cut", (32, 32), DEEPSEEK)
    stored: dict[str, torch.Tensor] = {}
    for file in path.glob("*.safetensors"):
        stored |= load_file(file)
    model = zerostart.load(path, engine="fsdp2", dtype=torch.float32, progress=False)
    loaded = dict(zerostart.full_tensors(model))
    checked = 0
    for name, scales in stored.items():
        plain = name.removesuffix("_scale_inv")
        if name.endswith("_scale_inv") and plain in loaded:
            weight = stored[plain]
            spread = scales.repeat_interleave(32, 0).repeat_interleave(32, 1)
            want = weight.float() * spread[: weight.shape[0], : weight.shape[1]]
            assert torch.equal(loaded[plain], want), plain
            checked += any(size % 32 for size in weight.shape)
    assert checked > 10


def test_a_method_without_dequantisation_is_refused_by_name(tmp_path: Path) -> None:
    path = QUANTISED["gpt_oss-mxfp4"](tmp_path / "awq")
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True}
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(zerostart.ZerostartError, match="awq"):
        zerostart.load(path, engine="fsdp2", progress=False)


@pytest.mark.parametrize("name", QUANTISED)
def test_a_save_is_the_dequantised_load_again(name: str, tmp_path: Path) -> None:
    """Saved under names that plain transformers takes as weights; mxfp4's were ``..._blocks``."""
    path = QUANTISED[name](tmp_path / "quantised")
    model = zerostart.load(path, engine="fsdp2", dtype=BF16, progress=False)
    zerostart.save(model, tmp_path / "saved")
    whole, found = pretrained(path, BF16).state_dict(), pretrained(tmp_path / "saved", BF16).state_dict()
    assert whole.keys() == found.keys()
    assert not [n for n, tensor in whole.items() if not torch.equal(found[n], tensor.to(found[n].dtype))]
