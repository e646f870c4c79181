"""Unchanged training scripts of DiffSynth-Studio under ``accelerate launch -m zerostart``.

The environment names a checkout (``ZEROSTART_DIFFSYNTH``). Its scripts run with its configurations on small
models of the five families. On ZeRO-2 a run equals that without zerostart to the bit. ZeRO-3 is compared with
ZeRO-2: the first loss is equal and later ones are near, because bf16 gradients are up to 1.6 % off when sums
are in another order.
"""

import functools
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from tests.diffusion.oracle import needs_diffsynth
from tests.diffusion.script_runs import CHECKOUT_VARIABLE, SCRIPTS, Run, run, write_data
from tests.diffusion.small_pipelines import PIPELINES, write_pipelines
from tests.ranks import run_ranks

pytestmark = [
    needs_diffsynth,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(CHECKOUT_VARIABLE not in os.environ, reason=f"{CHECKOUT_VARIABLE} names no checkout"),
]

#: Four steps on two ranks; a file after the third step and one at the end.
STEPS = ["--num_epochs", "2", "--save_steps", "3", "--use_gradient_checkpointing"]
FULL = [*STEPS, "--trainable_models", "dit", "--remove_prefix_in_ckpt", "pipe.dit."]
LAST_FILE = "step-4.safetensors"
SAVED_FILES = ("step-3.safetensors", LAST_FILE)


#: References of families whose script fails without zerostart: DeepSpeed cannot send a parameter without
#: dimensions to other ranks, and FLUX.2's autoencoder has one.
REFERENCE_ROUTES = {"flux2": "zero2"}
#: Families whose full training equals stock ZeRO-3 to the bit. The others have an encoder of Qwen, whose
#: rotary frequencies stock ZeRO-3 computes in bf16, unlike an unsharded model. Without their encoders
#: (``test_two_stages``) all families equal stock ZeRO-3.
EQUAL_TO_STOCK_ZERO3 = ("wanvideo", "flux")


def lora_arguments(family: str) -> list[str]:
    script = SCRIPTS[family]
    return [*STEPS, "--lora_base_model", "dit", "--lora_target_modules", script.targets, *script.lora]


Runs = Callable[..., Run]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with models, tokenizers and pictures."""
    folder = tmp_path_factory.mktemp("pipelines")
    run_ranks(write_pipelines, 1, str(folder), timeout=280)
    write_data(folder / "data")
    return folder


@pytest.fixture(scope="module")
def runs(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Function that runs a script once for all tests, by family, route and arguments."""

    @functools.cache
    def run_once(family: str, route: str, arguments: Sequence[str]) -> Run:
        return run(family, route, arguments, inputs, tmp_path_factory.mktemp(route.replace(" ", "-")) / "run")

    return lambda family, route, arguments: run_once(family, route, tuple(arguments))


@pytest.fixture(scope="module")
def adapted_arguments(runs: Runs) -> Callable[[str], list[str]]:
    """Arguments of a LoRA that continues another: the scripts initialise it without a seed."""

    def arguments(family: str) -> list[str]:
        first = runs(family, REFERENCE_ROUTES.get(family, "stock zero2"), lora_arguments(family))
        return [*lora_arguments(family), "--lora_checkpoint", str(first.folder / LAST_FILE)]

    return arguments


def assert_near(actual: Run, expected: Run, first: float = 1e-6, bound: float = 0.02) -> None:
    """Compare losses within ``first`` and ``bound``, and files within steps of bf16."""
    assert len(set(expected.losses)) == len(expected.losses) == 4
    assert actual.losses[0] == pytest.approx(expected.losses[0], rel=first)
    assert actual.losses == pytest.approx(expected.losses, rel=bound)
    for name in SAVED_FILES:
        ours, theirs = actual.load(name), expected.load(name)
        assert {n: (t.shape, t.dtype) for n, t in ours.items()} == {
            n: (t.shape, t.dtype) for n, t in theirs.items()
        }
        for key, tensor in theirs.items():
            torch.testing.assert_close(ours[key].float(), tensor.float(), rtol=0.1, atol=0.04)


def assert_equal(actual: Run, expected: Run) -> None:
    """Compare losses and files to the bit."""
    assert actual.losses == expected.losses
    for name in SAVED_FILES:
        assert (actual.folder / name).read_bytes() == (expected.folder / name).read_bytes()


