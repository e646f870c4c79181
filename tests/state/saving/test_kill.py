"""Real ranks that save are killed at each system call that changes a file, one after the other.

``ZEROSTART_TEST_EVERY=n`` takes each n-th of these calls alone: each is a run of ranks of its own.
"""

import os
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model

import zerostart
from tests.ranks import rank_outcomes, run_ranks
from tests.state.saving.traced_calls import Point, points_in, traced, tracing_works
from tests.tiny import TinyCheckpoints
from zerostart.checkpoint.manifest import documents
from zerostart.distributed.world import current_world
from zerostart.state.converting.convert import convert
from zerostart.state.resuming.retention import list_complete, prune

pytestmark = [
    pytest.mark.timeout(3000),
    pytest.mark.skipif(not tracing_works(), reason="strace is not there, or may not trace here"),
]


#: Of the calls, each of so many.
EVERY = int(os.environ.get("ZEROSTART_TEST_EVERY", "1"))
OPTIMIZERS: weakref.WeakKeyDictionary[torch.nn.Module, torch.optim.Optimizer] = weakref.WeakKeyDictionary()


class Source(torch.nn.Module):
    """What is exported from, in another dtype once it has changed."""

    def __init__(self, checkpoint: Path) -> None:
        super().__init__()
        self.checkpoint = checkpoint
        self.number = torch.nn.Parameter(torch.zeros(()))


def loaded(checkpoint: Path, kind: str) -> torch.nn.Module:
    if kind == "export":
        return Source(checkpoint)
    model = zerostart.load(checkpoint, engine="fsdp2", progress=False)
    if kind == "adapters":
        torch.manual_seed(1)
        adapted: torch.nn.Module = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
        return adapted
    OPTIMIZERS[model] = optimizer = torch.optim.AdamW(model.parameters())
    # As a step leaves it. A step itself takes as long in a fresh process as all else here: torch's tensors of
    # a mesh ask for each of its operations, once a process, where its results are.
    for parameter in model.parameters():
        moments = {"exp_avg": torch.ones_like(parameter), "exp_avg_sq": torch.ones_like(parameter)}
        optimizer.state[parameter] = {"step": torch.tensor(1.0, device="cpu"), **moments}
    return model


def change(model: torch.nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)


def save(model: torch.nn.Module, path: Path) -> None:
    zerostart.save(model, path, max_shard_size="8KB")


def save_state(model: torch.nn.Module, path: Path) -> None:
    zerostart.save_state(path, model, OPTIMIZERS[model], extra={"step": 1, "tensor": torch.ones(3)})


def save_in_the_background(model: torch.nn.Module, path: Path) -> None:
    zerostart.save_state(path, model, OPTIMIZERS[model], wait=False).wait()


def save_and_prune(model: torch.nn.Module, path: Path) -> None:
    """The next step's checkpoint; the one before it goes."""
    world = current_world()
    with world.phase("looking for checkpoints"):
        there = list_complete(path)
    number = 1 + max((int(one.name.removeprefix("step-")) for one in there), default=0)
    save_state(model, path / f"step-{number}")
    with world.phase("removing older checkpoints"):
        if world.rank == 0:
            prune(path, 1)


def save_adapters(model: torch.nn.Module, path: Path) -> None:
    zerostart.save(model, path, adapters_only=True)


def export_from(model: torch.nn.Module, path: Path) -> None:
    assert isinstance(model, Source)
    dtype = torch.bfloat16 if model.number.item() else None
    convert(model.checkpoint, path, dtype=dtype, max_shard_size="8KB", replace=True)


def newest(path: Path) -> Path:
    """The last complete checkpoint at ``path``, all of which are as they were saved."""
    found = list_complete(path) or [path]
    for place in found:
        zerostart.verify(place)
    return found[-1]


def digests(path: Path) -> dict[str, str]:
    """Of the model and its optimizer; the states of random numbers are another process's each time."""
    folders = next(iter(documents(newest(path))), {}).get("digests", {})
    found = {f"{folder}/{name}": one for folder, of in folders.items() for name, one in of.items()}
    return {name: one for name, one in found.items() if name.startswith(("./", "model/", "state/optimizer/"))}


#: Kinds of saves: what is saved from a model to a place.
SAVES: dict[str, Callable[[torch.nn.Module, Path], None]] = {
    "model": save,
    "state": save_state,
    "background": save_in_the_background,
    "kept": save_and_prune,
    "adapters": save_adapters,
    "export": export_from,
}
#: Kinds, how many ranks save, and which of them meets its end; an export is one process's.
CASES = [
    (kind, size, rank)
    for kind in SAVES
    for size, rank in ((1, 0), (2, 0), (2, 1))
    if size == 1 or kind != "export"
]


#: Run with few points in `make test`.
FEW = ("state", 2, 1, 2)
ALL = [pytest.param(*case, 0, marks=pytest.mark.slow) for case in CASES]


def saved_twice(kind: str, checkpoint: Path, path: Path, rank: int, log: Path, point: Point | None) -> None:
    """Save a model, change it, and save it once more, of which ``point`` of ``rank`` sees the end."""
    model = loaded(checkpoint, kind)
    SAVES[kind](model, path)
    change(model)
    if current_world().rank != rank:
        SAVES[kind](model, path)
        return
    with traced(log, point):
        SAVES[kind](model, path)


@pytest.fixture
def tiny(checkpoints: TinyCheckpoints) -> Path:
    return checkpoints("qwen3", torch.float32)


@pytest.mark.parametrize(("kind", "size", "rank", "few"), [FEW, *ALL])
def test_killed_anywhere(
    size: int,
    rank: int,
    kind: str,
    few: int,
    tiny: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path, log = tmp_path / "out" / "saved", tmp_path / "log"
    path.parent.mkdir()
    run_ranks(saved_twice, size, kind, tiny, path, -1, log, None)
    after = digests(path)
    run_ranks(saved_twice, size, kind, tiny, path, rank, log, None)
    points = points_in(log, path.parent)[::EVERY]
    points = points[:: len(points) // few] if few else points
    killed = 0
    before = None
    for point in points:
        outcomes = rank_outcomes(saved_twice, size, kind, tiny, path, rank, log, point, grace=60)
        if outcomes[rank].exit_code == -9:
            killed += 1
        else:
            assert outcomes[rank].ok, (point, outcomes[rank].describe())
        for outcome in outcomes:
            assert outcome.rank == rank or outcome.ok or "PeerError" in outcome.error, outcome.describe()
        found = digests(path)
        if found != after:
            before = before or found
            assert found == before, f"neither of the two at {point}"
    assert few or before is not None
    assert killed >= len(points) * 3 // 4
    run_ranks(saved_twice, size, kind, tiny, path, -1, log, None)
    assert digests(path) == after
    assert [entry.name for entry in path.parent.iterdir()] == ["saved"]
    assert kind != "kept" or [path / entry.name for entry in path.iterdir()] == list_complete(path)[-1:]
    with capsys.disabled():
        print(f" rank {rank} of {size}: killed at {killed} of {len(points)} points", end="")
