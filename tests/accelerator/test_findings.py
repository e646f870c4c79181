"""What a pretend accelerator found: each of these failed before."""

from pathlib import Path
from typing import Any

import pytest

from tests.accelerator import findings
from tests.npu_ranks import run_npu_ranks
from tests.tiny import TinyCheckpoints

#: The first tests of a run: they wait for the compilers, of DeepSpeed's operation and of the accelerator.
pytestmark = pytest.mark.timeout(900)


@pytest.mark.slow
def test_the_device_is_current_and_nothing_is_initialised_by_asking() -> None:
    assert run_npu_ranks(findings.device_before_it_is_asked, 2) == [(False, True, 5)] * 2


@pytest.mark.slow
def test_a_background_save_waits_for_the_device_of_its_copies(
    checkpoints: TinyCheckpoints, tmp_path: Path
) -> None:
    path = checkpoints("qwen3")
    assert run_npu_ranks(findings.saved_beside_another_device, 2, path, tmp_path / "state") == [True, True]


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
    for asked, allocated, registered in run_npu_ranks(
        findings.page_locked, 2, checkpoints("qwen3"), *arguments
    ):
        assert asked > 20_000
        # In pages, and each tensor on a boundary of its own.
        assert allocated + registered <= 1.1 * asked + 3 * 4096


@pytest.mark.slow
def test_what_torch_adds_to_page_locked_memory_is_counted_and_given_back(
    checkpoints: TinyCheckpoints, tmp_path: Path
) -> None:
    from torch.distributed.fsdp import CPUOffloadPolicy

    config = {"offload_policy": CPUOffloadPolicy(pin_memory=True)}
    arguments = (checkpoints("qwen3"), tmp_path, config)
    for found in run_npu_ranks(findings.page_locked_by_torch, 2, *arguments):
        assert found["asked"] < found["taken"] == found["told"] == found["forecast"]
        assert found["report"] >= found["peak"]
        assert found["left"] == 0


@pytest.mark.slow
def test_activations_on_the_host_take_what_they_need() -> None:
    for off, needed, most in run_npu_ranks(findings.offloaded_activations, 1):
        assert off == [0.0] * len(off)
        assert most <= 2 * needed


@pytest.mark.slow
def test_a_model_on_two_devices_is_saved_as_it_is(tmp_path: Path) -> None:
    """Copies off the second one were not waited for: buffers were written with what was in them before."""
    assert run_npu_ranks(findings.moved_between_two_devices, 1, tmp_path / "saved") == [[]]
