"""Ranks on an accelerator of another kind: found by torch's own functions, whatever its name."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.npu_ranks import npu_environment

SIMULATED = Path(__file__).parents[1] / "simulated"


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
