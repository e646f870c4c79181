"""Explain network errors with a remedy, and give all groups the same timeout."""

from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from zerostart.distributed.failures import explain
from zerostart.distributed.world import current_world


@pytest.fixture
def group() -> Iterator[None]:
    """Process group of one rank with a timeout of 77 s."""
    if dist.is_initialized():
        dist.destroy_process_group()
    limit = timedelta(seconds=77)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=limit)
    yield
    dist.destroy_process_group()


def test_new_groups_have_the_default_groups_timeout(group: None) -> None:
    with current_world().collectives("making a group"):
        new_group = dist.new_group([0])
    assert new_group._get_backend(torch.device("cpu")).options._timeout == timedelta(seconds=77)


def test_network_errors_are_explained_with_a_remedy(group: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nowhere7")
    with pytest.raises(RuntimeError) as caught:
        dist.new_group(backend="gloo")
    assert "set GLOO_SOCKET_IFNAME" in explain(caught.value)
    assert "ulimit -n" in explain(RuntimeError("socket: Too many open files"))
    assert explain(RuntimeError("out of memory")) == ""