@pytest.mark.parametrize("family", SCRIPTS)
@pytest.mark.parametrize("kind", ["full", "lora"])
def test_script_trains_as_without_zerostart(
    family: str, kind: str, runs: Runs, adapted_arguments: Callable[[str], list[str]]
) -> None:
    """ZeRO-2 equals the stock script; exact ZeRO-3 has the same first loss."""
    arguments = FULL if kind == "full" else adapted_arguments(family)
    ours = runs(family, "zero2", arguments)
    if family in REFERENCE_ROUTES:
        # One process without DeepSpeed is the reference: with two, accelerate draws the order earlier.
        first = [runs(family, route, arguments).losses[0] for route in ("zero3 exact single", "stock plain")]
        assert first[0] == pytest.approx(first[1], rel=1e-6)
    else:
        assert_equal(ours, runs(family, "stock zero2", arguments))
    assert_near(runs(family, "zero3 exact", arguments), ours)
    zero3 = runs(family, "zero3", arguments)
    assert "loaded in shards" in zero3.output
    assert_near(zero3, ours, 0.1, 0.1)
    if kind == "full" and family in EQUAL_TO_STOCK_ZERO3:
        assert_equal(zero3, runs(family, "stock zero3", arguments))


#: The trained model of each pipeline, the only one that the second stage loads.
TRAINED = {name: list(parts)[:1] for name, parts in PIPELINES.items()}
#: Entries of a cached item that are random at every call.
RANDOM_KEYS = ("noise", "latents")


def find_tensors(value: object, path: str = "") -> dict[str, torch.Tensor]:
    """Return the tensors of a cached item by path, without random ones."""
    if isinstance(value, torch.Tensor):
        return {path: value}
    parts: dict[str, object] = {}
    if isinstance(value, dict):
        parts = {str(key): part for key, part in value.items() if key not in RANDOM_KEYS}
    elif isinstance(value, (list, tuple)):
        parts = {str(number): part for number, part in enumerate(value)}
    return {k: t for key, part in parts.items() for k, t in find_tensors(part, f"{path}/{key}").items()}


def load_cache(folder: Path, ranks: int) -> list[dict[str, torch.Tensor]]:
    """Return the four items in order: ranks take turns."""
    return [
        find_tensors(torch.load(folder / str(n % ranks) / f"{n // ranks}.pth", weights_only=False))
        for n in range(4)
    ]


@pytest.mark.parametrize("family", SCRIPTS)
def test_two_stages(family: str, inputs: Path, tmp_path: Path) -> None:
    """Encoding equals one process; training on the cache equals stock ZeRO-2 and ZeRO-3."""
    common = [*FULL, "--task"]
    theirs = run(family, "stock plain", [*common, "sft:data_process"], inputs, tmp_path / "theirs")
    ours = run(family, "zero3 exact", [*common, "sft:data_process"], inputs, tmp_path / "ours")
    for actual, expected in zip(load_cache(ours.folder, 2), load_cache(theirs.folder, 1), strict=True):
        assert actual.keys() == expected.keys()
        assert len(actual) >= 2
        for key, tensor in expected.items():
            torch.testing.assert_close(actual[key], tensor, rtol=1e-6, atol=0)
    stage = {"cache": theirs.folder, "parts": TRAINED[family]}
    arguments = [*common, "sft:train"]
    expected_run = run(family, "stock zero2", arguments, inputs, tmp_path / "stock", **stage)
    assert_equal(run(family, "zero2", arguments, inputs, tmp_path / "zero2", **stage), expected_run)
    assert_near(run(family, "zero3 exact", arguments, inputs, tmp_path / "exact", **stage), expected_run)
    stock = run(family, "stock zero3", arguments, inputs, tmp_path / "stock3", **stage)
    assert_equal(run(family, "zero3", arguments, inputs, tmp_path / "zero3", **stage), stock)


@pytest.mark.parametrize("family", SCRIPTS)
def test_activations_on_the_host(family: str, inputs: Path, runs: Runs, tmp_path: Path) -> None:
    arguments = [*FULL, "--use_gradient_checkpointing_offload"]
    assert_equal(run(family, "zero3", arguments, inputs, tmp_path / "ours"), runs(family, "zero3", FULL))


@pytest.mark.parametrize("family", SCRIPTS)
def test_resuming_from_a_saved_file(family: str, inputs: Path, runs: Runs, tmp_path: Path) -> None:
    """The file is loaded into shards as into unsharded models."""
    route = REFERENCE_ROUTES.get(family, "stock zero2")
    arguments = [*FULL, "--resume_from_checkpoint", str(runs(family, route, FULL).folder / LAST_FILE)]
    expected = runs(family, route, arguments)
    assert_equal(run(family, "zero2", arguments, inputs, tmp_path / "zero2"), expected)
    assert_near(run(family, "zero3 exact", arguments, inputs, tmp_path / "zero3"), expected)
