"""Place unsharded parameters in one tier on all ranks, or fail before reading."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import zerostart
from tests.engines.zero12 import routes
from tests.engines.zero12.routes import CASES
from tests.ranks import rank_outcomes, run_ranks
from tests.tiny import TinyCheckpoints
from zerostart.engines.residence import HOST, IN_PLACE, NOWHERE, MemoryFit, residence_of

GIB = 1 << 30


def gpu(free: int | None, number: int = 0, machine: str = "a", host: int = 500, total: int = 80) -> MemoryFit:
    """Describe an accelerator with ``free`` GiB of free memory."""
    return MemoryFit(machine, f"cuda:{number}", None if free is None else free * GIB, total * GIB, host * GIB)


def cpu(free: int, machine: str = "a") -> MemoryFit:
    return MemoryFit(machine, "cpu", free * GIB, None, free * GIB)


@pytest.mark.parametrize(
    ("gib", "fits", "host", "name"),
    [
        (60, [gpu(70, 0), gpu(61, 1)], True, IN_PLACE),
        (60, [gpu(70, 0), gpu(59, 1)], True, HOST),  # all ranks wait if one has to
        (60, [gpu(70, 0), gpu(59, 1)], False, NOWHERE),
        (
            60,
            [gpu(70, 0, host=119), gpu(59, 1, host=119)],
            True,
            NOWHERE,
        ),  # both wait in the same host memory
        (60, [gpu(70, 0, "a", host=60), gpu(59, 0, "b", host=60)], True, HOST),
        (90, [gpu(70)], True, NOWHERE),  # larger than the device
        (60, [gpu(None)], True, IN_PLACE),  # free memory is unknown
        (30, [gpu(61), gpu(61)], True, IN_PLACE),  # two ranks on one device
        (31, [gpu(61), gpu(61)], True, HOST),
        (10, [cpu(20), cpu(20)], True, IN_PLACE),
        (11, [cpu(20), cpu(20)], True, NOWHERE),
        (11, [cpu(20, "a"), cpu(20, "b")], True, IN_PLACE),
    ],
)
def test_tiers(gib: int, fits: list[MemoryFit], host: bool, name: str) -> None:
    tier = residence_of(gib * GIB, fits, host)
    assert tier.name == name
    assert str(tier).startswith(name)
    assert tier.buffer_bytes == gib * GIB


def test_the_tightest_device_is_named() -> None:
    tier = residence_of(GIB, [gpu(70, 0), gpu(60, 1), gpu(61, 2)], True)
    assert (tier.device, tier.free_bytes, tier.sharers) == ("cuda:1", 60 * GIB, 1)
    assert "1.1 GB in flat buffers on cuda:1, where 64.4 GB are free" in str(tier)
    assert "segments of 8.4 MB" in str(tier)


def load_tier(path: Path, engine: str, stage: int) -> tuple[str, str, int]:
    model = zerostart.load(path, engine=engine, zero_stage=stage, progress=False)
    report = zerostart.report(model)
    assert report.tier is not None
    assert f"whole parameters {report.tier}" in str(report)
    (storage,) = {p.untyped_storage().data_ptr(): p.untyped_storage() for p in model.parameters()}.values()
    return report.tier.name, report.tier.device, report.tier.buffer_bytes - storage.nbytes()


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "stage"), [("deepspeed", 2), ("deepspeed", 0), ("fsdp2", 0)])
def test_report_and_plan_have_the_tier(engine: str, stage: int, checkpoints: TinyCheckpoints) -> None:
    path = checkpoints("qwen3_moe", torch.bfloat16)
    assert run_ranks(load_tier, 2, path, engine, stage) == [("in place", "cpu", 0)] * 2
    plan = zerostart.plan(path, world_size=2, engine=engine, zero_stage=stage)
    assert plan.tier is not None
    assert (plan.tier.name, plan.tier.sharers) == ("in place", 2)
    assert plan.as_dict()["tier"]["name"] == "in place"
    assert all(rank.device_bytes >= plan.tier.buffer_bytes for rank in plan.ranks)


def test_sharded_parameters_have_no_tier(checkpoints: TinyCheckpoints) -> None:
    path = checkpoints("qwen3_moe", torch.bfloat16)
    for engine, stage in (("deepspeed", 3), ("fsdp2", 1)):
        assert zerostart.plan(path, world_size=2, engine=engine, zero_stage=stage).tier is None


def load_too_large(path: Path, engine: str, stage: int) -> None:
    from zerostart.engines import residence

    if dist.get_rank() == 1:
        residence.free_bytes = lambda device: 1000  # type: ignore[assignment]
    zerostart.load(path, engine=engine, zero_stage=stage, progress=False)


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "stage"), [("deepspeed", 1), ("deepspeed", 2), ("fsdp2", 0)])
def test_a_model_that_cannot_fit_is_the_same_error_on_every_rank(
    engine: str, stage: int, checkpoints: TinyCheckpoints
) -> None:
    path = checkpoints("qwen3_moe", torch.bfloat16)
    outcomes = rank_outcomes(load_too_large, 2, path, engine, stage)
    assert {outcome.error for outcome in outcomes} == {"zerostart.errors.InsufficientMemoryError"}
    assert "builtins.MemoryError" in outcomes[0].mro
    assert len({outcome.message for outcome in outcomes}) == 1
    message = outcomes[0].message
    assert f"ZeRO stage {stage} keeps the whole model on every rank, and it does not fit" in message
    assert "for each of 2 ranks on cpu, where 1.0 kB are free" in message
    assert "use zero_stage=3" in message


def check_waiting(path: Path) -> list[str]:
    """Load while one rank's device is full: all ranks' parameters wait in host memory."""
    from zerostart.engines import residence

    full = dist.get_rank() == 1
    residence.MemoryFit.here = classmethod(  # type: ignore[method-assign, assignment]
        lambda cls, device: gpu(0 if full else 70, dist.get_rank())
    )
    case = CASES["decay, round robin, aligned"]  # exchanges, except in host memory
    expected = routes.trace_training(routes.stock(path, case), case)
    model = routes.ours(path, case)
    report = zerostart.report(model)
    lines = [] if report.exchanged_bytes == 0 else ["ranks have exchanged"]
    if report.tier is None or report.tier.name != HOST or "until the engine starts" not in str(report):
        lines.append(f"the tier is {report.tier}")
    return lines + routes.differing_keys(routes.trace_training(model, case), expected)


@pytest.mark.slow
def test_parameters_wait_in_host_memory(checkpoints: TinyCheckpoints) -> None:
    path = checkpoints("qwen3_moe_aligned", torch.bfloat16)
    assert run_ranks(check_waiting, 2, path) == [[], []]
