"""Measure the memory that real engines hold after one step; runs on ranks."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

import zerostart

BASE_CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 1,
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
}
OPTIMIZERS: dict[str, Any] = {
    "adamw": torch.optim.AdamW,
    "sgd": torch.optim.SGD,
    "momentum": lambda parameters, lr: torch.optim.SGD(parameters, lr=lr, momentum=0.9),
}


def count_storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of the distinct storages behind ``tensors``, up to their last elements."""
    ends: dict[int, int] = {}
    for tensor in tensors:
        end = (tensor.storage_offset() + tensor.numel()) * tensor.element_size()
        address = tensor.untyped_storage().data_ptr()
        ends[address] = max(ends.get(address, 0), end)
    return sum(ends.values())


def count_state_bytes(optimizer: Any) -> int:
    """Return the bytes of an optimizer's state without its step counters."""
    states = list(optimizer.state.values())
    return count_storage_bytes(
        t for s in states for k, t in s.items() if isinstance(t, torch.Tensor) and k != "step"
    )


def measure_deepspeed(
    path: Path, cases: Sequence[tuple[int, dict[str, Any], str]], experts: int = 1
) -> list[dict[str, int]]:
    """Measure a DeepSpeed engine for each case: a stage, a configuration and an optimizer."""
    return [_measure_deepspeed_case(path, *case, experts) for case in cases]


def _measure_deepspeed_case(
    path: Path, stage: int, config: dict[str, Any], name: str, experts: int
) -> dict[str, int]:
    """Return the bytes of masters, states, gradients and parameters after a step."""
    import deepspeed

    model = zerostart.load(
        path, zero_stage=stage, engine_config=config, expert_parallel=experts, progress=False
    )
    optimizer = OPTIMIZERS[name](model.parameters(), lr=1e-3)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
    model.train()
    tokens = torch.arange(6).view(1, -1)
    engine.backward(engine(input_ids=tokens, labels=tokens).loss)
    zero = engine.optimizer
    gradient_bytes = count_gradient_bytes(zero, stage)
    engine.step()
    if stage == 3:
        masters = [t.detach() for t in zero.fp32_partitioned_groups_flat]
        parameters = [p.ds_tensor for p in model.parameters()]
    else:
        masters = [t.detach() for t in zero.single_partition_of_fp32_groups]
        parameters = list(zero.bit16_groups_flat)
    parameter_storages = {t.untyped_storage().data_ptr() for t in parameters}
    return {
        "parameters": sum(t.numel() * t.element_size() for t in parameters),
        "master weights": count_storage_bytes(
            t for t in masters if t.untyped_storage().data_ptr() not in parameter_storages
        ),
        "optimizer state": count_state_bytes(zero.optimizer),
        "gradients": gradient_bytes,
    }


def count_gradient_bytes(zero: Any, stage: int) -> int:
    """Return the bytes of gradients that wait for the step, including offloaded fp32 copies."""
    if stage == 3:
        offloaded = [t.grad for t in zero.fp32_partitioned_groups_flat if t.grad is not None]
        return count_storage_bytes([zero.grad_partitions_flat_buffer, *offloaded])
    return count_storage_bytes(t.grad for t in zero.single_partition_of_fp32_groups if t.grad is not None)


def measure_fsdp2(path: Path, config: dict[str, Any] | None, name: str, dtype: Any) -> dict[str, int]:
    """Return the bytes of an FSDP2 model's shards, gradients and states after a step."""
    model = zerostart.load(path, engine="fsdp2", engine_config=config, dtype=dtype, progress=False)
    optimizer = OPTIMIZERS[name](model.parameters(), lr=1e-3)
    model.train()
    tokens = torch.arange(6).view(1, -1)
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    shards: list[Any] = list(model.parameters())

    def count_local_bytes(tensor: Any) -> int:
        shard = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        return int(shard.numel() * shard.element_size())

    states = [t for s in optimizer.state.values() for k, t in s.items() if k != "step"]
    return {
        "parameters": sum(count_local_bytes(p) for p in shards),
        "gradients": sum(count_local_bytes(p.grad) for p in shards),
        "optimizer state": sum(count_local_bytes(t) for t in states if isinstance(t, torch.Tensor)),
    }
