"""Partitions on NVMe: swap files filled without passing through memory, trained as by the stock route.

DeepSpeed's asynchronous input and output is compiled against libaio. Where that is absent, a user gets a
clear error, and these tests put plain file operations in the place of the extension (``file_aio``).
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import zerostart
from tests import file_aio
from tests.identity.snapshots import Snapshot, pretrained
from tests.identity.test_deepspeed_placements import train
from tests.ranks import rank_outcomes, run_ranks
from tests.tiny import TINY, TinyCheckpoints


def build_swapping() -> None:
    from deepspeed.ops.op_builder import AsyncIOBuilder

    if file_aio.compiled():
        AsyncIOBuilder().load(verbose=False)


def with_swapping(function: Callable[..., Any], *args: Any) -> Any:
    if not file_aio.compiled():
        file_aio.install()
    return function(*args)


def configuration(folder: Path, max_in_cpu: int) -> dict[str, Any]:
    offload = {"device": "nvme", "nvme_path": str(folder), "buffer_count": 5, "buffer_size": 2**20}
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 1.0,
        "zero_optimization": {
            "stage": 3,
            "stage3_param_persistence_threshold": 0,
            # DeepSpeed 0.19.8 asks twice for a partition that comes up twice in what it looks ahead at.
            "stage3_prefetch_bucket_size": 0,
            "offload_param": {**offload, "max_in_cpu": max_in_cpu, "pin_memory": False},
            "offload_optimizer": {"device": "cpu", "pin_memory": False},
            "sub_group_size": 100_000,
        },
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": False},
    }


@pytest.mark.parametrize(
    ("max_in_cpu", "world_size"),
    [
        pytest.param(
            most,
            world_size,
            marks=() if (most > 0) == (world_size == 1) and world_size < 3 else pytest.mark.slow,
        )
        for most in (0, 10**9)
        for world_size in (1, 2, 3)
    ],
)
def test_swapped_partitions_train_as_the_stock_route(
    world_size: int, max_in_cpu: int, checkpoints: TinyCheckpoints, tmp_path: Path
) -> None:
    run_ranks(build_swapping, 1, process_group=False, timeout=280)
    path = checkpoints("qwen3_wide")
    reference = tmp_path / "reference.pt"
    torch.save(Snapshot.of(pretrained(path, torch.float32)).state, reference)
    results = []
    for route in ("ours", "stock"):
        config = configuration(tmp_path / route, max_in_cpu)
        expected = reference if route == "ours" else None
        results.append(
            run_ranks(with_swapping, world_size, train, path, torch.float32, config, expected, "qwen3_wide")
        )
    assert results[0] == results[1]


@pytest.mark.slow
def test_a_partition_larger_than_a_swap_buffer_is_refused(
    checkpoints: TinyCheckpoints, tmp_path: Path
) -> None:
    config = configuration(tmp_path, 0)
    config["zero_optimization"]["offload_param"]["buffer_size"] = 2**18
    for outcome in rank_outcomes(with_swapping, 2, load, checkpoints("qwen3_wide"), config):
        assert outcome.error == "zerostart.errors.EngineError"
        assert "buffer_size" in outcome.message


@pytest.mark.slow
@pytest.mark.skipif(file_aio.compiled(), reason="libaio is installed")
def test_without_libaio_the_error_says_what_to_install(checkpoints: TinyCheckpoints, tmp_path: Path) -> None:
    for outcome in rank_outcomes(load, 2, checkpoints("qwen3"), configuration(tmp_path, 0)):
        assert outcome.error == "zerostart.errors.EngineError"
        assert "libaio" in outcome.message


def load(path: Path, config: dict[str, Any]) -> None:
    zerostart.load(path, engine_config=config, progress=False)


def test_the_wide_checkpoint_has_what_is_swapped() -> None:
    """DeepSpeed swaps partitions of at least 1 MiB."""
    sizes = TINY["qwen3_wide"][1]
    assert sizes["vocab_size"] * sizes["hidden_size"] * 4 // 3 >= 2**20
