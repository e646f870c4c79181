"""Resuming: the losses after it are those of the run that was never interrupted."""

from __future__ import annotations

from pathlib import Path

import pytest
from resuming import Case, train

from parity import checkpoint
from ranks import run_ranks

FIRST, MORE = 2, 3
FSDP2, ZERO = Case("fsdp2"), Case("deepspeed")
OFFLOADED = {"offload_optimizer": {"device": "cpu"}}

#: On the same ranks, to the bit.
SAME = {
    "FSDP2": FSDP2,
    "FSDP2, bf16, two groups": Case("fsdp2", bf16=True, groups="two"),
    "ZeRO-3": ZERO,
    "ZeRO-3, bf16, frozen, small sub-groups": Case(
        "deepspeed", zero={"sub_group_size": 500}, bf16=True, groups="frozen"
    ),
    "ZeRO-2, bf16, two groups": Case("deepspeed", 2, bf16=True, groups="two"),
}
SLOW = {
    "ZeRO-2": Case("deepspeed", 2),
    "ZeRO-1": Case("deepspeed", 1),
    "ZeRO-0": Case("deepspeed", 0),
    "ZeRO-0, bf16": Case("deepspeed", 0, bf16=True),
    "ZeRO-1, BF16_Optimizer": Case(
        "deepspeed", 1, bf16=True, top={"data_types": {"grad_accum_dtype": "fp32"}}
    ),
    "ZeRO-2, round robin": Case("deepspeed", 2, {"round_robin_gradients": True}, bf16=True),
    "ZeRO-2, offloaded": Case("deepspeed", 2, OFFLOADED, bf16=True, groups="two"),
    "ZeRO-3, offloaded": Case("deepspeed", 3, {**OFFLOADED, "offload_param": {"device": "cpu"}}, bf16=True),
    "ZeRO-3, hierarchical": Case("deepspeed", 3, {"zero_hpz_partition_size": 2}),
    "ZeRO-3, two groups": Case("deepspeed", groups="two"),
    "FSDP2, frozen": Case("fsdp2", groups="frozen"),
    "FSDP2, not loaded by zerostart": Case("fsdp2", stock=True),
    "ZeRO-2, not loaded by zerostart": Case("deepspeed", 2, stock=True),
    "DistributedDataParallel": Case("fsdp2", 0),
    "ZeRO-3, LoRA": Case("deepspeed", lora=True),
    "ZeRO-2, LoRA": Case("deepspeed", 2, lora=True),
    "FSDP2, LoRA": Case("fsdp2", lora=True),
    "FSDP2, experts": Case("fsdp2", experts=2, kind="mixtral"),
    "FSDP2, tensors": Case("fsdp2", tensors=2),
    "ZeRO-3, experts": Case("deepspeed", experts=2, kind="mixtral"),
    "ZeRO-2, experts": Case("deepspeed", 2, experts=2, kind="mixtral"),
}


def uninterrupted(path: Path, case: Case, folder: Path) -> list[float]:
    """The losses after the moment at which the state is saved, without a stop."""
    return train(path, case, range(FIRST + MORE), save=folder, at=FIRST)[FIRST * case.accumulate :]


def resumed(path: Path, case: Case, folder: Path) -> list[float]:
    return train(path, case, range(FIRST, FIRST + MORE), load=folder)


def both(paths: dict[str, Path], cases: dict[str, Case], folder: Path) -> list[str]:
    """The names of the cases whose losses differ in a bit."""
    wrong = []
    for number, (name, case) in enumerate(cases.items()):
        place = folder / str(number)
        wanted = uninterrupted(paths[case.kind], case, place)
        found = resumed(paths[case.kind], case, place)
        if found != wanted:
            wrong.append(f"{name}: {found} for {wanted}")
    return wrong


@pytest.fixture
def paths(tmp_path: Path) -> dict[str, Path]:
    return {kind: checkpoint(kind, tmp_path) for kind in ("qwen3", "mixtral")}


