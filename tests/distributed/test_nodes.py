"""Several nodes and one store: each byte comes from there once, and no node waits for a slow one."""

import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import zerostart
from tests.distributed import nodes
from tests.distributed.node_rank import network

KiB = 1 << 10
#: Bits a second of a node from the store, and of one that is ten times slower.
USUAL, SLOW = "40mbit", "4mbit"


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stored")
    torch.manual_seed(5)
    save_file(network().state_dict(), folder / "model.safetensors")
    return folder


def loaded(
    made: nodes.Nodes, stored: Path, ranks: int = 1, seconds: float = 120, **options: Any
) -> tuple[list[dict[str, Any]], int]:
    """What the ranks tell of a load, and the bytes that the store gave."""
    settings = {"url": f"{nodes.URL}/model.safetensors", "chunk_size": 64 * KiB, **options}
    with made.served(stored) as sent:
        told = made.ended(made.start("fsdp2", ranks, settings, seconds))
    assert all("digest" in one for one in told), told
    assert all(one["digest"] == told[0]["digest"] for one in told)
    return told, sum(sent.values())


def whole_digest(stored: Path) -> dict[str, str]:
    """Of the weights in an unsharded model."""
    model = network()
    model.load_state_dict(load_file(stored / "model.safetensors"))
    return zerostart.digest(model)


def whole(stored: Path) -> int:
    """Bytes of the tensors."""
    return sum(tensor.nbytes for tensor in load_file(stored / "model.safetensors").values())


@pytest.mark.slow
@pytest.mark.parametrize(("count", "ranks"), [(2, 2), (4, 1), (8, 1)])
def test_the_store_gives_the_checkpoint_once(count: int, ranks: int, stored: Path, tmp_path: Path) -> None:
    """Of shards that differ, and where every rank wants everything."""
    expected = whole_digest(stored)
    world = count * ranks
    with nodes.made(count, tmp_path) as made:
        for options in ({}, {"engine_config": {"replicate": world}, "exchange": True}):
            told, given = loaded(made, stored, ranks, **options)
            assert told[0]["digest"] == expected
            # The rest is the header, and what rank 0 looks at.
            assert whole(stored) <= given < 1.01 * whole(stored) + 100 * KiB
            assert sum(one["read"] for one in told) == pytest.approx(whole(stored), rel=0.01)
            assert all(one["read"] == one["planned"] for one in told)
            got = sum(one["got"] for one in told)
            assert got == pytest.approx((world - 1) * whole(stored) if options else 0, rel=0.02)


@pytest.mark.slow
def test_a_load_that_gets_on_is_cut_by_no_time_out(stored: Path, tmp_path: Path) -> None:
    """One node takes three times the time-out of the process group."""
    with nodes.made(2, tmp_path) as made:
        made.limit(1, "16mbit")
        told, _ = loaded(made, stored, seconds=5, exchange=False)
        assert told[0]["seconds"] > 12


def begun(made: nodes.Nodes, seconds: float, folder: Path) -> list[subprocess.Popen[str]]:
    """A load by two nodes that takes some 15 s, a few seconds after it has begun."""
    for node in range(2):
        made.limit(node, "16mbit")
    settings = {"url": f"{nodes.URL}/model.safetensors", "chunk_size": 64 * KiB, "ready": str(folder)}
    started = made.start("fsdp2", 1, settings, seconds)
    until = time.monotonic() + 60
    while len(list(folder.glob("ready*"))) < 2 and time.monotonic() < until:
        time.sleep(0.1)
    time.sleep(4)
    return started


@pytest.mark.slow
def test_a_cut_between_nodes_that_passes(stored: Path, tmp_path: Path) -> None:
    """20 s, in a load whose process group waits for 60."""
    with nodes.made(2, tmp_path) as made, made.served(stored):
        started = begun(made, 60, tmp_path)
        made.fabric(1, "down")
        time.sleep(20)
        made.fabric(1, "up")
        told = made.ended(started)
        assert all("digest" in one for one in told), told
        assert told[0]["digest"] == whole_digest(stored)


@pytest.mark.slow
def test_a_node_that_stays_cut_off_and_one_that_dies(stored: Path, tmp_path: Path) -> None:
    (tmp_path / "cut").mkdir()
    (tmp_path / "dies").mkdir()
    with nodes.made(2, tmp_path) as made, made.served(stored):
        started = begun(made, 8, tmp_path / "cut")
        made.fabric(1, "down")
        for one in made.ended(started):
            assert one.get("error") == "PeerError", one
            assert one["seconds"] < 60
        made.fabric(1, "up")
        started = begun(made, 60, tmp_path / "dies")
        started[1].kill()
        first = made.ended(started)[0]
        assert first.get("error") == "PeerError", first
        assert "rank 1" in first["text"]
        assert first["seconds"] < 30
