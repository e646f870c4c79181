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


#: Models that only the first stage needs, and what is trained.
ENCODERS = {name: list(parts)[1:] for name, parts in PIPELINES.items()}
TRAINED = {name: list(parts)[:1] for name, parts in PIPELINES.items()}
#: Drawn anew at every call.
DRAWN = ("noise", "latents")


def tensors_in(value: object, path: str = "") -> dict[str, torch.Tensor]:
    """The tensors of a cached item, by where they lie, but for those that are drawn."""
    if isinstance(value, torch.Tensor):
        return {path: value}
    parts: dict[str, object] = {}
    if isinstance(value, dict):
        parts = {str(key): part for key, part in value.items() if key not in DRAWN}
    elif isinstance(value, (list, tuple)):
        parts = {str(number): part for number, part in enumerate(value)}
    return {k: t for key, part in parts.items() for k, t in tensors_in(part, f"{path}/{key}").items()}


@pytest.mark.parametrize("family", FAMILIES)
def test_two_stages(family: str, made: Path, tmp_path: Path) -> None:
    """Encoded as by one process, to the bit; then the transformer is trained on that alone."""
    chosen = [*lora(family), "--task"]
    arguments, parts = [*chosen, "sft:data_process"], list(PIPELINES[family])
    theirs = run(family, "stock plain", arguments, made, tmp_path / "theirs", parts=parts)
    ours = run(family, "zero3", arguments, made, tmp_path / "ours", parts=parts)
    for number in range(4):
        at = theirs.folder / "0" / f"{number}.pth"
        expected = tensors_in(torch.load(at, weights_only=False))
        # Ranks take turns.
        at = ours.folder / str(number % 2) / f"{number // 2}.pth"
        found = tensors_in(torch.load(at, weights_only=False))
        assert found.keys() == expected.keys()
        assert len(found) >= 2
        assert [key for key in expected if not torch.equal(found[key], expected[key])] == []
    arguments = [*chosen, "sft:train"]
    stage = {"cache": theirs.folder, "parts": TRAINED[family]}
    expected_run = run(family, "stock zero2", arguments, made, tmp_path / "stock", **stage)
    assert len(expected_run.losses) == 4
    same(run(family, "zero2", arguments, made, tmp_path / "zero2", **stage), expected_run)
    alike(run(family, "zero3", arguments, made, tmp_path / "zero3", **stage), expected_run)


@pytest.mark.parametrize("family", ["qwen_image", "wanvideo"])
def test_their_configuration_for_little_memory(family: str, made: Path, runs: Runs, tmp_path: Path) -> None:
    """Parameters and optimizer on the host, DeepSpeed's own checkpointing, models made on the CPU."""
    expected = runs(family, "stock zero2", lora(family))
    arguments = [*lora(family), "--initialize_model_on_cpu"]
    alike(run(family, "low memory", arguments, made, tmp_path / "low"), expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_activations_on_the_host(family: str, made: Path, runs: Runs, tmp_path: Path) -> None:
    arguments = [*FULL, "--use_gradient_checkpointing_offload"]
    alike(run(family, "zero3", arguments, made, tmp_path / "ours"), runs(family, "stock zero2", FULL))


def test_one_process(runs: Runs) -> None:
    """On ZeRO-3 as on ZeRO-2; and without a configuration the script is theirs, to the bit."""
    alike(runs("wanvideo", "zero3 alone", FULL), runs("wanvideo", "stock zero2 alone", FULL))
    same(runs("wanvideo", "plain", FULL), runs("wanvideo", "stock plain", FULL))
