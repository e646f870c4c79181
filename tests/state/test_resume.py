"""Resuming: the losses after it are those of the run that was never interrupted."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import CPUOffloadPolicy
from resuming import Case, Run, train

import zerostart
from parity import checkpoint
from ranks import run_ranks

FIRST, MORE = 2, 3
FSDP2, ZERO = Case("fsdp2"), Case("deepspeed")
OFFLOADED = {"offload_optimizer": {"device": "cpu"}}

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
    "FSDP2, replicas": Case("fsdp2", options={"replicate": 2}),
    "FSDP2, offloaded": Case("fsdp2", options={"offload_policy": CPUOffloadPolicy(pin_memory=False)}),
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
    "replicas, 4 to 2": (Case("fsdp2", options={"replicate": 2}), 4, FSDP2, 2),
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


def window(path: Path, cases: dict[str, Case], folder: Path) -> list[str]:
    """Saved after the first of three batches that make up a step."""
    wrong = []
    for number, (name, case) in enumerate(cases.items()):
        place = folder / str(number)
        run = Run(path, case)
        run.step(0)
        run.step(1, range(1))
        zerostart.save_state(place, *run.state)
        wanted = run.step(1, range(1, 3)) + run.step(2)
        run.end()
        run = Run(path, case)
        zerostart.load_state(place, *run.state)
        found = run.step(1, range(1, 3)) + run.step(2)
        run.end()
        if found != wanted:
            wrong.append(f"{name}: {found} for {wanted}")
    return wrong


WINDOWS = {
    "FSDP2": Case("fsdp2", accumulate=3),
    "ZeRO-3": Case("deepspeed", accumulate=3, bf16=True),
    "ZeRO-3, offloaded": Case("deepspeed", zero=OFFLOADED, accumulate=3),
    "ZeRO-2": Case("deepspeed", 2, accumulate=3, groups="two"),
    "ZeRO-2, gradients in fp32": Case(
        "deepspeed", 2, bf16=True, accumulate=3, top={"data_types": {"grad_accum_dtype": "fp32"}}
    ),
}


def test_gradients_of_a_window_are_added_to(paths: dict[str, Path], tmp_path: Path) -> None:
    assert run_ranks(window, 2, paths["qwen3"], WINDOWS, tmp_path) == [[], []]


def not_in_a_window(path: Path, folder: Path) -> None:
    for case in (Case("deepspeed", 1, accumulate=3), Case("deepspeed", 2, OFFLOADED, accumulate=3)):
        run = Run(path, case)
        run.step(0, range(1))
        with pytest.raises(zerostart.ZerostartError, match="middle of a window of gradient accumulation"):
            zerostart.save_state(folder, *run.state)
        assert not folder.exists()
        run.end()


def before_a_step(path: Path, folder: Path) -> None:
    """No moments are there yet: there are none afterwards, and no step is taken."""
    for engine in ("fsdp2", "deepspeed"):
        place = folder / engine
        run = Run(path, Case(engine))
        zerostart.save_state(place, *run.state)
        wanted = run.step(0) + run.step(1)
        run.end()
        run = Run(path, Case(engine))
        run.step(5)
        zerostart.load_state(place, *run.state)
        steps = run.optimizer.state
        assert not any(steps.values())
        assert run.step(0) + run.step(1) == wanted
        run.end()


def test_a_state_without_moments_has_none_afterwards(paths: dict[str, Path], tmp_path: Path) -> None:
    run_ranks(before_a_step, 2, paths["qwen3"], tmp_path)


def random_states(path: Path, folder: Path) -> None:
    """Each rank has its own, of three generators."""
    import random

    import numpy as np

    run = Run(path, FSDP2)
    seed = 17 + dist.get_rank()
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    random.gauss(0, 1), np.random.randn(), torch.randn(3)

    def draws() -> list[Any]:
        return [random.gauss(0, 1), random.random(), *np.random.randn(3).tolist(), *torch.randn(5).tolist()]

    zerostart.save_state(folder, *run.state)
    wanted = draws()
    assert zerostart.load_state(folder, *run.state) is None
    assert draws() == wanted


def test_random_states_of_each_rank_come_back(paths: dict[str, Path], tmp_path: Path) -> None:
    run_ranks(random_states, 2, paths["qwen3"], tmp_path / "state")


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


def test_the_model_is_a_directory_by_itself(paths: dict[str, Path], tmp_path: Path) -> None:
    cases = {"FSDP2": FSDP2, "ZeRO-3": Case("deepspeed", bf16=True)}
    assert run_ranks(model_folder, 2, paths["qwen3"], cases, tmp_path / "states") == [[], []]
    assert run_ranks(model_folder, 2, paths["mixtral"], {"experts": FSDP2}, tmp_path / "more") == [[], []]


def refusals(path: Path, folder: Path) -> None:
    """By name, on every rank."""
    run = Run(path, FSDP2)
    zerostart.save_state(folder / "state", *run.state)
    with pytest.raises(zerostart.errors.ConfigError, match=r"extra\.a is a set"):
        zerostart.save_state(folder / "other", *run.state, extra={"a": set()})
    whole = Run(path, Case("fsdp2", 0))
    whole.optimizer = factored = torch.optim.Adafactor(whole.model.parameters())
    whole.step(0)
    with pytest.raises(zerostart.ZerostartError, match=r"'row_var' of model\.embed_tokens\.weight is n"):
        zerostart.save_state(folder / "other", whole.model, factored)
    fresh = Run(path, FSDP2)
    head = torch.optim.AdamW(fresh.model.lm_head.parameters())
    zerostart.save_state(folder / "frozen", fresh.model, head)
    with pytest.raises(zerostart.ZerostartError, match="optimized now and were not"):
        zerostart.load_state(folder / "frozen", *fresh.state)
    assert sorted(p.name for p in folder.iterdir()) == ["frozen", "state"]
    if dist.get_rank() == 0:
        (folder / "state" / "state.json").rename(folder / "state" / "aside.json")
    dist.barrier()
    with pytest.raises(FileNotFoundError, match="no complete training checkpoint"):
        zerostart.load_state(folder / "state", *run.state)
    engine = Run(path, ZERO)
    with pytest.raises(zerostart.errors.ConfigError, match=r"pass what deepspeed\.initialize"):
        zerostart.save_state(folder / "other", engine.model.module)
    engine.end()


def test_what_cannot_be_saved_or_restored_is_named(paths: dict[str, Path], tmp_path: Path) -> None:
    run_ranks(
        refusals, 2, checkpoint("qwen3", tmp_path, tie_word_embeddings=False), _made(tmp_path / "states")
    )
    run_ranks(not_in_a_window, 2, paths["qwen3"], tmp_path / "window")


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder
