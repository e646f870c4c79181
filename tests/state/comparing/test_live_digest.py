"""Live models have the same digests on every engine."""

import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import zerostart
from tests.parity import checkpoint
from tests.ranks import run_ranks
from tests.tiny import TinyCheckpoints
from zerostart.checkpoint.digest import Digests
from zerostart.checkpoint.source import open_catalog
from zerostart.checkpoint.verifying import file_digests
from zerostart.geometry.layout import Layout, dimension_shard, flat_partition, replicated
from zerostart.recipe import spelling
from zerostart.state.comparing.digest import add_share

Options = dict[str, Any]
DEEPSPEED3: Options = {"engine": "deepspeed", "zero_stage": 3}
DEEPSPEED2: Options = {"engine": "deepspeed", "zero_stage": 2}
FSDP2: Options = {"engine": "fsdp2", "zero_stage": 3}


def shard_last_dimension(parameter: torch.nn.Parameter) -> Any:
    from torch.distributed.tensor import Shard

    return Shard(parameter.dim() - 1) if parameter.shape[-1] % 2 == 0 else None


LOADS: dict[int, dict[str, tuple[str, Options]]] = {
    1: {"one rank": ("qwen3_moe", FSDP2)},
    2: {
        "zero3": ("qwen3_moe", DEEPSPEED3),
        "zero2": ("qwen3", DEEPSPEED2),
        "fsdp2": ("qwen3_moe", FSDP2),
        "columns": ("qwen3_moe", {**FSDP2, "engine_config": {"shard_placement_fn": shard_last_dimension}}),
        "replicas": ("qwen3", {**FSDP2, "engine_config": {"replicate": 2}}),
        "experts": ("mixtral", {**FSDP2, "expert_parallel": 2}),
        "tensors": ("parallel", {**FSDP2, "tensor_parallel": 2}),
    },
    3: {"zero3": ("mixtral", DEEPSPEED3), "fsdp2": ("mixtral", FSDP2)},
}


def digests_of(tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    digests = Digests((name, spelling(t.dtype), t.shape) for name, t in tensors.items())
    for name, tensor in tensors.items():
        digests.add(name, 0, tensor.detach().contiguous().view(-1))
    return digests.summed()


def digests_of_loads(size: int, folders: dict[str, Path]) -> dict[str, dict[str, str] | str]:
    digests: dict[str, dict[str, str] | str] = {}
    for name, (kind, options) in LOADS[size].items():
        try:
            model = zerostart.load(folders[kind], **options, progress=False)
            digests[name] = zerostart.digest(model)
        except Exception:
            digests[name] = traceback.format_exc()
    return digests


@pytest.mark.slow
@pytest.mark.parametrize("size", LOADS)
def test_every_layout_has_the_same_digests(size: int, checkpoints: TinyCheckpoints, tmp_path: Path) -> None:
    kinds = sorted({kind for kind, _ in LOADS[size].values()})
    folders = {kind: checkpoints(kind, torch.bfloat16) for kind in kinds if kind != "parallel"}
    if "parallel" in kinds:
        folders["parallel"] = checkpoint("qwen3", tmp_path)
    outcomes = run_ranks(digests_of_loads, size, size, folders)
    expected = {
        kind: digests_of(AutoModelForCausalLM.from_pretrained(folders[kind]).state_dict()) for kind in kinds
    }
    for digests in outcomes:
        for name, (kind, _) in LOADS[size].items():
            assert digests[name] == expected[kind], name


LAYOUTS = {
    "flat": flat_partition,
    "rows": lambda shape, rank, size: dimension_shard(shape, 0, rank, size),
    "middle": lambda shape, rank, size: dimension_shard(shape, 1, rank, size),
    "columns": lambda shape, rank, size: dimension_shard(shape, len(shape) - 1, rank, size),
}


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(5, 7, 11), (3, 9), (64, 33, 40)])
def test_shards_of_any_layout(shape: tuple[int, ...], layout: str, dtype: torch.dtype) -> None:
    """Padding and storage order do not change the digest."""
    torch.manual_seed(0)
    whole = (torch.randn(shape) * 30).to(dtype)
    for size in (1, 2, 3, 4):
        digests = Digests([("t", spelling(dtype), shape)])
        for rank in range(size):
            shard: Layout = LAYOUTS[layout](shape, rank, size)  # type: ignore[operator]
            storage = torch.full((shard.numel,), 77).to(dtype)
            for first, count, start in shard.runs():
                storage[start : start + count] = whole.view(-1)[first : first + count]
            add_share(digests, "t", shard, storage)
        assert digests.summed() == digests_of({"t": whole})


def test_replicas_count_once() -> None:
    whole = torch.randn(4, 6)
    layout = replicated(whole.shape)
    digests = Digests([("t", "F32", whole.shape)])
    for number in range(3):
        add_share(digests, "t", layout.part(number, 3), whole.view(-1))
    assert digests.summed() == digests_of({"t": whole})


def test_files_have_the_same_digests(checkpoints: TinyCheckpoints, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    folder = checkpoints("qwen3_moe", torch.bfloat16, sharded=True)
    tensors = {n: t for file in folder.glob("*.safetensors") for n, t in load_file(file).items()}
    assert file_digests(open_catalog(folder)) == digests_of(tensors)
