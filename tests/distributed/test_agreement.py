"""A failure at any place of a load, on any rank: the same error on all, soon, and a group that is whole."""

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
from tests.distributed.injecting import Places, at_every_place, unguarded
from tests.ranks import Outcome, rank_outcomes, run_ranks
from tests.tiny import TinyCheckpoints
from zerostart import errors
from zerostart.distributed.world import current_world
from zerostart.engines.deepspeed.family import ZeroThree
from zerostart.live.model import get_record

LIMIT = 30.0


def rounded(path: Path, options: Mapping[str, Any]) -> None:
    """Load in less precision, and read the fp32 masters that the engine would."""
    offered: list[Any] = []
    kept = ZeroThree.offer_masters
    ZeroThree.offer_masters = lambda self, *given: offered.append(given)  # type: ignore[method-assign]
    try:
        model = zerostart.load(path, dtype=torch.bfloat16, progress=False, **options)
    finally:
        ZeroThree.offer_masters = kept  # type: ignore[method-assign]
    ((_, names, reader),) = offered
    shards = get_record(model).shards(model)
    reader.read([(name, torch.empty(shards[name].layout.numel)) for name in names])


def held(path: Path, options: Mapping[str, Any]) -> None:
    """Load a mapping of tensors."""
    zerostart.load(load_file(path / "model.safetensors"), lambda: Small(), progress=False, **options)


def lacking(path: Path, options: Mapping[str, Any]) -> None:
    """Load a model with parameters that the checkpoint lacks, and look at it."""
    model = zerostart.load(path, lambda: Small(more=True), strict=False, progress=False, **options)
    assert [name for name, _ in zerostart.full_tensors(model)]
    with zerostart.gathered(model, "body.weight", modifier_rank=0) as tensor:
        if dist.get_rank() == 0:
            tensor.add_(1)


def plainly(path: Path, options: Mapping[str, Any]) -> None:
    zerostart.load(path, progress=False, **options)


def adopted(path: Path, options: Mapping[str, Any]) -> None:
    """By transformers' own call."""
    from transformers import AutoModelForCausalLM

    with zerostart.enabled(progress=False, **options):
        AutoModelForCausalLM.from_pretrained(path)


class Small(nn.Module):
    """Two layers and a buffer that every rank has."""

    def __init__(self, more: bool = False) -> None:
        super().__init__()
        self.body = nn.Linear(17, 23)
        self.register_buffer("table", torch.arange(40.0))
        if more:
            self.head = nn.Linear(23, 3)


Job = Callable[[Path, Mapping[str, Any]], None]
#: What is loaded, how, and with which options.
CASES: dict[str, tuple[str, Job, dict[str, Any]]] = {
    "deepspeed tied": ("tied", plainly, {"engine": "deepspeed"}),
    "deepspeed masters": ("qwen3", rounded, {"engine": "deepspeed"}),
    "deepspeed hierarchical": (
        "qwen3",
        plainly,
        {"engine": "deepspeed", "engine_config": {"zero_optimization": {"zero_hpz_partition_size": 2}}},
    ),
    "deepspeed experts": ("qwen3_moe", plainly, {"engine": "deepspeed", "expert_parallel": 2}),
    "stage 2 exchange": ("qwen3", plainly, {"engine": "deepspeed", "zero_stage": 2, "exchange": True}),
    "stage 2 experts": (
        "qwen3_moe",
        plainly,
        {"engine": "deepspeed", "zero_stage": 2, "expert_parallel": 2},
    ),
    "fsdp2": ("qwen3_moe", plainly, {"engine": "fsdp2"}),
    "fsdp2 exchange": ("small", plainly, {"engine": "fsdp2", "exchange": True, "model": Small}),
    "fsdp2 experts": ("qwen3_moe", plainly, {"engine": "fsdp2", "expert_parallel": 2}),
    "fsdp2 missing": ("small", lacking, {"engine": "fsdp2"}),
    "fsdp2 mapping": ("small", held, {"engine": "fsdp2"}),
    "from_pretrained": ("qwen3", adopted, {"engine": "fsdp2"}),
}
#: The cases of `make test`: an engine each, and a mapping of tensors.
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
    which, job, options = CASES[case]
    kinds = (MemoryError, KeyError) if world == 2 else (MemoryError, KeyboardInterrupt, SystemExit)
    for wrong in run_ranks(fail_everywhere, world, job, paths[which], options, kinds, timeout=500):
        assert wrong == []


