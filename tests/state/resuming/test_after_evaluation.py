"""Saving and resuming right after an evaluation, which leaves FSDP2's parameters gathered."""

from pathlib import Path
from typing import Any

import pytest
import torch

import zerostart
from tests.ranks import run_ranks
from tests.state.resuming.trainings import Case, Run, batch

CASES = {
    "experts": Case("fsdp2", kind="mixtral", experts=2),
    "tensors": Case("fsdp2", tensors=2),
    "a script's own": Case("fsdp2", stock=True),
    "its own in bf16": Case("fsdp2", bf16=True),
    "stage 2": Case("fsdp2", 2),
}


def evaluate(run: Run) -> None:
    run.model.eval()
    with torch.no_grad():
        tokens = batch(50, 0, 1, run.case.tensors)
        run.model(input_ids=tokens, labels=tokens, use_cache=False)
    run.model.train()


def evaluated(paths: dict[str, Path], cases: dict[str, Case], folder: Path) -> dict[str, tuple[Any, ...]]:
    """Losses without evaluations; those of a run that is evaluated before all, and of one that goes on."""
    found = {}
    for name, case in cases.items():
        plain = Run(paths[case.kind], case)
        wanted = [loss for number in range(4) for loss in plain.step(number)]
        run = Run(paths[case.kind], case)
        losses = [loss for number in range(2) for loss in run.step(number)]
        evaluate(run)
        digest = zerostart.digest(run.model)
        evaluate(run)
        zerostart.save_state(folder / name, *run.state)
        evaluate(run)
        zerostart.save(run.model, folder / f"{name} saved")
        assert zerostart.digest(run.model) == digest
        losses += [loss for number in range(2, 4) for loss in run.step(number)]
        other = Run(paths[case.kind], case)
        evaluate(other)
        zerostart.load_state(folder / name, *other.state)
        assert zerostart.digest(other.model) == digest
        resumed = [loss for number in range(2, 4) for loss in other.step(number)]
        found[name] = (wanted, losses, resumed)
    return found


@pytest.mark.parametrize(
    "names", [["experts", "a script's own"], pytest.param([*CASES], marks=pytest.mark.slow)]
)
def test_a_state_is_saved_and_loaded_after_an_evaluation(
    names: list[str], paths: dict[str, Path], tmp_path: Path
) -> None:
    cases = {name: CASES[name] for name in names}
    for name, (wanted, losses, resumed) in run_ranks(evaluated, 2, paths, cases, tmp_path)[0].items():
        assert losses == wanted, name
        assert resumed == wanted[2:], name
