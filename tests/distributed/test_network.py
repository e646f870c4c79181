"""What the network or a limit of this host stands in the way of, with its remedy; one time-out for all."""

from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from zerostart.distributed.failures import explain
from zerostart.distributed.world import current_world


@pytest.fixture
def group() -> Iterator[None]:
    """A group of one, with a time-out of its own."""
    if dist.is_initialized():
        dist.destroy_process_group()
    limit = timedelta(seconds=77)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=limit)
    yield
    dist.destroy_process_group()


def test_groups_made_in_a_load_have_the_time_out_of_the_default_one(group: None) -> None:
    with current_world().collectives("making a group"):
        made = dist.new_group([0])
    assert made._get_backend(torch.device("cpu")).options._timeout == timedelta(seconds=77)


def test_what_stands_in_the_way_is_told_with_its_remedy(group: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nowhere7")
    with pytest.raises(RuntimeError) as caught:
        dist.new_group(backend="gloo")
    assert "set GLOO_SOCKET_IFNAME" in explain(caught.value)
    assert "ulimit -n" in explain(RuntimeError("socket: Too many open files"))
    assert explain(RuntimeError("out of memory")) == ""
