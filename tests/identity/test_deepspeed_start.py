"""What ``deepspeed.initialize`` does to a load's partitions: the same values, in less memory.

The expectation is DeepSpeed itself, with nothing of its constructor overridden.
"""

import contextlib
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
from tests.upstream.sent import patches, use
from zerostart.transfer import PeakMeter
from zerostart.transfer.meter import anonymous_bytes
from zerostart.upstream.deepspeed import zero3_start as deepspeed_start

MIB = 1 << 20
KIND = "qwen3_moe_aligned"
GROUPS = ("one", "two", "frozen", "late", "mixed")


@pytest.mark.parametrize(
    ("placement", "groups"),
    [
        (placement, groups)
        for placement in ("accelerator", "offload-param", "offload-optimizer", "sub-groups")
        for groups in GROUPS
    ],
)
def test_the_optimizer_starts_as_without_an_override(
    placement: str, groups: str, checkpoints: TinyCheckpoints
) -> None:
    path = checkpoints("flint" if groups == "mixed" else KIND, torch.bfloat16)
    results = run_ranks(with_and_without, 2, path, configuration(placement, torch.bfloat16), groups)
    for (ours, in_place), (theirs, moved) in results:
        assert ours == theirs
        assert in_place
        assert not moved


@pytest.mark.slow
@pytest.mark.parametrize("placement", ["accelerator", "offload-param", "offload-optimizer"])
def test_a_patched_deepspeed_needs_no_override(
    placement: str, checkpoints: TinyCheckpoints, tmp_path: Path
) -> None:
    """The bits are those of our own overrides. Whether the load's buffer stays is not compared here."""
    path, config = checkpoints(KIND, torch.bfloat16), configuration(placement, torch.bfloat16)
    ours, patched = (run_ranks(alone, 2, path, config, folder) for folder in (None, tmp_path))
    assert [values for values, _ in patched] == [values for values, _ in ours]


def alone(path: Path, config: dict[str, Any], patched: Path | None) -> tuple[Any, bool]:
    """In a process that has loaded nothing, since what is replaced in classes goes into the new ones."""
    if patched is not None:
        leave_to(patched)
    return start(path, config, "two")


def with_and_without(path: Path, config: dict[str, Any], groups: str) -> list[tuple[Any, bool]]:
    found = []
    known = deepspeed_start.is_known
    for kept in (known, lambda: False):
        deepspeed_start.is_known = kept  # type: ignore[assignment]
        found.append(start(path, config, groups))
    deepspeed_start.is_known = known
    return found


def leave_to(patched: Path) -> None:
    """Have DeepSpeed do by itself, with docs/patches in it, what else our overrides of its start do."""
    use(patches("deepspeed"), patched / str(dist.get_rank()))
    for name in ("defragmenting", "ungathered", "FuseToClone", "SharedZeroGradients"):
        setattr(deepspeed_start, name, lambda *_: contextlib.nullcontext())
    deepspeed_start.joined = lambda _: None  # type: ignore[assignment]


def start(path: Path, config: dict[str, Any], groups: str) -> tuple[Any, bool]:
    """Masters, partitions, losses and norms; and whether the partitions stayed in the load's buffer."""
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
    after = {p.ds_tensor.untyped_storage().data_ptr() for p in model.parameters()}
    made = [engine.optimizer.fp32_partitioned_groups_flat, [p.ds_tensor for p in model.parameters()]]
    bits = [[flat.detach().clone().view(torch.uint8).tolist() for flat in flats] for flats in made]
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
    return (bits, numbers), buffers == after


SIDE, LAYERS = 2048, 16
#: Placement, and bytes that the optimizer keeps for each bf16 element: partition, master, gradients.
KEPT = {"accelerator": 2 + 4 + 2, "offload-param": 2 + 4 + 2, "offload-both": 2 + 4 + 4 + 2}


@pytest.mark.parametrize("placement", KEPT)
@pytest.mark.parametrize("patched", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_memory_through_initialize_is_what_is_kept(patched: bool, placement: str, tmp_path: Path) -> None:
    """Gradients are accumulated in bf16: in fp32 they would be larger than what a second master takes.

    ``patched``: what docs/patches has for DeepSpeed is in it, and none of our own overrides of its start.
    """
    path = tmp_path / "model.safetensors"
    names = [f"{number}.weight" for number in range(LAYERS)]
    save_file({name: torch.randn(SIDE, SIDE).bfloat16() for name in names}, path)
    config = configuration(placement, torch.bfloat16) | {"data_types": {"grad_accum_dtype": "bf16"}}
    config["zero_optimization"] |= {"reduce_bucket_size": 1_000_000, "sub_group_size": 10**9}
    share = LAYERS * SIDE * SIDE // 2
    for peak, stays in run_ranks(through_initialize, 2, path, config, tmp_path if patched else None):
        assert stays <= KEPT[placement] * share + 32 * MIB, stays / share
        assert peak <= stays + 32 * MIB, (peak / share, stays / share)


def through_initialize(path: Path, config: dict[str, Any], patched: Path | None) -> tuple[int, int]:
    """Anonymous bytes above the level before the load: at their highest, and after ``initialize``."""
    if patched is not None:
        leave_to(patched)
    initialized(nn.Sequential(nn.Linear(8, 8, bias=False, dtype=torch.bfloat16)), config)  # imports, groups
    before = anonymous_bytes()
    with PeakMeter(torch.device("cpu")) as meter:
        with torch.device("meta"):
            layers = [nn.Linear(SIDE, SIDE, bias=False) for _ in range(LAYERS)]
        model = zerostart.load(path, model=nn.Sequential(*layers), engine_config=config, progress=False)
        engine = initialized(model, config)
    stays = anonymous_bytes() - before
    assert engine is not None
    return meter.host_bytes, stays


def initialized(model: nn.Module, config: dict[str, Any]) -> Any:
    """The engine, with two parameter groups in another order than the model's."""
    import deepspeed

    halves = [list(model.parameters())[1::2], list(model.parameters())[::2]]
    optimizer = torch.optim.AdamW([{"params": half} for half in halves if half])
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
