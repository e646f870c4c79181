"""Tensors that DeepSpeed's ranks share, born in slices: as stock bit for bit, and as one process trains."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

import zerostart
from tests.engines.tensors.fused import Fused, fused_file
from tests.engines.tensors.sharing import SHARING, Case, compared, slices, trained
from tests.parity import CLIP, alone, batches, checkpoint, differences, optimizer
from tests.ranks import run_ranks

#: Three heads of keys and values, of which one rank has two.
UNEVEN = {"hidden_size": 24, "num_attention_heads": 6, "num_key_value_heads": 3}


def check(cases: list[Case], world: int) -> None:
    """Compare each case with stock's bits on the same ranks, and with one process that sees all batches."""
    for number, results in enumerate(zip(*run_ranks(compared, world, cases, timeout=240), strict=True)):
        case = cases[number]
        filled = None if case.module is None else case.module.filled
        wanted = run_ranks(alone, 1, case.path, filled)[0]
        # A key's bias adds the same to all scores of a query: its gradient is nothing but rounding.
        for trace in (wanted, *(trace for trace, _ in results)):
            for name in [name for name in trace.gradients if name.endswith("key.bias")]:
                del trace.gradients[name]
        for trace, wrong in results:
            trace.norms = trace.norms or wanted.norms  # Stage 0 in fp32 tells none.
            assert (case, wrong) == (case, [])
            assert (case, differences(trace, wanted)) == (case, [])


def test_slices_are_stocks_and_train_as_one_process(folder: Path) -> None:
    check(
        [
            Case(checkpoint("qwen3", folder), 2, told=False),
            Case(checkpoint("llama", folder, **UNEVEN), 3),
            Case(fused_file(folder), 1, "fused", module=Fused),
        ],
        SHARING,
    )


def test_a_model_that_adds_in_place_to_what_is_shared(folder: Path) -> None:
    """Stock raises "a view and is being modified inplace"."""
    path = checkpoint("falcon", folder)
    wanted = run_ranks(alone, 1, path)[0]
    for trace in run_ranks(trained, SHARING, Case(path, 2)):
        trace.norms = trace.norms or wanted.norms
        assert differences(trace, wanted) == []


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("kind", ["llama", "qwen3", "mixtral", "bert", "fused"])
def test_every_stage(kind: str, stage: int, world: int, folder: Path) -> None:
    if kind == "fused":
        cases = [Case(fused_file(folder), stage, "fused", module=Fused)]
    elif kind == "mixtral":
        cases = [Case(checkpoint(kind, folder), stage, "mixtral")]
    else:
        cases = [Case(checkpoint(kind, folder), stage)]
    if kind == "qwen3":
        cases += [Case(checkpoint(kind, folder), stage, "qwen2", told=False)]
    if kind == "llama":
        cases += [Case(checkpoint(kind, folder, **UNEVEN), stage)]
    check(cases, world)


def test_a_rank_reads_its_slices(folder: Path) -> None:
    """Tensors whose rows are longer than what is read through between two of them."""
    sizes: dict[str, Any] = {"hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 1}
    path = checkpoint("llama", folder, **sizes)
    whole = zerostart.plan(path, world_size=1).ranks[0].read_bytes
    planned = zerostart.plan(path, world_size=2, zero_stage=2, tensor_parallel=2)
    kept = (96 * 1024 + 3 * 1024) * 4  # The embedding and the norms are whole on both.
    for rank in planned.ranks:
        assert rank.read_bytes <= 1.01 * (kept + (whole - kept) / 2)


# Dropout where ranks share tensors, each with a seed of its own: what all of them have stays the same.


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["deepspeed", "fsdp2"])
def test_one_dropout(engine: str, tmp_path: Path) -> None:
    if engine == "deepspeed":
        path = checkpoint("bert", tmp_path, hidden_dropout_prob=0.2, attention_probs_dropout_prob=0.2)
    else:
        path = checkpoint("starcoder2", tmp_path, residual_dropout=0.2, attention_dropout=0.2)
    first, second = run_ranks(dropped, 2, path, engine)
    whole = [name for name in first if first[name].shape == second[name].shape and "norm" in name.lower()]
    assert len(whole) >= 4
    assert [name for name in whole if not torch.equal(first[name], second[name])] == []


def dropped(path: Path, engine: str) -> dict[str, torch.Tensor]:
    options: dict[str, Any] = {"engine": engine, "tensor_parallel": 2, "progress": False}
    if engine == "deepspeed":
        options |= {"zero_stage": 2, "engine_config": configured()}
    model = zerostart.load(path, **options).train()
    torch.manual_seed(dist.get_rank())
    if engine == "deepspeed":
        import deepspeed

        made, *_ = deepspeed.initialize(model=model, optimizer=optimizer(model), config=configured())
    else:
        optim = optimizer(model)
    for batch in batches(1):
        if engine == "deepspeed":
            made.backward(made(input_ids=batch[0], labels=batch[0], use_cache=False).loss)
            made.step()
        else:
            model(input_ids=batch[0], labels=batch[0], use_cache=False).loss.backward()
            optim.step()
            optim.zero_grad()
    if engine == "deepspeed":
        return slices(model)
    return {n: p.to_local().detach() if isinstance(p, DTensor) else p for n, p in model.named_parameters()}


def configured() -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": CLIP,
        "zero_optimization": {"stage": 2},
        "zero_allow_untested_optimizer": True,
    }