def fail_everywhere(
    job: Job, path: Path, options: dict[str, Any], kinds: tuple[type[BaseException], ...]
) -> list[str]:
    return at_every_place(lambda: job(path, options), kinds)


@pytest.mark.parametrize("case", [case for case in CASES if case != "from_pretrained"])
@pytest.mark.slow
def test_no_collective_is_unguarded(case: str, paths: dict[str, Path]) -> None:
    which, job, options = CASES[case]
    assert run_ranks(look_for_unguarded, 2, job, paths[which], options) == [[], []]


def look_for_unguarded(job: Job, path: Path, options: dict[str, Any]) -> list[str]:
    with unguarded() as found:
        job(path, options)
    return found


@pytest.mark.slow
def test_errors_that_do_not_travel() -> None:
    """One that cannot be pickled keeps its kind, one whose text fails has its type's name."""
    for seen in run_ranks(fail_oddly, 2):
        assert seen == [
            ("ReadError", "rank 1: of a local class"),
            ("ZerostartError", "rank 1: Wordless: an error whose text cannot be had"),
            # Those whom it does not concern are there, and hear of it.
            ("PeerError", "rank 1: of a storage of its own"),
        ]


def fail_oddly() -> list[tuple[str, str]]:
    class Local(errors.ReadError):
        pass

    class Wordless(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    found = []
    for failure in (Local("of a local class"), Wordless(), errors.PeerError("of a storage of its own")):
        with pytest.raises(errors.ZerostartError) as caught:
            fail_inside(failure)
        found.append((type(caught.value).__name__, str(caught.value)))
    return found


def fail_inside(failure: Exception) -> None:
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
    outcomes = rank_outcomes(load_killed, 3, paths["qwen3"], engine, victim, f"begin of {name}")
    check_killed(outcomes, victim)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["fsdp2 exchange", "fsdp2 mapping", "stage 2 exchange"])
def test_rank_killed_at_every_place(case: str, paths: dict[str, Path]) -> None:
    which, job, options = CASES[case]
    places = run_ranks(count_places, 2, job, paths[which], options)
    for victim, names in enumerate(places):
        for number in range(0, len(names), 2):
            outcomes = rank_outcomes(killed_at, 2, job, paths[which], options, victim, number)
            check_killed(outcomes, victim)


def check_killed(outcomes: list[Outcome], victim: int) -> None:
    report = "\n".join(outcome.describe() for outcome in outcomes)
    assert outcomes[victim].exit_code == -signal.SIGKILL, report
    others = [outcome for outcome in outcomes if outcome.rank != victim]
    assert {outcome.error for outcome in others} == {"zerostart.errors.PeerError"}, report
    assert max(outcome.seconds for outcome in others) < LIMIT, report


def load_killed(path: Path, engine: str, victim: int, place: str) -> None:
    with Places().watched() as places:
        kept = places.come_by

        def come_by(name: str) -> None:
            kept(name)
            if name == place and dist.get_rank() == victim:
                os.kill(os.getpid(), signal.SIGKILL)

        places.come_by = come_by  # type: ignore[method-assign]
        zerostart.load(path, engine=engine, progress=False)


def count_places(job: Job, path: Path, options: dict[str, Any]) -> list[str]:
    with Places().watched() as places:
        job(path, options)
    return places.names


def killed_at(job: Job, path: Path, options: dict[str, Any], victim: int, number: int) -> None:
    with Places().watched() as places:
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
