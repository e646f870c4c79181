"""What engines and wrappers make of a loaded model is saved as the model in it."""

import traceback
from pathlib import Path

import pytest
import torch

import zerostart
from tests.ranks import run_ranks
from tests.state.saving.test_saving import BF16, F32, assert_same_tensors, tensors_in
from tests.tiny import TinyCheckpoints


def _save_wrapped(path: Path, out: Path) -> dict[str, str]:
    """On one rank: what engines and libraries make of a loaded model, saved; errors by name."""
    import deepspeed
    from torch.nn.parallel import DistributedDataParallel

    failed = {}
    optimizer = {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}
    for stage in (1, 2, 3):
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "bf16": {"enabled": True},
            "zero_optimization": {"stage": stage},
            "optimizer": optimizer,
        }
        model = zerostart.load(path, zero_stage=stage, engine_config=config, progress=False)
        engine, *_ = deepspeed.initialize(model=model, config=config)
        try:
            zerostart.save(engine, out / f"engine of stage {stage}")
        except Exception:
            failed[f"engine of stage {stage}"] = traceback.format_exc()
    model = zerostart.load(path, engine="fsdp2", zero_stage=0, progress=False)
    zerostart.save(DistributedDataParallel(model), out / "in DistributedDataParallel")
    statistics = torch.nn.BatchNorm1d(5)
    assert statistics.running_mean is not None
    statistics.running_mean.fill_(torch.distributed.get_rank() + 1)
    zerostart.save(DistributedDataParallel(statistics), out.parent / f"{out.name} of other values")
    model = zerostart.load(path, engine="fsdp2", progress=False)
    zerostart.save(torch.compile(model), out / "compiled")  # type: ignore[arg-type]
    return failed


@pytest.mark.slow
def test_models_inside_engines_and_wrappers(checkpoints: TinyCheckpoints, tmp_path: Path) -> None:
    """What ``deepspeed.initialize``, DDP and torch.compile give is saved as the model in it."""
    path = checkpoints("qwen3", BF16)
    assert run_ranks(_save_wrapped, 2, path, tmp_path / "out", timeout=240) == [{}, {}]
    found = sorted((tmp_path / "out").iterdir())
    assert len(found) == 5
    for folder in found:
        assert_same_tensors(folder, path)
    # Of buffers that differ the first rank's count.
    assert tensors_in(tmp_path / "out of other values")["running_mean"].tolist() == [1.0] * 5


def _save_masters(path: Path, out: Path) -> None:
    """On one rank: an fp32 checkpoint in bf16, its masters read by the engine, saved in fp32."""
    import deepspeed

    for stage in (2, 3):
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "bf16": {"enabled": True},
            "zero_optimization": {"stage": stage},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        }
        model = zerostart.load(path, zero_stage=stage, engine_config=config, progress=False)
        engine, *_ = deepspeed.initialize(model=model, config=config)
        zerostart.save(engine, out / f"stage {stage}", dtype=F32)


@pytest.mark.slow
def test_masters_in_full_precision(checkpoints: TinyCheckpoints, tmp_path: Path) -> None:
    """In fp32 an engine's masters are saved: no bit of the checkpoint is lost, though parameters are bf16."""
    path = checkpoints("mixtral", F32)
    run_ranks(_save_masters, 2, path, tmp_path, timeout=120)
    for stage in (2, 3):
        assert_same_tensors(tmp_path / f"stage {stage}", path)
