"""Further values that a state restores, and refusals."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import zerostart
from tests.parity import checkpoint
from tests.ranks import run_ranks
from tests.state.resuming.trainings import FSDP2, OFFLOADED, RATE, ZERO, Case, Run, batch
from zerostart.state.resuming.load_state import restore_state


def save_within_accumulation(path: Path, cases: dict[str, Case], folder: Path) -> list[str]:
    """Save after one of a step's three batches."""
    errors = []
    for number, (name, case) in enumerate(cases.items()):
        state = folder / str(number)
        run = Run(path, case)
        run.step(0)
        run.step(1, range(1))
        zerostart.save_state(state, *run.state)
        expected = run.step(1, range(1, 3)) + run.step(2)
        run.end()
        run = Run(path, case)
        zerostart.load_state(state, *run.state)
        actual = run.step(1, range(1, 3)) + run.step(2)
        if case.engine == "deepspeed":  # without gradients, accumulation starts again
            restore_state(state, run.state[0], None, with_optimizer=False)
            if run.state[0].micro_steps % case.accumulate:
                errors.append(f"{name}: {run.state[0].micro_steps} batches counted without gradients")
        run.end()
        if actual != expected:
            errors.append(f"{name}: {actual} for {expected}")
    return errors


ACCUMULATION_CASES = {
    "FSDP2": Case("fsdp2", accumulate=3),
    "ZeRO-3": Case("deepspeed", accumulate=3, bf16=True),
    "ZeRO-3, offloaded": Case("deepspeed", zero=OFFLOADED, accumulate=3),
    "ZeRO-2": Case("deepspeed", 2, accumulate=3, groups="two"),
    "ZeRO-2, gradients in fp32": Case(
        "deepspeed", 2, bf16=True, accumulate=3, top={"data_types": {"grad_accum_dtype": "fp32"}}
    ),
}


@pytest.mark.slow
def test_accumulated_gradients_are_restored(paths: dict[str, Path], tmp_path: Path) -> None:
    assert run_ranks(save_within_accumulation, 2, paths["qwen3"], ACCUMULATION_CASES, tmp_path) == [[], []]


def refuse_within_accumulation(path: Path, folder: Path) -> None:
    for case in (Case("deepspeed", 1, accumulate=3), Case("deepspeed", 2, OFFLOADED, accumulate=3)):
        run = Run(path, case)
        run.step(0, range(1))
        with pytest.raises(zerostart.ZerostartError, match="middle of gradient accumulation"):
            zerostart.save_state(folder, *run.state)
        assert not folder.exists()
        run.end()


def save_before_a_step(path: Path, folder: Path) -> None:
    """A loaded state without moments removes present ones."""
    for engine in ("fsdp2", "deepspeed"):
        state = folder / engine
        run = Run(path, Case(engine))
        zerostart.save_state(state, *run.state)
        expected = run.step(0) + run.step(1)
        run.end()
        run = Run(path, Case(engine))
        run.step(5)
        zerostart.load_state(state, *run.state)
        moments = run.optimizer.state
        assert not any(moments.values())
        assert run.step(0) + run.step(1) == expected
        run.end()


@pytest.mark.slow
def test_state_without_moments_removes_them(paths: dict[str, Path], tmp_path: Path) -> None:
    run_ranks(save_before_a_step, 2, paths["qwen3"], tmp_path)


def check_random_states(path: Path, folder: Path) -> None:
    """Each rank restores its state of three generators."""
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
    expected = draws()
    assert zerostart.load_state(folder, *run.state) is None
    assert draws() == expected


@pytest.mark.slow
def test_random_states_of_each_rank_are_restored(paths: dict[str, Path], tmp_path: Path) -> None:
    run_ranks(check_random_states, 2, paths["qwen3"], tmp_path / "state")


def check_group_settings(path: Path, folder: Path) -> None:
    """Group settings follow the parameters, except `foreach`."""
    run = Run(path, Case("deepspeed", groups="two"))
    run.optimizer.param_groups[0].update(lr=0.25, betas=(0.5, 0.75))
    zerostart.save_state(folder, *run.state)
    run.end()
    reversed_groups = Run(path, Case("fsdp2", groups="reversed"))
    norms, projections = reversed_groups.optimizer.param_groups
    norms["foreach"] = projections["foreach"] = False
    zerostart.load_state(folder, *reversed_groups.state)
    assert (projections["lr"], projections["betas"], projections["weight_decay"]) == (0.25, (0.5, 0.75), 0.1)
    assert (norms["lr"], norms["betas"], norms["weight_decay"]) == (RATE, (0.9, 0.999), 0.0)
    assert not norms["foreach"]
    single_group = Run(path, FSDP2)
    with pytest.raises(zerostart.errors.CheckpointError, match="were in groups with different settings"):
        zerostart.load_state(folder, *single_group.state)


