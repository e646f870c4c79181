"""Experts over several ranks whose partitions lie on NVMe, and DeepSpeed's own call that saves them."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import zerostart
from tests import file_aio
from tests.parity import CLIP, batches, checkpoint, optimizer
from tests.ranks import run_ranks

#: Experts of more than 1 MiB on each of four ranks, which is what DeepSpeed swaps.
WIDE = {"hidden_size": 128, "intermediate_size": 768}


def build_swapping() -> None:
    from deepspeed.ops.op_builder import AsyncIOBuilder

    if file_aio.compiled():
        AsyncIOBuilder().load(verbose=False)


def configured(**zero: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": CLIP,
        "zero_optimization": {"stage3_param_persistence_threshold": 0, **zero},
        "zero_allow_untested_optimizer": True,
    }


def step(engine: Any, tokens: torch.Tensor) -> float:
    loss = engine(input_ids=tokens, labels=tokens, use_cache=False).loss
    engine.backward(loss)
    engine.step()
    return float(loss.detach())


def whole(model: Any) -> dict[str, torch.Tensor]:
    return {n: t for n, t in zerostart.full_tensors(model, rank=None) if t is not None}


def swapped(path: Path, folder: Path) -> tuple[list[str], list[float], list[float], list[str]]:
    """Which parameters are on NVMe, losses of both placements, and weights that differ at the end."""
    import deepspeed
    from deepspeed.runtime.swap_tensor.partitioned_param_swapper import PartitionedParamStatus

    if not file_aio.compiled():
        file_aio.install()
    offload = {"device": "nvme", "nvme_path": str(folder), "buffer_size": 2**22, "pin_memory": False}
    found: list[tuple[list[float], dict[str, torch.Tensor]]] = []
    there: list[str] = []
    # DeepSpeed 0.19.8 asks twice for a partition that comes up twice in what it looks ahead at.
    for more in ({"offload_param": offload, "stage3_prefetch_bucket_size": 0}, {}):
        config = configured(stage=3, **more)
        model = zerostart.load(path, engine_config=config, expert_parallel=2, progress=False)
        if more:
            absent = PartitionedParamStatus.NOT_AVAILABLE
            there = [n for n, p in model.named_parameters() if vars(p)["ds_tensor"].status == absent]
        model.train()
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer(model), config=config)
        parts = [batch[dist.get_rank()] for batch in batches(dist.get_world_size())]
        found.append(([step(engine, tokens) for tokens in parts[:2]], whole(engine)))
        del model, engine
    (losses, ours), (expected, memory) = found
    return there, losses, expected, [n for n in memory if not torch.equal(ours[n], memory[n])]


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_on_nvme_as_in_memory(world: int, tmp_path: Path) -> None:
    run_ranks(build_swapping, 1, process_group=False, timeout=280)
    path = checkpoint("mixtral", tmp_path, **WIDE)
    for there, losses, expected, wrong in run_ranks(swapped, world, path, tmp_path / "nvme"):
        assert {name.rpartition(".")[2] for name in there} >= {"gate_up_proj"}
        assert all(".experts." in name for name in there)
        assert (losses, wrong) == (expected, [])


def saved(path: Path, out: Path, stage: int) -> list[str]:
    """Saved and resumed under ``enable``, and refused without; weights that are not as without a stop."""
    import deepspeed
    from transformers import AutoModelForCausalLM

    config = configured(stage=stage)
    parts = [batch[dist.get_rank()] for batch in batches(dist.get_world_size())]

    model = zerostart.load(path, zero_stage=stage, engine_config=config, expert_parallel=2, progress=False)
    plain, *_ = deepspeed.initialize(model=model, optimizer=optimizer(model), config=config)
    for save in (plain.save_checkpoint, plain.save_16bit_model):
        with pytest.raises(zerostart.ZerostartError, match=r"use zerostart\.save_state\(path, engine\)"):
            save(str(out / "own"))

    def started() -> Any:
        model = AutoModelForCausalLM.from_pretrained(path).train()
        return deepspeed.initialize(model=model, optimizer=optimizer(model), config=config)[0]

    with zerostart.enabled("deepspeed", stage, config, expert_parallel=2, progress=False):
        engine = started()
        step(engine, parts[0])
        engine.save_checkpoint(str(out), client_state={"epoch": 3})
        step(engine, parts[1])
        expected = whole(engine)
        engine = started()
        _, client = engine.load_checkpoint(str(out))
        assert client == {"epoch": 3}
        step(engine, parts[1])
        found = whole(engine)
    return [name for name in expected if not torch.equal(found[name], expected[name])]


@pytest.mark.parametrize("stage", [2, pytest.param(1, marks=pytest.mark.slow)])
def test_save_checkpoint(stage: int, tmp_path: Path) -> None:
    path = checkpoint("gpt_oss", tmp_path)
    assert run_ranks(saved, 2, path, tmp_path / "out", stage) == [[], []]
