"""Compare tensor parallelism on DeepSpeed with stock DeepSpeed and one process."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

import zerostart
from tests.engines.tensors.fused import Fused, write_fused_file
from tests.engines.tensors.sharing import TENSOR_PARALLEL, Case, compare_with_stock, slices, train_loaded
from tests.parity import CLIP, batches, checkpoint, differences, optimizer, train_in_one_process
from tests.ranks import run_ranks

#: Three heads of keys and values, two of them on one rank.
UNEVEN = {"hidden_size": 24, "num_attention_heads": 6, "num_key_value_heads": 3}


def check(cases: list[Case], world: int) -> None:
    """Compare each case with stock DeepSpeed on the same ranks, and with one process."""
    for case, *results in zip(cases, *run_ranks(compare_with_stock, world, cases, timeout=240), strict=True):
        load = None if case.module is None else case.module.from_file
        expected = run_ranks(train_in_one_process, 1, case.path, load)[0]
        # A key's bias adds the same to all scores of a query: its gradient is only rounding.
        for trace in (expected, *(trace for trace, _ in results)):
            for name in [name for name in trace.gradients if name.endswith("key.bias")]:
                del trace.gradients[name]
        for trace, lines in results:
            trace.norms = trace.norms or expected.norms  # stage 0 in fp32 reports none
            assert (case, lines) == (case, [])
            assert (case, differences(trace, expected)) == (case, [])


def test_slices_equal_stock_and_train_like_one_process(folder: Path) -> None:
    check(
        [
            Case(checkpoint("qwen3", folder), 2, in_initialize=False),
            Case(checkpoint("llama", folder, **UNEVEN), 3),
            Case(write_fused_file(folder), 1, "fused", module=Fused),
        ],
        TENSOR_PARALLEL,
    )


def test_a_model_that_adds_in_place_to_a_shared_tensor(folder: Path) -> None:
    """Stock raises "a view and is being modified inplace"."""
    path = checkpoint("falcon", folder)
    expected = run_ranks(train_in_one_process, 1, path)[0]
    for trace in run_ranks(train_loaded, TENSOR_PARALLEL, Case(path, 2)):
        trace.norms = trace.norms or expected.norms
        assert differences(trace, expected) == []


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("kind", ["llama", "qwen3", "mixtral", "bert", "fused"])
def test_every_stage(kind: str, stage: int, world: int, folder: Path) -> None:
    if kind == "fused":
        cases = [Case(write_fused_file(folder), stage, "fused", module=Fused)]
    elif kind == "mixtral":
        cases = [Case(checkpoint(kind, folder), stage, "mixtral")]
    else:
        cases = [Case(checkpoint(kind, folder), stage)]
    if kind == "qwen3":
        cases += [Case(checkpoint(kind, folder), stage, "qwen2", in_initialize=False)]
    if kind == "llama":
        cases += [Case(checkpoint(kind, folder, **UNEVEN), stage)]
    check(cases, world)


def test_a_rank_reads_only_its_slices(folder: Path) -> None:
    """Use rows that are longer than the gaps that a read may span."""
    sizes: dict[str, Any] = {"hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 1}
    path = checkpoint("llama", folder, **sizes)
    whole = zerostart.plan(path, world_size=1).ranks[0].read_bytes
    plan = zerostart.plan(path, world_size=2, zero_stage=2, tensor_parallel=2)
    replicated = (96 * 1024 + 3 * 1024) * 4  # the embedding and the norms
    for rank in plan.ranks:
        assert rank.read_bytes <= 1.01 * (replicated + (whole - replicated) / 2)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["deepspeed", "fsdp2"])
def test_dropout_keeps_replicated_weights_equal(engine: str, tmp_path: Path) -> None:
    """Seed each rank differently."""
    if engine == "deepspeed":
        path = checkpoint("bert", tmp_path, hidden_dropout_prob=0.2, attention_probs_dropout_prob=0.2)
    else:
        path = checkpoint("starcoder2", tmp_path, residual_dropout=0.2, attention_dropout=0.2)
    first, second = run_ranks(train_with_dropout, 2, path, engine)
    whole = [name for name in first if first[name].shape == second[name].shape and "norm" in name.lower()]
    assert len(whole) >= 4
    assert [name for name in whole if not torch.equal(first[name], second[name])] == []


def train_with_dropout(path: Path, engine: str) -> dict[str, torch.Tensor]:
    options: dict[str, Any] = {"engine": engine, "tensor_parallel": 2, "progress": False}
    if engine == "deepspeed":
        options |= {"zero_stage": 2, "engine_config": dropout_config()}
    model = zerostart.load(path, **options).train()
    torch.manual_seed(dist.get_rank())
    if engine == "deepspeed":
        import deepspeed

        wrapped, *_ = deepspeed.initialize(model=model, optimizer=optimizer(model), config=dropout_config())
    else:
        optim = optimizer(model)
    for batch in batches(1):
        if engine == "deepspeed":
            wrapped.backward(wrapped(input_ids=batch[0], labels=batch[0], use_cache=False).loss)
            wrapped.step()
        else:
            model(input_ids=batch[0], labels=batch[0], use_cache=False).loss.backward()
            optim.step()
            optim.zero_grad()
    if engine == "deepspeed":
        return slices(model)
    return {n: p.to_local().detach() if isinstance(p, DTensor) else p for n, p in model.named_parameters()}


def dropout_config() -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": CLIP,
        "zero_optimization": {"stage": 2},
        "zero_allow_untested_optimizer": True,
    }
