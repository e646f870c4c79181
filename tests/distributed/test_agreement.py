"""Fail at every place of a load: all ranks raise the same error soon."""

import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn

import zerostart
from tests.distributed.injecting import Places, fail_at_every_place, record_unguarded
from tests.ranks import Outcome, rank_outcomes, run_ranks
from tests.tiny import TinyCheckpoints
from zerostart import errors
from zerostart.distributed.world import current_world
from zerostart.engines.deepspeed.family import ZeroThree
from zerostart.live.model import get_record

MAX_SECONDS = 30.0


def load_with_masters(path: Path, options: Mapping[str, Any]) -> None:
    """Load in bf16, and read the fp32 masters as the engine does."""
    calls: list[Any] = []
    original = ZeroThree.offer_masters
    ZeroThree.offer_masters = lambda self, *args: calls.append(args)  # type: ignore[method-assign]
    try:
        model = zerostart.load(path, dtype=torch.bfloat16, progress=False, **options)
    finally:
        ZeroThree.offer_masters = original  # type: ignore[method-assign]
    ((_, names, reader),) = calls
    shards = get_record(model).shards(model)
    reader.read([(name, torch.empty(shards[name].layout.numel)) for name in names])


def load_mapping(path: Path, options: Mapping[str, Any]) -> None:
    zerostart.load(load_file(path / "model.safetensors"), lambda: Small(), progress=False, **options)


def load_missing(path: Path, options: Mapping[str, Any]) -> None:
    """Load a model with parameters that the checkpoint lacks, and gather it."""
    model = zerostart.load(path, lambda: Small(with_head=True), strict=False, progress=False, **options)
    assert [name for name, _ in zerostart.full_tensors(model)]
    with zerostart.gathered(model, "body.weight", modifier_rank=0) as tensor:
        if dist.get_rank() == 0:
            tensor.add_(1)


def load_plainly(path: Path, options: Mapping[str, Any]) -> None:
    zerostart.load(path, progress=False, **options)


def load_by_transformers(path: Path, options: Mapping[str, Any]) -> None:
    from transformers import AutoModelForCausalLM

    with zerostart.enabled(progress=False, **options):
        AutoModelForCausalLM.from_pretrained(path)


class Small(nn.Module):
    """A small module with a buffer that every rank has whole."""

    def __init__(self, with_head: bool = False) -> None:
        super().__init__()
        self.body = nn.Linear(17, 23)
        self.register_buffer("table", torch.arange(40.0))
        if with_head:
            self.head = nn.Linear(23, 3)


Job = Callable[[Path, Mapping[str, Any]], None]
#: Checkpoint, function and options of each load.
CASES: dict[str, tuple[str, Job, dict[str, Any]]] = {
    "deepspeed tied": ("tied", load_plainly, {"engine": "deepspeed"}),
    "deepspeed masters": ("qwen3", load_with_masters, {"engine": "deepspeed"}),
    "deepspeed hierarchical": (
        "qwen3",
        load_plainly,
        {"engine": "deepspeed", "engine_config": {"zero_optimization": {"zero_hpz_partition_size": 2}}},
    ),
    "deepspeed experts": ("qwen3_moe", load_plainly, {"engine": "deepspeed", "expert_parallel": 2}),
    "stage 2 exchange": ("qwen3", load_plainly, {"engine": "deepspeed", "zero_stage": 2, "exchange": True}),
    "stage 2 experts": (
        "qwen3_moe",
        load_plainly,
        {"engine": "deepspeed", "zero_stage": 2, "expert_parallel": 2},
    ),
    "fsdp2": ("qwen3_moe", load_plainly, {"engine": "fsdp2"}),
    "fsdp2 exchange": ("small", load_plainly, {"engine": "fsdp2", "exchange": True, "model": Small}),
    "fsdp2 experts": ("qwen3_moe", load_plainly, {"engine": "fsdp2", "expert_parallel": 2}),
    "fsdp2 missing": ("small", load_missing, {"engine": "fsdp2"}),
    "fsdp2 mapping": ("small", load_mapping, {"engine": "fsdp2"}),
    "from_pretrained": ("qwen3", load_by_transformers, {"engine": "fsdp2"}),
}
#: Cases of `make test`: one of each engine, and a mapping of tensors.
FAST = ("deepspeed tied", "fsdp2 mapping")


