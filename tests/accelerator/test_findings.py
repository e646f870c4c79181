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
def test_a_background_save_that_does_not_wait_writes_something_else(
    checkpoints: TinyCheckpoints, tmp_path: Path
) -> None:
    """So that the test above can fail."""
    arguments = (checkpoints("qwen3"), tmp_path / "state", False)
    assert False in run_npu_ranks(findings.saved_beside_another_device, 2, *arguments)


@pytest.mark.parametrize("engine", ["fsdp2", pytest.param("deepspeed", marks=pytest.mark.slow)])
def test_page_locked_memory_is_not_rounded_up(
    engine: str, checkpoints: TinyCheckpoints, tmp_path: Path
) -> None:
    check_page_locked(engine, checkpoints, tmp_path, False)


@pytest.mark.slow
def test_page_locked_memory_of_background_saves_is_not_rounded_up(
    checkpoints: TinyCheckpoints, tmp_path: Path
) -> None:
    check_page_locked("fsdp2", checkpoints, tmp_path, True)


def check_page_locked(engine: str, checkpoints: TinyCheckpoints, folder: Path, background: bool) -> None:
    config: Any = None
    if engine == "deepspeed":
        zero = {"stage": 3, "offload_param": {"device": "cpu", "pin_memory": True}}
        zero["stage3_param_persistence_threshold"] = 0
        config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": zero}
    elif not background:
        from torch.distributed.fsdp import CPUOffloadPolicy

        config = {"offload_policy": CPUOffloadPolicy(pin_memory=True)}
    arguments = (checkpoints("qwen3"), folder / "state", engine, config, background)
    for asked, allocated, registered in run_npu_ranks(findings.page_locked, 2, *arguments):
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
@pytest.mark.parametrize("stage", [2, 3])
def test_what_deepspeed_has_page_locked_is_foreseen_as_torch_takes_it(
    stage: int, checkpoints: TinyCheckpoints
) -> None:
    """At stage 3 its masters are not."""
    zero = {"stage": stage, "offload_optimizer": {"device": "cpu", "pin_memory": True}}
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": zero,
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
    }
    for found, foreseen in run_npu_ranks(findings.states_page_locked, 2, checkpoints("qwen3"), stage, config):
        locked = {name for name in foreseen if stage == 2 or name == "gradients"}
        assert found == sum(foreseen[name] for name in locked)


@pytest.mark.slow
def test_a_mesh_of_the_host_begins_no_accelerator(checkpoints: TinyCheckpoints) -> None:
    assert run_npu_ranks(findings.on_a_mesh_of_the_host, 2, checkpoints("qwen3")) == [("cpu", False)] * 2


@pytest.mark.slow
def test_a_ring_that_the_device_has_no_kernels_for_is_refused(checkpoints: TinyCheckpoints) -> None:
    """It had failed in the first forward, in words of DTensor's."""
    for said in run_npu_ranks(findings.ring_without_kernels, 2, checkpoints("qwen3_even")):
        assert "torch's ring attention, which knows CUDA's kernels, and npu has none of them" in said


@pytest.mark.slow
def test_activations_on_the_host_take_what_they_need() -> None:
    for off, needed, most in run_npu_ranks(findings.offloaded_activations, 1):
        assert off == [0.0] * len(off)
        assert most <= 2 * needed


@pytest.mark.slow
def test_page_locked_memory_concerns_one_device_and_one_process(
    checkpoints: TinyCheckpoints, tmp_path: Path
) -> None:
    """To wait for the device of another rank, on CUDA, begins to use it, and takes memory there."""
    done = run_npu_ranks(findings.page_locked_goes, 2, checkpoints("qwen3"), tmp_path / "state")
    for rank, (waited, counted, status, freed) in enumerate(done):
        assert waited == {rank}
        assert counted >= 64 << 20
        assert status == 0
        assert freed == 64 << 20


@pytest.mark.slow
def test_the_users_own_peak_figures_stay(checkpoints: TinyCheckpoints) -> None:
    for before, after, of_load in run_npu_ranks(findings.peaks_stay, 1, checkpoints("qwen3")):
        assert after == before == 40 << 20
        assert of_load is not None
        assert 0 < of_load < 4 << 20


@pytest.mark.slow
def test_an_exchange_of_tokens_waits_for_the_device_once() -> None:
    """For the numbers of tokens, which the host needs to receive them."""
    assert run_npu_ranks(findings.waits_of_dispatch, 2) == [(1, True)] * 2


@pytest.mark.slow
def test_an_engine_may_have_a_part_on_the_host_and_nothing_stays_page_locked() -> None:
    """Of pages that are unmapped while they are locked an accelerator copies, whatever lies there later."""
    for versions, wrong, locked, left in run_npu_ranks(findings.refitted_in_part_there, 1):
        assert (versions, wrong) == ([1, 2], [])
        assert locked == left == 0


@pytest.mark.slow
def test_a_model_on_two_devices_is_saved_as_it_is(tmp_path: Path) -> None:
    """Copies off the second one were not waited for: buffers were written with what was in them before."""
    assert run_npu_ranks(findings.moved_between_two_devices, 1, tmp_path / "saved") == [([], [])]
