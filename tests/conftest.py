"""Fixtures that all tests share."""

from __future__ import annotations

import os

os.environ["DS_ACCELERATOR"] = "cpu"  # Read by DeepSpeed when it is first imported, here or in a child.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest

from ranks import build_deepspeed_op, run_ranks
from tiny import TinyCheckpoints


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> TinyCheckpoints:
    """Tiny checkpoints, made once a session."""
    return TinyCheckpoints(tmp_path_factory.mktemp("checkpoints"))


@pytest.fixture(scope="session")
def deepspeed_op() -> None:
    """DeepSpeed's shared-memory operation, compiled (once a machine, half a minute) before ranks need it."""
    run_ranks(build_deepspeed_op, 1, process_group=False, timeout=280)
