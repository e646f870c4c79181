"""Resuming: the losses after it are those of the run that was never interrupted."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import zerostart
from tests.ranks import run_ranks
from tests.state.resuming.trainings import FIRST, FSDP2, MORE, OFFLOADED, ZERO, Case, Run, both, train

SCHEDULE = {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 9, "warmup_max_lr": 2e-2}}}

#: On the same ranks, to the bit.
SAME = {
    "FSDP2": FSDP2,
    "FSDP2, bf16, two groups": Case("fsdp2", bf16=True, groups="two"),
    "ZeRO-3": ZERO,
    "ZeRO-3, bf16, frozen, small sub-groups": Case(
        "deepspeed", zero={"sub_group_size": 500}, bf16=True, groups="frozen", top=SCHEDULE
    ),
    "ZeRO-2, bf16, two groups": Case("deepspeed", 2, bf16=True, groups="two"),
}


@pytest.mark.slow
def test_losses_are_the_same_bits_on_the_same_ranks(paths: dict[str, Path], tmp_path: Path) -> None:
    assert run_ranks(both, 2, paths, SAME, tmp_path) == [[], []]


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


def hop(path: Path, case: Case, folder: Path, load: str, save: str) -> None:
    run = Run(path, case)
    if load:
        zerostart.load_state(folder / load, *run.state)
    else:
        run.step(0)
        run.step(1)
    zerostart.save_state(folder / save, *run.state)
    run.end()


def bits(path: Path) -> tuple[dict[str, str], dict[str, str]]:
    """Digests of what is stepped (masters, else parameters) and its moments, and of the parameters."""
    digests = json.loads((path / "state.json").read_text())["digests"]
    model, state = digests["model"], digests["state"]
    stepped = {name: state.get(f"master/{name}", model[name]) for name in model}
    return stepped | {n: d for n, d in state.items() if n.startswith("optimizer/")}, model


@pytest.mark.slow
def test_masters_and_moments_keep_their_bits_from_bf16_to_fp32_and_back(
    paths: dict[str, Path], tmp_path: Path
) -> None:
    zero, fsdp2 = Case("deepspeed", bf16=True, groups="two"), Case("fsdp2", bf16=True, groups="turned")
    run_ranks(hop, 2, paths["qwen3"], zero, tmp_path, "", "a")
    run_ranks(hop, 3, paths["qwen3"], fsdp2, tmp_path, "a", "b")
    run_ranks(hop, 2, paths["qwen3"], replace(zero, stage=2), tmp_path, "b", "c")
    (held, low), (between, _), (after, lower) = (bits(tmp_path / name) for name in "abc")
    assert len(held) > 40
    assert held == between == after
    assert low == lower


def model_folder(path: Path, cases: dict[str, Case], folder: Path) -> list[str]:
    """The weights as plain transformers reads them from ``model/``, and what verify says of all."""
    from transformers import AutoModelForCausalLM

    wrong = []
    for name, case in cases.items():
        run = Run(path, case)
        run.step(0)
        zerostart.save_state(folder / name, *run.state)
        zerostart.verify(folder / name)
        plain = AutoModelForCausalLM.from_pretrained(folder / name / "model").state_dict()
        held = dict(zerostart.full_tensors(run.model, rank=None))
        wrong += [f"{name}: {n}" for n, t in held.items() if t is None or not torch.equal(t, plain[n])]
        run.end()
    return wrong


@pytest.mark.slow
def test_the_model_is_a_directory_by_itself(paths: dict[str, Path], tmp_path: Path) -> None:
    cases = {"FSDP2": FSDP2, "ZeRO-3": Case("deepspeed", bf16=True)}
    assert run_ranks(model_folder, 2, paths["qwen3"], cases, tmp_path / "states") == [[], []]
    assert run_ranks(model_folder, 2, paths["mixtral"], {"experts": FSDP2}, tmp_path / "more") == [[], []]
