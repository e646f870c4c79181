"""Ranks that read from a store meet while they read: what becomes of one that stops, dies or has nothing."""

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn

import zerostart
from tests.ranks import Outcome, rank_outcomes, run_ranks
from tests.stores import proxy, servers
from zerostart.distributed.world import current_world
from zerostart.transfer import collective

KiB = 1 << 10
WIDTH, LAYERS = 512, 12


def network() -> nn.Module:
    """12.6 MB in fp32."""
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stored")
    torch.manual_seed(11)
    save_file(network().state_dict(), folder / "model.safetensors")
    save_file({"weight": torch.arange(6.0).view(2, 3)}, folder / "small.safetensors")
    return folder


@pytest.fixture(scope="module")
def slow_line(stored: Path) -> Iterator[str]:
    """The address of the folder behind a line of 2.5 MB a second: a load takes 5 s."""
    with servers.rclone(stored, "webdav") as address, proxy.before(proxy.Proxy(address, 0.01, 2.5e6)) as line:
        yield line.address


@pytest.fixture(scope="module")
def fast_line(stored: Path) -> Iterator[str]:
    with servers.rclone(stored, "webdav") as address:
        yield address


def read(url: str, victim: int, shell: str) -> None:
    """Load, and let rank ``victim`` run ``shell`` with its ``$PID`` when it begins to read."""
    world = current_world()
    beside: list[subprocess.Popen[bytes]] = []
    original = collective.execute

    def own(*arguments: Any, **options: Any) -> Any:
        if world.rank == victim and not beside:
            beside.append(subprocess.Popen(["sh", "-c", shell], env={**os.environ, "PID": str(os.getpid())}))
        return original(*arguments, **options)

    collective.execute = own
    try:
        zerostart.load(
            f"{url}/model.safetensors", network, engine="fsdp2", chunk_size=64 * KiB, progress=False
        )
    finally:
        for process in beside:
            process.wait(timeout=60)


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_rank_that_dies_while_it_reads(victim: int, slow_line: str) -> None:
    outcomes = rank_outcomes(read, 3, slow_line, victim, "sleep 1; kill -KILL $PID")
    assert outcomes[victim].exit_code == -signal.SIGKILL
    others = [outcome for outcome in outcomes if outcome.rank != victim]
    assert {outcome.error for outcome in others} == {"zerostart.errors.PeerError"}, told(outcomes)
    assert all(f"rank {victim}" in outcome.message and outcome.seconds < 15 for outcome in others)


def told(outcomes: list[Outcome]) -> str:
    return "\n".join(outcome.describe() for outcome in outcomes)


@pytest.mark.slow
def test_ranks_with_nothing_to_read(fast_line: str, stored: Path) -> None:
    """Two rows on four ranks; and weights that one rank alone has in memory."""
    weight = load_file(stored / "small.safetensors")["weight"]
    for tensor, mapped, inferred in run_ranks(read_little, 4, fast_line, weight):
        assert torch.equal(tensor, weight)
        assert torch.equal(mapped, weight)
        assert torch.equal(inferred, weight)


def read_little(url: str, weight: torch.Tensor) -> list[torch.Tensor]:
    def load(source: Any) -> torch.Tensor:
        made = zerostart.load(source, lambda: nn.Linear(3, 2, bias=False), engine="fsdp2", progress=False)
        (found,) = dict(zerostart.full_tensors(made, rank=None)).values()
        assert found is not None
        return found.clone()

    mapped = load({"weight": weight} if dist.get_rank() == 2 else None)
    with torch.inference_mode():
        inferred = load(f"{url}/small.safetensors")
    return [load(f"{url}/small.safetensors"), mapped, inferred]
