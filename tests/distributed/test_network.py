"""What the network or a limit of this host stands in the way of, with its remedy; one time-out for all."""

import logging
import resource
import socket
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from zerostart.distributed.network import explained, network_rate, tell_file_limit, unreachable
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


def test_an_interface_that_is_not_there_is_named(group: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nowhere7")
    with pytest.raises(RuntimeError) as caught:
        dist.new_group(backend="gloo")
    told = explained(caught.value)
    # Told to the others as well, who would wait for this rank's group.
    assert unreachable().endswith(told.strip(" ."))
    assert "GLOO_SOCKET_IFNAME=nowhere7 names no interface with an address; this host has " in told
    assert all(name in told for _, name in socket.if_nameindex())


def test_a_name_that_leads_to_this_host_alone_is_told_with_the_interface(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setattr(socket, "gethostname", lambda: "localhost")
    assert "the name of localhost resolves to" in unreachable()
    assert "set GLOO_SOCKET_IFNAME=lo (127.0.0.1 on this host, the way to MASTER_ADDR)" in unreachable()
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert unreachable() == ""


def test_a_limit_of_files_that_is_too_low_is_told_with_its_name(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 4096))
    with caplog.at_level(logging.WARNING, "zerostart"):
        tell_file_limit(64)
        assert caplog.text == ""
        tell_file_limit(1024)
    assert "may open 1024 files (RLIMIT_NOFILE)" in caplog.text
    assert "(RLIMIT_NOFILE): raise it" in explained(RuntimeError("socket: Too many open files"))


def test_the_rate_of_an_interface_is_what_its_driver_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "sys/class/net/eth7"
    folder.mkdir(parents=True)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7,eth8")
    assert network_rate(tmp_path) is None
    for told, rate in (("25000", 3.125e9), ("-1", None), ("", None)):
        (folder / "speed").write_text(f"{told}\n")
        assert network_rate(tmp_path) == rate
