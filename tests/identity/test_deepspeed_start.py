"""``deepspeed.initialize`` on a load needs less memory.

The expectation is DeepSpeed without zerostart's override.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn

import zerostart
from tests.identity.test_deepspeed_compositions import BATCH, LENGTH, configuration
from tests.ranks import run_ranks
from tests.tiny import TINY, TinyCheckpoints
from zerostart.transfer import PeakMeter
from zerostart.transfer.meter import anonymous_bytes
from zerostart.upstream.deepspeed import zero3_start as deepspeed_start

MIB = 1 << 20
KIND = "qwen3_moe_aligned"
GROUPS = ("one", "two", "frozen", "late", "mixed")
PARAMETERS: dict[str, Any] = {"offload_param": {"device": "cpu", "pin_memory": False}}
OPTIMIZER: dict[str, Any] = {"offload_optimizer": {"device": "cpu", "pin_memory": False}}
#: Section ``zero_optimization`` by placement.
PLACEMENTS: dict[str, dict[str, Any]] = {
    "accelerator": {},
    "offload-param": PARAMETERS,
    "offload-optimizer": OPTIMIZER,
    "offload-both": {**PARAMETERS, **OPTIMIZER, "sub_group_size": 3000},
    "sub-groups": {"sub_group_size": 1500, "stage3_prefetch_bucket_size": 0},
}


def placement_config(placement: str) -> dict[str, Any]:
    settings = {"bf16": {"enabled": True}, "zero_force_ds_cpu_optimizer": False}
    return configuration(**PLACEMENTS[placement]) | settings


@pytest.mark.slow
@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("placement", ["accelerator", "offload-param", "offload-optimizer", "sub-groups"])
def test_optimizer_starts_like_without_the_override(
    placement: str, groups: str, checkpoints: TinyCheckpoints
) -> None:
    path = checkpoints("flint" if groups == "mixed" else KIND, torch.bfloat16)
    results = run_ranks(start_both_ways, 2, path, placement_config(placement), groups)
    for (ours, in_place), (theirs, moved) in results:
        assert ours == theirs
        assert in_place
        assert not moved


def start_both_ways(path: Path, config: dict[str, Any], groups: str) -> list[tuple[Any, bool]]:
    results = []
    original = deepspeed_start.is_known
    for function in (original, lambda: False):
        deepspeed_start.is_known = function  # type: ignore[assignment]
        results.append(start_and_train(path, config, groups))
    deepspeed_start.is_known = original
    return results


def start_and_train(path: Path, config: dict[str, Any], groups: str) -> tuple[Any, bool]:
    """Return values, and True if partitions stay in place."""
    import deepspeed

    model: Any = zerostart.load(path, engine_config=config, progress=False)
    parameters = list(model.parameters())
    if groups == "frozen":
        for parameter in parameters[::3]:
            parameter.requires_grad = False
    if groups == "late":
        parameters = parameters[7:]
        for parameter in model.parameters():
            parameter.requires_grad = any(parameter is p for p in parameters)
    trained = [p for p in parameters if p.requires_grad]
    parts: Any = trained
    if groups in ("two", "mixed"):
        parts = [{"params": trained[1::2], "weight_decay": 0.1}, {"params": trained[::2][::-1]}]
    buffers = {p.ds_tensor.untyped_storage().data_ptr() for p in model.parameters()}
    optimizer = torch.optim.AdamW(parts, lr=1e-3)
    model.train()
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
    buffers_after = {p.ds_tensor.untyped_storage().data_ptr() for p in model.parameters()}
    flat_groups = [engine.optimizer.fp32_partitioned_groups_flat, [p.ds_tensor for p in model.parameters()]]
    bits = [[flat.detach().clone().view(torch.uint8).tolist() for flat in flats] for flats in flat_groups]
    numbers = []
    vocabulary = int(TINY["flint" if groups == "mixed" else KIND][1]["vocab_size"])
    generator = torch.Generator().manual_seed(7)
    tokens = torch.randint(3, vocabulary, (dist.get_world_size(), BATCH, LENGTH), generator=generator)
    for _ in range(2):
        batch = tokens[dist.get_rank()]
        loss = engine(input_ids=batch, labels=batch).loss
        engine.backward(loss)
        engine.step()
        numbers += [loss.item(), float(engine.get_global_grad_norm())]
    engine.destroy()
    return (bits, numbers), buffers == buffers_after


SIDE, LAYERS = 2048, 16
#: Bytes of partition, master and gradients for each bf16 element, by placement.
BYTES_PER_ELEMENT = {"accelerator": 2 + 4 + 2, "offload-param": 2 + 4 + 2, "offload-both": 2 + 4 + 4 + 2}


@pytest.mark.slow
@pytest.mark.parametrize("placement", BYTES_PER_ELEMENT)
def test_initialize_needs_only_the_memory_it_keeps(placement: str, tmp_path: Path) -> None:
    """fp32 gradients would hide a second master."""
    path = tmp_path / "model.safetensors"
    names = [f"{number}.weight" for number in range(LAYERS)]
    save_file({name: torch.randn(SIDE, SIDE).bfloat16() for name in names}, path)
    config = placement_config(placement) | {"data_types": {"grad_accum_dtype": "bf16"}}
    config["zero_optimization"] |= {"reduce_bucket_size": 1_000_000, "sub_group_size": 10**9}
    share = LAYERS * SIDE * SIDE // 2
    for peak, final in run_ranks(measure_initialize, 2, path, config):
        assert final <= BYTES_PER_ELEMENT[placement] * share + 32 * MIB, final / share
        assert peak <= final + 32 * MIB, (peak / share, final / share)


def measure_initialize(path: Path, config: dict[str, Any]) -> tuple[int, int]:
    """Return peak and final growth of anonymous bytes."""
    initialize(nn.Sequential(nn.Linear(8, 8, bias=False, dtype=torch.bfloat16)), config)  # imports, groups
    before = anonymous_bytes()
    with PeakMeter(torch.device("cpu")) as meter:
        with torch.device("meta"):
            layers = [nn.Linear(SIDE, SIDE, bias=False) for _ in range(LAYERS)]
        model = zerostart.load(path, model=nn.Sequential(*layers), engine_config=config, progress=False)
        engine = initialize(model, config)
    final = anonymous_bytes() - before
    assert engine is not None
    return meter.host_bytes, final


def initialize(model: nn.Module, config: dict[str, Any]) -> Any:
    """Start the engine with two reordered parameter groups."""
    import deepspeed

    halves = [list(model.parameters())[1::2], list(model.parameters())[::2]]
    optimizer = torch.optim.AdamW([{"params": half} for half in halves if half])
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
