"""Fixtures that all tests share."""

from __future__ import annotations

import os
import sys
from collections.abc import Generator, Iterator
from pathlib import Path

os.environ["DS_ACCELERATOR"] = "cpu"  # Read by DeepSpeed when it is first imported, here or in a child.
# What DeepSpeed compiles lies with the torch that it is compiled for.
os.environ["TORCH_EXTENSIONS_DIR"] = str(Path(sys.prefix, "torch_extensions"))
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest

from ranks import build_deepspeed_op, has_deepspeed_op, run_ranks, skip_where_unsupported
from tiny import TinyCheckpoints


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None, object, object]:
    """What DeepSpeed does not compute in on this machine is not tested on it."""
    try:
        return (yield)
    except ValueError as error:
        skip_where_unsupported(str(error))
        raise


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> TinyCheckpoints:
    """Tiny checkpoints, made once a session."""
    return TinyCheckpoints(tmp_path_factory.mktemp("checkpoints"))


@pytest.fixture(scope="session", autouse=True)
def deepspeed_op() -> None:
    """DeepSpeed's shared-memory operation, compiled once an environment, before any rank would do it.

    For every test: ranks that compile it side by side wait for each other, and one that is killed
    meanwhile leaves a lock that all later ones wait for.
    """
    if not has_deepspeed_op():
        run_ranks(build_deepspeed_op, 1, process_group=False, timeout=280)


@pytest.fixture(scope="module", autouse=True)
def no_group_stays() -> Iterator[None]:
    """A load in the tests' own process makes a process group of one; the next module starts without."""
    yield
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
