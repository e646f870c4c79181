"""Regression tests of errors that the pretend accelerator has shown."""

from pathlib import Path
from typing import Any

import pytest

from tests.accelerator import findings
from tests.npu_ranks import run_npu_ranks
from tests.tiny import TinyCheckpoints

#: The first tests of a run compile DeepSpeed's operation and the accelerator.
pytestmark = pytest.mark.timeout(900)


@pytest.mark.slow
def test_the_device_is_current_and_asking_initialises_nothing() -> None:
    assert run_npu_ranks(findings.check_current_device, 2) == [(False, True, 5)] * 2


@pytest.mark.slow
def test_a_background_save_waits_for_the_device_of_its_copies(
    checkpoints: TinyCheckpoints, tmp_path: Path
) -> None:
    path = checkpoints("qwen3")
    assert run_npu_ranks(findings.save_with_another_current_device, 2, path, tmp_path / "state") == [
        True,
        True,
    ]


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["fsdp2", "deepspeed", "background"])
def test_page_locked_memory_is_not_rounded_up(
    engine: str, checkpoints: TinyCheckpoints, tmp_path: Path
) -> None:
    config: Any = None
    if engine == "deepspeed":
        zero = {"stage": 3, "offload_param": {"device": "cpu", "pin_memory": True}}
        zero["stage3_param_persistence_threshold"] = 0
        config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": zero}
    elif engine == "fsdp2":
        from torch.distributed.fsdp import CPUOffloadPolicy

        config = {"offload_policy": CPUOffloadPolicy(pin_memory=True)}
    background = engine == "background"
    arguments = (tmp_path / "state", "fsdp2" if background else engine, config, background)
    for needed, allocated, registered in run_npu_ranks(
        findings.measure_page_locked, 2, checkpoints("qwen3"), *arguments
    ):
        assert needed > 20_000
        # Rounded up to pages, and each tensor aligned.
        assert allocated + registered <= 1.1 * needed + 3 * 4096


@pytest.mark.slow
def test_torchs_rounding_of_page_locked_memory_is_counted_and_freed(
    checkpoints: TinyCheckpoints, tmp_path: Path
) -> None:
    from torch.distributed.fsdp import CPUOffloadPolicy

    config = {"offload_policy": CPUOffloadPolicy(pin_memory=True)}
    arguments = (checkpoints("qwen3"), tmp_path, config)
    for sizes in run_npu_ranks(findings.measure_page_locked_by_torch, 2, *arguments):
        assert sizes["needed"] < sizes["taken"] == sizes["locked"]
        assert sizes["report"] >= sizes["peak"]
        assert sizes["after"] == 0


@pytest.mark.slow
def test_offloaded_activations_lock_at_most_twice_their_bytes() -> None:
    for errors, needed, peak in run_npu_ranks(findings.measure_offloaded_activations, 1):
        assert errors == [0.0] * len(errors)
        assert peak <= 2 * needed


@pytest.mark.slow
def test_a_model_on_two_devices_is_saved_correctly(tmp_path: Path) -> None:
    """Wait for copies from the second device before writing their buffers."""
    assert run_npu_ranks(findings.save_from_two_devices, 1, tmp_path / "saved") == [[]]
