"""What real engines hold after one step, found tensor by tensor in their optimizers; run on ranks."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

import zerostart

BASE: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 1,
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
}
OPTIMIZERS: dict[str, Any] = {
    "adamw": torch.optim.AdamW,
    "sgd": torch.optim.SGD,
    "momentum": lambda parameters, lr: torch.optim.SGD(parameters, lr=lr, momentum=0.9),
}


def nbytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the storages behind ``tensors``, each once, as far as the tensors reach."""
    reach: dict[int, int] = {}
    for tensor in tensors:
        end = (tensor.storage_offset() + tensor.numel()) * tensor.element_size()
        place = tensor.untyped_storage().data_ptr()
        reach[place] = max(reach.get(place, 0), end)
    return sum(reach.values())


def states_of(optimizer: Any) -> int:
    """Bytes of an optimizer's states, counters of steps aside."""
    states = list(optimizer.state.values())
    return nbytes(t for s in states for k, t in s.items() if isinstance(t, torch.Tensor) and k != "step")


def deepspeed_holds(
    path: Path, cases: Sequence[tuple[int, dict[str, Any], str]], experts: int = 1
) -> list[dict[str, int]]:
    """What an engine holds in each case: a stage, a configuration and an optimizer."""
    return [_deepspeed_holds(path, *case, experts) for case in cases]


def _deepspeed_holds(
    path: Path, stage: int, config: dict[str, Any], name: str, experts: int
) -> dict[str, int]:
    """Masters, states and kept gradients of a DeepSpeed engine after a step, and its parameters."""
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
    kept = kept_gradients(zero, stage)
    engine.step()
    if stage == 3:
        masters = [t.detach() for t in zero.fp32_partitioned_groups_flat]
        parameters = [p.ds_tensor for p in model.parameters()]
    else:
        masters = [t.detach() for t in zero.single_partition_of_fp32_groups]
        parameters = list(zero.bit16_groups_flat)
    own = {t.untyped_storage().data_ptr() for t in parameters}
    return {
        "parameters": sum(t.numel() * t.element_size() for t in parameters),
        "master weights": nbytes(t for t in masters if t.untyped_storage().data_ptr() not in own),
        "optimizer state": states_of(zero.optimizer),
        "gradients": kept,
    }


def kept_gradients(zero: Any, stage: int) -> int:
    """Bytes of gradients that wait for the step, in fp32 too where the states are offloaded."""
    if stage == 3:
        offloaded = [t.grad for t in zero.fp32_partitioned_groups_flat if t.grad is not None]
        return nbytes([zero.grad_partitions_flat_buffer, *offloaded])
    return nbytes(t.grad for t in zero.single_partition_of_fp32_groups if t.grad is not None)


def fsdp2_holds(path: Path, config: dict[str, Any] | None, name: str, dtype: Any) -> dict[str, int]:
    """The shards of an FSDP2 model after a step, their gradients, and the optimizer's states."""
    model = zerostart.load(path, engine="fsdp2", engine_config=config, dtype=dtype, progress=False)
    optimizer = OPTIMIZERS[name](model.parameters(), lr=1e-3)
    model.train()
    tokens = torch.arange(6).view(1, -1)
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    shards: list[Any] = list(model.parameters())

    def local(tensor: Any) -> int:
        own = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        return int(own.numel() * own.element_size())

    states = [t for s in optimizer.state.values() for k, t in s.items() if k != "step"]
    return {
        "parameters": sum(local(p) for p in shards),
        "gradients": sum(local(p.grad) for p in shards),
        "optimizer state": sum(local(t) for t in states if isinstance(t, torch.Tensor)),
    }
