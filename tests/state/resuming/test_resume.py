"""Resumed runs have the losses of uninterrupted runs."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.distributed.fsdp import CPUOffloadPolicy

import zerostart
from tests.parity import VOCABULARY, checkpoint
from tests.ranks import run_ranks
from tests.state.resuming.trainings import (
    FIRST,
    FSDP2,
    MORE,
    OFFLOADED,
    ZERO,
    Case,
    Run,
    find_differences,
    resume,
    train,
    train_on,
)
from zerostart.upstream.deepspeed.zero3_partitions import load_operations


def resume_in_turn(path: Path, cases: list[tuple[str, Case]], folder: Path) -> list[str]:
    """Save with the first case and resume with the others."""
    (_, first), *others = cases
    count = FIRST + len(others) + MORE
    expected = train(path, first, range(count), save=folder / "0", at=FIRST)
    errors = []
    for number, (name, case) in enumerate(others):
        start = FIRST + number
        steps = range(start, count)
        losses = train(
            path, case, steps, load=folder / str(number), save=folder / str(number + 1), at=start + 1
        )
        worst = max(abs(a - b) / b for a, b in zip(losses, expected[start:], strict=True))
        if worst > 1e-5:
            errors.append(f"{name}: {worst:.1e}")
    return errors


ENGINE_SEQUENCE = [
    ("ZeRO-3", ZERO),
    ("ZeRO-3 to FSDP2", FSDP2),
    ("FSDP2 to ZeRO-2", Case("deepspeed", 2)),
    ("ZeRO-2 to ZeRO-1, offloaded", Case("deepspeed", 1, OFFLOADED)),
    ("offloaded to ZeRO-3", ZERO),
]


def test_losses_continue_from_engine_to_engine(paths: dict[str, Path], tmp_path: Path) -> None:
    assert run_ranks(resume_in_turn, 2, paths["qwen3"], ENGINE_SEQUENCE, tmp_path) == [[], []]


def load_and_save(path: Path, case: Case, folder: Path, load: str, save: str) -> None:
    run = Run(path, case)
    if load:
        zerostart.load_state(folder / load, *run.state)
    else:
        run.step(0)
        run.step(1)
    zerostart.save_state(folder / save, *run.state)
    run.end()


def read_digests(path: Path) -> tuple[dict[str, str], dict[str, str]]:
    """Return digests of masters with moments, and of parameters."""
    digests = json.loads((path / "state.json").read_text())["digests"]
    model, state = digests["model"], digests["state"]
    updated = {name: state.get(f"master/{name}", model[name]) for name in model}
    return updated | {n: d for n, d in state.items() if n.startswith("optimizer/")}, model


@pytest.mark.slow
def test_masters_and_moments_keep_their_bits_from_bf16_to_fp32_and_back(
    paths: dict[str, Path], tmp_path: Path
) -> None:
    zero, fsdp2 = Case("deepspeed", bf16=True, groups="two"), Case("fsdp2", bf16=True, groups="reversed")
    run_ranks(load_and_save, 2, paths["qwen3"], zero, tmp_path, "", "a")
    run_ranks(load_and_save, 3, paths["qwen3"], fsdp2, tmp_path, "a", "b")
    run_ranks(load_and_save, 2, paths["qwen3"], replace(zero, stage=2), tmp_path, "b", "c")
    (before, low), (fp32, _), (after, low_after) = (read_digests(tmp_path / name) for name in "abc")
    assert len(before) > 40
    assert before == fp32 == after
    assert low == low_after


def open_models(path: Path, cases: dict[str, Case], folder: Path) -> list[str]:
    """Compare ``model/`` in plain transformers with the live model."""
    from transformers import AutoModelForCausalLM

    errors = []
    for name, case in cases.items():
        run = Run(path, case)
        run.step(0)
        zerostart.save_state(folder / name, *run.state)
        zerostart.verify(folder / name)
        plain = AutoModelForCausalLM.from_pretrained(folder / name / "model").state_dict()
        tensors = dict(zerostart.full_tensors(run.model, rank=None))
        errors += [f"{name}: {n}" for n, t in tensors.items() if t is None or not torch.equal(t, plain[n])]
        run.end()
    return errors


@pytest.mark.slow
def test_model_folder_is_an_ordinary_checkpoint(paths: dict[str, Path], tmp_path: Path) -> None:
    cases = {"FSDP2": FSDP2, "ZeRO-3": Case("deepspeed", bf16=True)}
    assert run_ranks(open_models, 2, paths["qwen3"], cases, tmp_path / "states") == [[], []]
    assert run_ranks(open_models, 2, paths["mixtral"], {"experts": FSDP2}, tmp_path / "more") == [[], []]


FP16 = {"fp16": {"enabled": True, "initial_scale_power": 18, "loss_scale_window": 2, "hysteresis": 1}}
SCHEDULE = {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 9, "warmup_max_lr": 2e-2}}}
#: Cases whose losses on the same ranks must match in every bit.
BITWISE_CASES = {
    "FSDP2": FSDP2,
    "FSDP2, bf16, two groups": Case("fsdp2", bf16=True, groups="two"),
    "ZeRO-3": ZERO,
    "ZeRO-3, bf16, frozen, small sub-groups": Case(
        "deepspeed", zero={"sub_group_size": 500}, bf16=True, groups="frozen", top=SCHEDULE
    ),
    "ZeRO-2, bf16, two groups": Case("deepspeed", 2, bf16=True, groups="two"),
    "ZeRO-3, fp16": Case("deepspeed", top=FP16),
    "ZeRO-0, fp16": Case("deepspeed", 0, top=FP16),
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


@pytest.mark.slow
@pytest.mark.parametrize("name", BITWISE_CASES)
def test_losses_are_the_same_bits_with_every_option(
    name: str, paths: dict[str, Path], tmp_path: Path
) -> None:
    assert run_ranks(find_differences, 2, paths, {name: BITWISE_CASES[name]}, tmp_path) == [[], []]


CPU_ADAM = Case("deepspeed", 3, OFFLOADED, cpu_adam=True)
CHANGES = {
    "FSDP2, 2 to 3": (FSDP2, 2, FSDP2, 3),
    "ZeRO-3, 1 to 2": (ZERO, 1, ZERO, 2),
    "ZeRO-3 on 4 to ZeRO-2 on 2": (ZERO, 4, Case("deepspeed", 2), 2),
    "ZeRO-2 on 2 to FSDP2 on 3": (Case("deepspeed", 2, groups="two"), 2, Case("fsdp2", groups="reversed"), 3),
    "FSDP2 on 1 to ZeRO-1 on 4": (FSDP2, 1, Case("deepspeed", 1), 4),
    "FSDP2, two groups, to frozen ZeRO-3": (
        Case("fsdp2", groups="frozen"),
        2,
        Case("deepspeed", groups="frozen"),
        3,
    ),
    "replicas, 4 to 2": (Case("fsdp2", options={"replicate": 2}), 4, FSDP2, 2),
    "LoRA, ZeRO-3 to FSDP2": (Case("deepspeed", lora=True), 2, Case("fsdp2", lora=True), 3),
    "DeepSpeed's CPU Adam, ZeRO-3 to FSDP2": (CPU_ADAM, 2, FSDP2, 3),
    "torch's AdamW at ZeRO-2 to DeepSpeed's CPU Adam": (Case("deepspeed", 2), 2, CPU_ADAM, 2),
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=() if n == "ZeRO-3 on 4 to ZeRO-2 on 2" else pytest.mark.slow) for n in CHANGES],
)
def test_losses_continue_on_other_ranks(name: str, paths: dict[str, Path], tmp_path: Path) -> None:
    first, ranks, second, second_ranks = CHANGES[name]
    if first.cpu_adam or second.cpu_adam:
        load_operations(("CPUAdamBuilder",))  # compile once, not on every rank
    expected = run_ranks(train_on, ranks, paths[first.kind], first, tmp_path / "state")[0]
    losses = run_ranks(resume, second_ranks, paths[first.kind], second, tmp_path / "state")[0]
    assert losses == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
def test_indivisible_vocabulary_resumes(tmp_path: Path) -> None:
    path = checkpoint("qwen3", tmp_path, vocab_size=VOCABULARY + 1)
    losses = run_ranks(train_on, 2, path, FSDP2, tmp_path / "state")[0]
    for case, ranks in ((FSDP2, 3), (Case("deepspeed", 2), 3), (ZERO, 4)):
        assert run_ranks(resume, ranks, path, case, tmp_path / "state")[0] == pytest.approx(losses, rel=1e-5)
