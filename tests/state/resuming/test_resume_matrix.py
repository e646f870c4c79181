"""Resuming with every option on the same ranks, and elsewhere: losses as without a stop."""

from pathlib import Path

import pytest
from torch.distributed.fsdp import CPUOffloadPolicy

from tests.parity import VOCABULARY, checkpoint
from tests.ranks import run_ranks
from tests.state.resuming.trainings import FSDP2, OFFLOADED, ZERO, Case, both, resumed, uninterrupted
from zerostart.upstream.deepspeed.zero3_partitions import load_operations

FP16 = {"fp16": {"enabled": True, "initial_scale_power": 18, "loss_scale_window": 2, "hysteresis": 1}}
SLOW = {
    "ZeRO-3, fp16": Case("deepspeed", top=FP16),
    "ZeRO-2, fp16": Case("deepspeed", 2, top=FP16),
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
@pytest.mark.parametrize("name", SLOW)
def test_losses_are_the_same_bits_with_every_option(
    name: str, paths: dict[str, Path], tmp_path: Path
) -> None:
    assert run_ranks(both, 2, paths, {name: SLOW[name]}, tmp_path) == [[], []]


CPU_ADAM = Case("deepspeed", 3, OFFLOADED, cpu_adam=True)
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
    "DeepSpeed's CPU Adam, ZeRO-3 to FSDP2": (CPU_ADAM, 2, FSDP2, 3),
    "torch's AdamW at ZeRO-2 to DeepSpeed's CPU Adam": (Case("deepspeed", 2), 2, CPU_ADAM, 2),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CHANGES)
def test_losses_go_on_elsewhere(name: str, paths: dict[str, Path], tmp_path: Path) -> None:
    one, ranks, other, others = CHANGES[name]
    if one.cpu_adam or other.cpu_adam:
        load_operations(("CPUAdamBuilder",))  # compiled once, before ranks would each
    wanted = run_ranks(uninterrupted, ranks, paths[one.kind], one, tmp_path / "state")[0]
    found = run_ranks(resumed, others, paths[one.kind], other, tmp_path / "state")[0]
    assert found == pytest.approx(wanted, rel=1e-5)


@pytest.mark.slow
def test_a_vocabulary_that_no_number_of_ranks_divides_goes_on(tmp_path: Path) -> None:
    path = checkpoint("qwen3", tmp_path, vocab_size=VOCABULARY + 1)
    wanted = run_ranks(uninterrupted, 2, path, FSDP2, tmp_path / "state")[0]
    for case, ranks in ((FSDP2, 3), (Case("deepspeed", 2), 3), (ZERO, 4)):
        assert run_ranks(resumed, ranks, path, case, tmp_path / "state")[0] == pytest.approx(wanted, rel=1e-5)