def test_losses_are_the_same_bits_on_the_same_ranks(paths: dict[str, Path], tmp_path: Path) -> None:
    assert run_ranks(both, 2, paths, SAME, tmp_path) == [[], []]


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_losses_are_the_same_bits_with_every_option(
    name: str, paths: dict[str, Path], tmp_path: Path
) -> None:
    assert run_ranks(both, 2, paths, {name: SLOW[name]}, tmp_path) == [[], []]


def journey(path: Path, cases: list[tuple[str, Case]], folder: Path) -> list[str]:
    """Save with the first, go on with each of the others in turn, which saves for the next."""
    (_, first), *others = cases
    count = FIRST + len(others) + MORE
    wanted = train(path, first, range(count), save=folder / "0", at=FIRST)
    wrong = []
    for number, (name, case) in enumerate(others):
        start = FIRST + number
        steps = range(start, count)
        found = train(
            path, case, steps, load=folder / str(number), save=folder / str(number + 1), at=start + 1
        )
        worst = max(abs(a - b) / b for a, b in zip(found, wanted[start:], strict=True))
        if worst > 1e-5:
            wrong.append(f"{name}: {worst:.1e}")
    return wrong


WAY = [
    ("ZeRO-3", ZERO),
    ("ZeRO-3 to FSDP2", FSDP2),
    ("FSDP2 to ZeRO-2", Case("deepspeed", 2)),
    ("ZeRO-2 to ZeRO-1, offloaded", Case("deepspeed", 1, OFFLOADED)),
    ("offloaded to ZeRO-3", ZERO),
]


def test_losses_go_on_from_engine_to_engine(paths: dict[str, Path], tmp_path: Path) -> None:
    assert run_ranks(journey, 2, paths["qwen3"], WAY, tmp_path) == [[], []]


CHANGES = {
    "FSDP2, 2 to 3": (FSDP2, 2, FSDP2, 3),
    "ZeRO-3, 1 to 2": (ZERO, 1, ZERO, 2),
    "ZeRO-3 on 4 to ZeRO-2 on 2": (ZERO, 4, Case("deepspeed", 2), 2),
    "ZeRO-2 on 2 to FSDP2 on 3": (Case("deepspeed", 2, groups="two"), 2, Case("fsdp2", groups="turned"), 3),
    "FSDP2 on 1 to ZeRO-1 on 4": (FSDP2, 1, Case("deepspeed", 1), 4),
    "FSDP2, two groups, to frozen ZeRO-3": (
        Case("fsdp2", groups="frozen"),
        2,
        Case("deepspeed", groups="frozen"),
        3,
    ),
    "ZeRO-3, experts, 2 to 1": (
        Case("deepspeed", experts=2, kind="mixtral"),
        2,
        Case("deepspeed", kind="mixtral"),
        2,
    ),
    "experts, 2 on 2 to 4 on 4": (
        Case("deepspeed", experts=2, kind="mixtral"),
        2,
        Case("fsdp2", experts=4, kind="mixtral"),
        4,
    ),
    "experts at ZeRO-2 to FSDP2": (
        Case("deepspeed", 2, experts=2, kind="mixtral"),
        2,
        Case("fsdp2", kind="mixtral"),
        3,
    ),
    "tensors, 2 to 1": (Case("fsdp2", tensors=2), 2, FSDP2, 3),
    "LoRA, ZeRO-3 to FSDP2": (Case("deepspeed", lora=True), 2, Case("fsdp2", lora=True), 3),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CHANGES)
def test_losses_go_on_elsewhere(name: str, paths: dict[str, Path], tmp_path: Path) -> None:
    one, ranks, other, others = CHANGES[name]
    wanted = run_ranks(uninterrupted, ranks, paths[one.kind], one, tmp_path / "state")[0]
    found = run_ranks(resumed, others, paths[one.kind], other, tmp_path / "state")[0]
    assert found == pytest.approx(wanted, rel=1e-5)
