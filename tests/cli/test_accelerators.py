"""Ranks on an accelerator of another kind: found by torch's own functions, whatever its name."""

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.npu_ranks import npu_environment

SIMULATED = Path(__file__).parents[1] / "simulated"
SCRIPT = SIMULATED / "another_accelerator.py"


@pytest.mark.slow
def test_a_rank_joins_on_an_accelerator_of_another_kind() -> None:
    """Its device by the local rank, its backend beside gloo, figures of its memory."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ranks["ZEROSTART_TEST_NPU_DEVICES"] = "2"
    done = subprocess.run(
        [sys.executable, str(SCRIPT)],
        env={**npu_environment(), **ranks},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["device"] == "npu:1"  # the fourth rank of a machine, on which two devices are seen
    assert found["current"] == 1
    assert found["backend"] == "cpu:gloo,npu:hccl"
    assert "torch knows no backend of torch.distributed for npu" in found["unknown"]
    assert (found["allocated"], found["peak"], found["free"]) == (0, 0, 16 << 30)
    assert found["streams"]


@pytest.mark.slow
def test_random_states_autocast_and_checkpointing_on_an_accelerator_of_another_kind() -> None:
    """Its generator is in the states of a rank, beside the host's; computed anew, dropout is the same."""
    done = subprocess.run(
        [sys.executable, str(SIMULATED / "on_npu.py")],
        env=npu_environment(),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == {
        "device": "npu:0",
        "rows": ["device", "numpy", "python", "torch"],
        "again": True,
        "host": True,
        "lower": "torch.bfloat16",
        "checkpointed": True,
        "offloaded": True,
    }
