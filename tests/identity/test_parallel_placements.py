"""ZeRO-3 with experts over several ranks, kept elsewhere than on the device: it trains as one process."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import zerostart
from tests.identity.test_parallel_deepspeed import gradients
from tests.parity import CLIP, Trace, batches, checkpoint, differences, optimizer, reference
from tests.ranks import run_ranks

HOST = {"device": "cpu", "pin_memory": False}
PLACEMENTS: dict[str, dict[str, Any]] = {
    "offload-param": {"offload_param": HOST},
    "offload-both": {"offload_param": HOST, "offload_optimizer": HOST},
    "offload-param-persistent-some": {"offload_param": HOST, "stage3_param_persistence_threshold": 600},
    "persistent-some": {"stage3_param_persistence_threshold": 600},
    "persistent-all": {"stage3_param_persistence_threshold": 10**6},
}


@pytest.mark.parametrize(
    ("placement", "experts", "world"),
    [
        *((placement, 2, 2) for placement in PLACEMENTS),
        ("offload-param-persistent-some", 2, 4),
        *(
            pytest.param(placement, 2, 4, marks=pytest.mark.slow)
            for placement in PLACEMENTS
            if placement != "offload-param-persistent-some"
        ),
    ],
)
def test_experts_train_as_in_one_process(placement: str, experts: int, world: int, tmp_path: Path) -> None:
    path = checkpoint("qwen3_moe", tmp_path)
    wanted = reference(path)
    for found, planned, read in run_ranks(train, world, path, experts, PLACEMENTS[placement]):
        assert differences(found, wanted) == []
        assert planned == read


def train(path: Path, experts: int, zero: dict[str, Any]) -> tuple[Trace, int, int]:
    import deepspeed

    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": CLIP,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0, **zero},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    options: dict[str, Any] = {"engine": "deepspeed", "engine_config": config, "expert_parallel": experts}
    size, rank = dist.get_world_size(), dist.get_rank()
    model = zerostart.load(path, progress=False, **options)
    planned = zerostart.plan(path, world_size=size, **options).ranks[rank].read_bytes
    model.train()
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer(model), config=config)
    trace = Trace()
    for batch in batches(size):
        loss = engine(input_ids=batch[rank], labels=batch[rank], use_cache=False).loss
        engine.backward(loss)
        if not trace.gradients:
            trace.gradients = gradients(model, experts)
        engine.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        trace.losses.append(total.item() / size)
        trace.norms.append(float(engine.get_global_grad_norm()))
    for name, value in zerostart.full_tensors(engine, rank=None):
        assert isinstance(value, torch.Tensor)
        trace.weights[name] = value
    return trace, planned, zerostart.report(model).read_bytes