@pytest.fixture(scope="module")
def paths(checkpoints: TinyCheckpoints, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    from safetensors.torch import save_file

    small = tmp_path_factory.mktemp("small")
    save_file(Small().state_dict(), small / "model.safetensors")

    def with_head(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    return {
        "small": small,
        "qwen3": checkpoints("qwen3"),
        "qwen3_moe": checkpoints("qwen3_moe"),
        "tied": checkpoints.edited(checkpoints("qwen3"), "tied-twice", with_head),
    }


def fits(case: str, world: int) -> bool:
    return world == 2 or not ("experts" in case or "hierarchical" in case)


@pytest.mark.parametrize(
    ("case", "world"),
    [
        pytest.param(case, world, marks=[] if case in FAST and world == 2 else pytest.mark.slow)
        for case in CASES
        for world in (2, 3)
        if fits(case, world)
    ],
)
def test_failure_at_every_place(case: str, world: int, paths: dict[str, Path]) -> None:
    checkpoint, job, options = CASES[case]
    kinds = (MemoryError, KeyError) if world == 2 else (MemoryError, KeyboardInterrupt, SystemExit)
    for lines in run_ranks(fail_everywhere, world, job, paths[checkpoint], options, kinds, timeout=500):
        assert lines == []


def fail_everywhere(
    job: Job, path: Path, options: dict[str, Any], kinds: tuple[type[BaseException], ...]
) -> list[str]:
    return fail_at_every_place(lambda: job(path, options), kinds)


@pytest.mark.parametrize("case", [case for case in CASES if case != "from_pretrained"])
@pytest.mark.slow
def test_no_collective_is_unguarded(case: str, paths: dict[str, Path]) -> None:
    checkpoint, job, options = CASES[case]
    assert run_ranks(find_unguarded, 2, job, paths[checkpoint], options) == [[], []]


def find_unguarded(job: Job, path: Path, options: dict[str, Any]) -> list[str]:
    with record_unguarded() as collectives:
        job(path, options)
    return collectives


@pytest.mark.slow
def test_errors_that_cannot_be_pickled() -> None:
    """Keep the error's public base class, or its type's name."""
    for caught in run_ranks(raise_unpicklable, 2):
        assert caught == [
            ("ReadError", "rank 1: of a local class"),
            ("ZerostartError", "rank 1: Wordless: an error whose text cannot be had"),
            # Raised on the other rank, too.
            ("PeerError", "rank 1: of a storage of its own"),
        ]


def raise_unpicklable() -> list[tuple[str, str]]:
    class Local(errors.ReadError):
        pass

    class Wordless(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    errors_caught = []
    for failure in (Local("of a local class"), Wordless(), errors.PeerError("of a storage of its own")):
        with pytest.raises(errors.ZerostartError) as caught:
            fail_in_nested_phase(failure)
        errors_caught.append((type(caught.value).__name__, str(caught.value)))
    return errors_caught


def fail_in_nested_phase(failure: Exception) -> None:
    world = current_world()
    with world.phase("outside"), world.phase("inside"):
        if world.rank == 1:
            raise failure


PHASES = ("arguments", "building the model", "sharding the model", "planning", "reading", "loading")


@pytest.mark.parametrize(
    ("engine", "name", "victim"),
    [
        pytest.param(
            ("deepspeed", "fsdp2")[number % 2],
            name,
            number % 3,
            marks=[] if name == "building the model" else pytest.mark.slow,
        )
        for number, name in enumerate(PHASES)
    ],
)
def test_rank_killed_in_a_phase(engine: str, name: str, victim: int, paths: dict[str, Path]) -> None:
    outcomes = rank_outcomes(load_killed_in_phase, 3, paths["qwen3"], engine, victim, f"begin of {name}")
    check_killed(outcomes, victim)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["fsdp2 exchange", "fsdp2 mapping", "stage 2 exchange"])
def test_rank_killed_at_every_place(case: str, paths: dict[str, Path]) -> None:
    checkpoint, job, options = CASES[case]
    places = run_ranks(count_places, 2, job, paths[checkpoint], options)
    for victim, names in enumerate(places):
        for number in range(0, len(names), 2):
            outcomes = rank_outcomes(load_killed_at, 2, job, paths[checkpoint], options, victim, number)
            check_killed(outcomes, victim)


def check_killed(outcomes: list[Outcome], victim: int) -> None:
    report = "\n".join(outcome.describe() for outcome in outcomes)
    assert outcomes[victim].exit_code == -signal.SIGKILL, report
    survivors = [outcome for outcome in outcomes if outcome.rank != victim]
    assert {outcome.error for outcome in survivors} == {"zerostart.errors.PeerError"}, report
    assert max(outcome.seconds for outcome in survivors) < MAX_SECONDS, report


def load_killed_in_phase(path: Path, engine: str, victim: int, place: str) -> None:
    with Places().watch() as places:
        original = places.reach

        def reach(name: str) -> None:
            original(name)
            if name == place and dist.get_rank() == victim:
                os.kill(os.getpid(), signal.SIGKILL)

        places.reach = reach  # type: ignore[method-assign]
        zerostart.load(path, engine=engine, progress=False)


def count_places(job: Job, path: Path, options: dict[str, Any]) -> list[str]:
    with Places().watch() as places:
        job(path, options)
    return places.names


def load_killed_at(job: Job, path: Path, options: dict[str, Any], victim: int, number: int) -> None:
    with Places().watch() as places:
        places.act = lambda name: os.kill(os.getpid(), signal.SIGKILL)
        places.reset(number if dist.get_rank() == victim else -1)
        job(path, options)


def fail_in_a_library() -> str:
    from zerostart.integrations.engine_setup import EngineSetup
    from zerostart.integrations.loading import InterceptedLoad
    from zerostart.loading.request import Request

    call = InterceptedLoad(Request(), EngineSetup.requested("fsdp2", 3, {}), {}, lambda *_: None)
    try:
        with call.agreeing():
            raise OSError("no file of that name.\n\tLook at the hub.")
    except OSError as error:
        return str(error)


def test_an_error_of_several_lines_stays_the_librarys_own() -> None:
    assert run_ranks(fail_in_a_library, 2) == ["no file of that name.\n\tLook at the hub."] * 2
