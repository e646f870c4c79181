"""Tensors that DeepSpeed's ranks share, born in slices: as stock bit for bit, and as one process trains."""

from pathlib import Path
from typing import Any

import pytest

import zerostart
from tests.engines.tensors.fused import Fused, fused_file
from tests.engines.tensors.sharing import SHARING, Case, compared
from tests.parity import alone, checkpoint, differences
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


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_on_the_host(stage: int, folder: Path) -> None:
    path, both = checkpoint("qwen3", folder), ("offload_optimizer", "offload_param")
    cases = [Case(path, stage, offloaded=both[:1])]
    if stage == 3:
        cases += [Case(path, stage, offloaded=both)]
    check(cases, SHARING)


def test_a_rank_reads_its_slices(folder: Path) -> None:
    """Tensors whose rows are longer than what is read through between two of them."""
    sizes: dict[str, Any] = {"hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 1}
    path = checkpoint("llama", folder, **sizes)
    whole = zerostart.plan(path, world_size=1).ranks[0].read_bytes
    planned = zerostart.plan(path, world_size=2, zero_stage=2, tensor_parallel=2)
    kept = (96 * 1024 + 3 * 1024) * 4  # The embedding and the norms are whole on both.
    for rank in planned.ranks:
        assert rank.read_bytes <= 1.01 * (kept + (whole - kept) / 2)
