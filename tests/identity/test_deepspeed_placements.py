"""Every place where ZeRO-3 keeps a partition: loaded, gathered, initialised and trained, against stock."""

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zerostart
from tests.identity.snapshots import Snapshot, pretrained, same_bits
from tests.ranks import run_ranks
from tests.tiny import TINY, TinyCheckpoints

STEPS, BATCH, LENGTH = 2, 2, 16

#: ``zero_optimization`` of each placement, and what else the configuration needs.
PLACEMENTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "accelerator": ({}, {}),
    "persistent-some": ({"stage3_param_persistence_threshold": 300}, {}),
    "persistent-all": ({"stage3_param_persistence_threshold": 10**6}, {}),
    "offload-param": ({"offload_param": {"device": "cpu", "pin_memory": False}}, {}),
    "offload-param-pinned": (
        {"offload_param": {"device": "cpu", "pin_memory": True}, "stage3_param_persistence_threshold": 300},
        {},
    ),
    "offload-optimizer": (
        {"offload_optimizer": {"device": "cpu", "pin_memory": False}},
        {"zero_force_ds_cpu_optimizer": False},
    ),
    "offload-both": (
        {"offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}, "sub_group_size": 3000},
        {"zero_force_ds_cpu_optimizer": False},
    ),
    "hierarchical": ({"zero_hpz_partition_size": 2}, {}),
    "sub-groups": ({"sub_group_size": 1500, "stage3_prefetch_bucket_size": 0}, {}),
}


def configuration(placement: str, dtype: torch.dtype) -> dict[str, Any]:
    zero, rest = PLACEMENTS[placement]
    return {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0, **zero},
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": dtype == torch.bfloat16},
        **rest,
    }


@pytest.fixture(scope="module")
def reference(checkpoints: TinyCheckpoints, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Unsharded loads, written down, by dtype."""
    made = {}
    for dtype in (torch.bfloat16, torch.float32):
        path = tmp_path_factory.mktemp("references") / f"{dtype}.pt"
        torch.save(Snapshot.of(pretrained(checkpoints("qwen3_moe_aligned", dtype), dtype)).state, path)
        made[str(dtype)] = path
    return made


FAST = {("accelerator", 2), ("persistent-some", 2), ("offload-both", 2), ("hierarchical", 4)}
CASES = [
    pytest.param(
        placement, dtype, world_size, marks=() if (placement, world_size) in FAST else pytest.mark.slow
    )
    for placement, dtype, world_size in [
        *((placement, torch.bfloat16, 2) for placement in PLACEMENTS),
        ("offload-param", torch.float32, 3),
        ("offload-both", torch.float32, 1),
        ("hierarchical", torch.float32, 4),
    ]
]


@pytest.mark.slow
@pytest.mark.parametrize(("placement", "dtype", "world_size"), CASES)
def test_placements_train_as_the_stock_route(
    placement: str,
    dtype: torch.dtype,
    world_size: int,
    checkpoints: TinyCheckpoints,
    reference: dict[str, Path],
) -> None:
    path = checkpoints("qwen3_moe_aligned", dtype)
    config = configuration(placement, dtype)
    ours = run_ranks(train, world_size, path, dtype, config, reference[str(dtype)])
    stock = run_ranks(train, world_size, path, dtype, config, None)
    assert ours == stock
    losses = ours[0][0]
    assert len(set(losses)) == STEPS


def train(
    path: Path,
    dtype: torch.dtype,
    config: dict[str, Any],
    reference: Path | None,
    kind: str = "qwen3_moe_aligned",
) -> tuple[list[float], list[float], float]:
    """Losses, gradient norms, and a sum over the trained weights; checks the loaded ones on the way."""
    import deepspeed

    if reference is None:
        model = stock_zero3(path, dtype, config)
    else:
        model = zerostart.load(path, engine="deepspeed", engine_config=config, progress=False)
        compare(model, reference)
        size, rank = dist.get_world_size(), dist.get_rank()
        planned = zerostart.plan(path, world_size=size, engine="deepspeed", engine_config=config).ranks[rank]
        assert planned.read_bytes == zerostart.report(model).read_bytes
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    if reference is not None:
        compare(model, reference)
    losses, norms = [], []
    generator = torch.Generator().manual_seed(7)
    vocabulary = int(TINY[kind][1]["vocab_size"])
    tokens = torch.randint(3, vocabulary, (dist.get_world_size(), BATCH, LENGTH), generator=generator)
    for _ in range(STEPS):
        batch = tokens[dist.get_rank()]
        loss = engine(input_ids=batch, labels=batch).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        norms.append(float(engine.get_global_grad_norm()))
    total = sum(float(whole.double().abs().sum()) for _, whole in gathered(model))
    return losses, norms, total


def compare(model: nn.Module, reference: Path) -> None:
    """The model's parameters by DeepSpeed's gather, and by zerostart's, are those of the unsharded load."""
    expected = torch.load(reference)
    for name, whole in gathered(model):
        assert same_bits(whole, expected[name]), name
    for name, tensor in zerostart.full_tensors(model, rank=None):
        assert tensor is not None
        assert same_bits(tensor, expected[name]), name


def gathered(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    import deepspeed

    for name, parameter in model.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter]):
            yield name, parameter.data.clone()


_live: list[Any] = []  # Transformers holds its ZeRO-3 configuration by a weak reference.


def stock_zero3(path: Path, dtype: torch.dtype, config: dict[str, Any]) -> nn.Module:
    from transformers import AutoModelForCausalLM

    integrations = importlib.import_module("transformers.integrations")
    _live.append(integrations.HfDeepSpeedConfig(config))
    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype)  # type: ignore[no-any-return]