@pytest.mark.slow
def test_group_settings_follow_their_parameters(paths: dict[str, Path], tmp_path: Path) -> None:
    run_ranks(check_group_settings, 1, paths["qwen3"], tmp_path / "state")


def load_tied(path: Path) -> Any:
    """Initialise a model with a head tied to its embeddings."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(path, tie_word_embeddings=True)
    model = partial(AutoModelForCausalLM.from_config, config)
    return zerostart.load(None, model=model, engine="fsdp2", progress=False)


def refuse(path: Path, folder: Path) -> None:
    run = Run(path, FSDP2)
    zerostart.save_state(folder / "state", *run.state)
    with pytest.raises(zerostart.errors.ConfigError, match=r"extra\.a is a object"):
        zerostart.save_state(folder / "other", *run.state, extra={"a": object()})
    unsharded = Run(path, Case("fsdp2", 0))
    unsharded.optimizer = factored = torch.optim.Adafactor(unsharded.model.parameters())
    unsharded.step(0)
    zerostart.save_state(folder / "factored", unsharded.model, factored)
    fresh = Run(path, FSDP2)
    factored = torch.optim.Adafactor(fresh.model.parameters())
    with pytest.raises(zerostart.ZerostartError, match=r"row_var.* of model\.embed_tokens\.weight do not"):
        zerostart.load_state(folder / "factored", fresh.model, factored)
    head = torch.optim.AdamW(fresh.model.lm_head.parameters())
    zerostart.save_state(folder / "frozen", fresh.model, head)
    with pytest.raises(zerostart.ZerostartError, match="optimized now and were not"):
        zerostart.load_state(folder / "frozen", *fresh.state)
    sgd = torch.optim.SGD(fresh.model.parameters(), lr=RATE, momentum=0.9)
    with pytest.raises(zerostart.ZerostartError, match="uses the update rule of AdamW"):
        zerostart.load_state(folder / "state", fresh.model, sgd)
    with pytest.raises(zerostart.ZerostartError, match=r"1 are unexpected, .* among them lm_head\.weight"):
        zerostart.load_state(folder / "state", load_tied(path))
    assert sorted(p.name for p in folder.iterdir()) == ["factored", "frozen", "state"]
    if dist.get_rank() == 0:
        (folder / "state" / "state.json").rename(folder / "state" / "aside.json")
    dist.barrier()
    with pytest.raises(FileNotFoundError, match="not a complete training state"):
        zerostart.load_state(folder / "state", *run.state)
    engine = Run(path, ZERO)
    with pytest.raises(zerostart.errors.ConfigError, match=r"pass what deepspeed\.initialize"):
        zerostart.save_state(folder / "other", engine.model.module)
    engine.end()


@pytest.mark.slow
def test_refusals_name_their_cause(paths: dict[str, Path], tmp_path: Path) -> None:
    run_ranks(
        refuse, 2, checkpoint("qwen3", tmp_path, tie_word_embeddings=False), _folder(tmp_path / "states")
    )
    run_ranks(refuse_within_accumulation, 2, paths["qwen3"], tmp_path / "window")


def _folder(folder: Path) -> Path:
    folder.mkdir()
    return folder


# An evaluation leaves FSDP2's parameters gathered.
CASES = {
    "experts": Case("fsdp2", kind="mixtral", experts=2),
    "tensors": Case("fsdp2", tensors=2),
    "sharded by the script": Case("fsdp2", stock=True),
    "bf16": Case("fsdp2", bf16=True),
    "stage 2": Case("fsdp2", 2),
}


def evaluate(run: Run) -> None:
    run.model.eval()
    with torch.no_grad():
        tokens = batch(50, 0, 1, run.case.tensors)
        run.model(input_ids=tokens, labels=tokens, use_cache=False)
    run.model.train()


def evaluate_runs(paths: dict[str, Path], cases: dict[str, Case], folder: Path) -> dict[str, tuple[Any, ...]]:
    """Return losses without evaluations, with them, and resumed."""
    results = {}
    for name, case in cases.items():
        plain = Run(paths[case.kind], case)
        expected = [loss for number in range(4) for loss in plain.step(number)]
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
        resumed_run = Run(paths[case.kind], case)
        evaluate(resumed_run)
        zerostart.load_state(folder / name, *resumed_run.state)
        assert zerostart.digest(resumed_run.model) == digest
        resumed = [loss for number in range(2, 4) for loss in resumed_run.step(number)]
        results[name] = (expected, losses, resumed)
    return results


@pytest.mark.slow
def test_state_is_saved_and_loaded_after_an_evaluation(paths: dict[str, Path], tmp_path: Path) -> None:
    for name, (expected, losses, resumed) in run_ranks(evaluate_runs, 2, paths, CASES, tmp_path)[0].items():
        assert losses == expected, name
        assert resumed == expected[2:], name
