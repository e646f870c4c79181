"""Save the model inside engines and wrappers."""

import traceback
from pathlib import Path

import pytest
import torch

import zerostart
from tests.ranks import run_ranks
from tests.state.saving.test_saving import BF16, F32, assert_same_tensors, tensors_in
from tests.tiny import TinyCheckpoints


def save_wrapped_models(path: Path, out: Path) -> dict[str, str]:
    """Save models in engines and wrappers; return errors."""
    import deepspeed
    from torch.nn.parallel import DistributedDataParallel

    errors = {}
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
            errors[f"engine of stage {stage}"] = traceback.format_exc()
    model = zerostart.load(path, engine="fsdp2", zero_stage=0, progress=False)
    zerostart.save(DistributedDataParallel(model), out / "in DistributedDataParallel")
    statistics = torch.nn.BatchNorm1d(5)
    assert statistics.running_mean is not None
    statistics.running_mean.fill_(torch.distributed.get_rank() + 1)
    zerostart.save(DistributedDataParallel(statistics), out.parent / f"{out.name} of unequal buffers")
    model = zerostart.load(path, engine="fsdp2", progress=False)
    zerostart.save(torch.compile(model), out / "compiled")  # type: ignore[arg-type]
    return errors


@pytest.mark.slow
def test_models_inside_engines_and_wrappers(checkpoints: TinyCheckpoints, tmp_path: Path) -> None:
    path = checkpoints("qwen3", BF16)
    assert run_ranks(save_wrapped_models, 2, path, tmp_path / "out", timeout=240) == [{}, {}]
    folders = sorted((tmp_path / "out").iterdir())
    assert len(folders) == 5
    for folder in folders:
        assert_same_tensors(folder, path)
    # The first rank's values are saved for buffers that differ between ranks.
    assert tensors_in(tmp_path / "out of unequal buffers")["running_mean"].tolist() == [1.0] * 5


def save_masters(path: Path, out: Path) -> None:
    """Load fp32 as bf16 with DeepSpeed; save in fp32."""
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
    """An fp32 save writes the masters of bf16 parameters."""
    path = checkpoints("mixtral", F32)
    run_ranks(save_masters, 2, path, tmp_path, timeout=120)
    for stage in (2, 3):
        assert_same_tensors(tmp_path / f"stage {stage}", path)
