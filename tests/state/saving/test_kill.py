"""Kill saving ranks at each system call that changes a file.

``ZEROSTART_TEST_EVERY=n`` tests only each n-th call, because every call needs a run of its ranks.
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


#: Step between the tested system calls.
CALL_STEP = int(os.environ.get("ZEROSTART_TEST_EVERY", "1"))
OPTIMIZERS: weakref.WeakKeyDictionary[torch.nn.Module, torch.optim.Optimizer] = weakref.WeakKeyDictionary()


class ExportSource(torch.nn.Module):
    """A checkpoint to export; :func:`change` switches the export's dtype."""

    def __init__(self, checkpoint: Path) -> None:
        super().__init__()
        self.checkpoint = checkpoint
        self.number = torch.nn.Parameter(torch.zeros(()))


def load_model(checkpoint: Path, kind: str) -> torch.nn.Module:
    if kind == "export":
        return ExportSource(checkpoint)
    model = zerostart.load(checkpoint, engine="fsdp2", progress=False)
    if kind == "adapters":
        torch.manual_seed(1)
        adapted: torch.nn.Module = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
        return adapted
    OPTIMIZERS[model] = optimizer = torch.optim.AdamW(model.parameters())
    # Write the state of a step by hand: in a fresh process DTensor's sharding propagation makes a step slow.
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
    """Save the next step's checkpoint and delete the previous one."""
    world = current_world()
    with world.phase("looking for checkpoints"):
        checkpoints = list_complete(path)
    number = 1 + max((int(checkpoint.name.removeprefix("step-")) for checkpoint in checkpoints), default=0)
    save_state(model, path / f"step-{number}")
    with world.phase("removing older checkpoints"):
        if world.rank == 0:
            prune(path, 1)


def save_adapters(model: torch.nn.Module, path: Path) -> None:
    zerostart.save(model, path, adapters_only=True)


def export(model: torch.nn.Module, path: Path) -> None:
    assert isinstance(model, ExportSource)
    dtype = torch.bfloat16 if model.number.item() else None
    convert(model.checkpoint, path, dtype=dtype, max_shard_size="8KB", replace=True)


def newest(path: Path) -> Path:
    """Verify all complete checkpoints and return the last."""
    checkpoints = list_complete(path) or [path]
    for checkpoint in checkpoints:
        zerostart.verify(checkpoint)
    return checkpoints[-1]


def read_digests(path: Path) -> dict[str, str]:
    """Return digests of the model and its optimizer."""
    folders = next(iter(documents(newest(path))), {}).get("digests", {})
    digests = {f"{folder}/{n}": d for folder, tensors in folders.items() for n, d in tensors.items()}
    return {n: d for n, d in digests.items() if n.startswith(("./", "model/", "state/optimizer/"))}


#: Save functions by kind; each takes a model and a folder.
SAVES: dict[str, Callable[[torch.nn.Module, Path], None]] = {
    "model": save,
    "state": save_state,
    "background": save_in_the_background,
    "pruned": save_and_prune,
    "adapters": save_adapters,
    "export": export,
}
#: (Kind, number of ranks, killed rank); only one process exports.
CASES = [
    (kind, size, rank)
    for kind in SAVES
    for size, rank in ((1, 0), (2, 0), (2, 1))
    if size == 1 or kind != "export"
]


#: (Kind, number of ranks, killed rank, number of points) of the fast test.
FAST_CASE = ("state", 2, 1, 2)
SLOW_CASES = [pytest.param(*case, 0, marks=pytest.mark.slow) for case in CASES]


def save_twice(kind: str, checkpoint: Path, path: Path, rank: int, log: Path, point: Point | None) -> None:
    """Save, change and save again; kill ``rank`` at ``point``."""
    model = load_model(checkpoint, kind)
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


@pytest.mark.parametrize(("kind", "size", "rank", "max_points"), [FAST_CASE, *SLOW_CASES])
def test_kill_at_any_call_leaves_a_whole_save(
    size: int,
    rank: int,
    kind: str,
    max_points: int,
    tiny: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path, log = tmp_path / "out" / "saved", tmp_path / "log"
    path.parent.mkdir()
    run_ranks(save_twice, size, kind, tiny, path, -1, log, None)
    after = read_digests(path)
    run_ranks(save_twice, size, kind, tiny, path, rank, log, None)
    points = points_in(log, path.parent)[::CALL_STEP]
    points = points[:: len(points) // max_points] if max_points else points
    killed = 0
    before = None
    for point in points:
        outcomes = rank_outcomes(save_twice, size, kind, tiny, path, rank, log, point, grace=60)
        if outcomes[rank].exit_code == -9:
            killed += 1
        else:
            assert outcomes[rank].ok, (point, outcomes[rank].describe())
        for outcome in outcomes:
            assert outcome.rank == rank or outcome.ok or "PeerError" in outcome.error, outcome.describe()
        current = read_digests(path)
        if current != after:
            before = before or current
            assert current == before, f"neither the old nor the new checkpoint at {point}"
    assert max_points or before is not None
    assert killed >= len(points) * 3 // 4
    run_ranks(save_twice, size, kind, tiny, path, -1, log, None)
    assert read_digests(path) == after
    assert [entry.name for entry in path.parent.iterdir()] == ["saved"]
    assert kind != "pruned" or [path / entry.name for entry in path.iterdir()] == list_complete(path)[-1:]
    with capsys.disabled():
        print(f" rank {rank} of {size}: killed at {killed} of {len(points)} points", end="")
