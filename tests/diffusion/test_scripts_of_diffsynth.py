"""DiffSynth-Studio's own training scripts, no line changed, under ``accelerate launch -m zerostart``.

They are run from a checkout that the environment names (``ZEROSTART_DIFFSYNTH``), with its configurations, on
small models of the five families; nothing of them is kept here. What they do without zerostart on ZeRO-2 is
what is expected: of ZeRO-2 to the bit, of ZeRO-3 to 1e-4.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from tests.diffusion.oracle import needs_diffsynth
from tests.diffusion.script_runs import CHECKOUT, FAMILIES, Run, run, write_data
from tests.diffusion.small_pipelines import PIPELINES, write

from ranks import run_ranks

pytestmark = [
    needs_diffsynth,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(CHECKOUT not in os.environ, reason=f"{CHECKOUT} names no checkout"),
]

#: Four steps on two ranks; a file after the third, and one at the end.
STEPS = ["--num_epochs", "2", "--save_steps", "3", "--use_gradient_checkpointing"]
FULL = [*STEPS, "--trainable_models", "dit", "--remove_prefix_in_ckpt", "pipe.dit."]
LAST = "step-4.safetensors"
SAVED = ("step-3.safetensors", LAST)


def lora(family: str) -> list[str]:
    chosen = FAMILIES[family]
    return [*STEPS, "--lora_base_model", "dit", "--lora_target_modules", chosen.targets, *chosen.lora]


Runs = Callable[..., Run]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models, tokenizers and pictures."""
    folder = tmp_path_factory.mktemp("pipelines")
    run_ranks(write, 1, str(folder), timeout=280)
    write_data(folder / "data")
    return folder


@pytest.fixture(scope="module")
def runs(made: Path, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """``runs(family, route, arguments)``: what is run once serves all tests."""

    @functools.cache
    def once(family: str, route: str, arguments: Sequence[str]) -> Run:
        return run(family, route, arguments, made, tmp_path_factory.mktemp(route.replace(" ", "-")) / "run")

    return lambda family, route, arguments: once(family, route, tuple(arguments))


def alike(found: Run, expected: Run, names: Sequence[str] = SAVED) -> None:
    """The same losses and files, to what another order of sums makes of bf16."""
    assert found.losses == pytest.approx(expected.losses, rel=1e-4)
    for name in names:
        ours, theirs = found.saved(name), expected.saved(name)
        assert {n: t.shape for n, t in ours.items()} == {n: t.shape for n, t in theirs.items()}
        for key, tensor in theirs.items():
            assert ours[key].dtype == tensor.dtype
            torch.testing.assert_close(ours[key].float(), tensor.float(), rtol=1e-2, atol=2e-3)


def same(found: Run, expected: Run, names: Sequence[str] = SAVED) -> None:
    """The same losses and files, to the bit."""
    assert found.losses == expected.losses
    for name in names:
        assert (found.folder / name).read_bytes() == (expected.folder / name).read_bytes()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", ["full", "lora"])
def test_a_script_trains_as_without_zerostart(family: str, kind: str, runs: Runs) -> None:
    arguments = FULL if kind == "full" else lora(family)
    expected = runs(family, "stock zero2", arguments)
    assert len(expected.losses) == 4
    assert len(set(expected.losses)) == 4
    same(runs(family, "zero2", arguments), expected)
    found = runs(family, "zero3", arguments)
    assert "loaded in shards" in found.output
    alike(found, expected)
