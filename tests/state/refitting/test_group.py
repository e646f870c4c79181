"""Workers reached by a process group, of which one dies in the middle of a version."""

import json
import os
import signal
from pathlib import Path

import pytest
import torch

import zerostart
from tests.ranks import run_ranks
from tests.state.refitting import workers
from tests.state.refitting.test_refit import _change
from tests.tiny import TINY, TinyCheckpoints
from zerostart.errors import PeerError
from zerostart.state.refitting import messages
from zerostart.state.refitting.transports import group

BF16 = torch.bfloat16


def _push_while_one_dies(
    path: Path, out: Path, address: str, victim: int, message: int, full_every: int
) -> str:
    """On one rank: a push, one in which a worker is killed before a message, and another one."""
    model = zerostart.load(path, progress=False, engine="fsdp2")
    rank = torch.distributed.get_rank()
    options = {"timeout": 30, "transport": "group", "full_every": full_every}
    if message == 3:  # what is cut in the middle goes from where it lies to where it belongs
        messages.ALONE = 256
    with zerostart.refit(model, address, workers=2, **options) as refitter:
        refitter.push()
        _change(model, -0.5)
        transmit, sent = group._Parcel._transmit, 0

        def cut(parcel: group._Parcel, tensor: torch.Tensor) -> None:
            nonlocal sent
            sent += parcel.worker.name == "tp1"
            if rank == 0 and sent == message:
                os.kill(victim, signal.SIGKILL)
            transmit(parcel, tensor)

        group._Parcel._transmit = cut  # type: ignore[method-assign]
        try:
            with pytest.raises(PeerError) as raised:
                refitter.push()
        finally:
            group._Parcel._transmit = transmit  # type: ignore[method-assign]
        zerostart.save(model, out / "saved")
        report = refitter.push()
        assert [worker.name for worker in report.workers] == ["tp0"]
        assert report.base is None
        return str(raised.value)


@pytest.mark.slow
@pytest.mark.parametrize("full_every", [1, 9], ids=["full", "delta"])
@pytest.mark.parametrize("message", [1, 3, 4], ids=["first", "middle", "last"])
def test_a_worker_that_dies_leaves_the_others_on_a_whole_version(
    message: int, full_every: int, checkpoints: TinyCheckpoints, tmp_path: Path
) -> None:
    config = dict(TINY["qwen3_even"][1])
    (tmp_path / "config.json").write_text(json.dumps(config))
    address = f"unix://{tmp_path}/workers"
    started = [workers.start(tmp_path / "config.json", rank, 2, address, tmp_path) for rank in range(2)]
    arguments = (checkpoints("qwen3_even", BF16), tmp_path, address, started[1].pid, message, full_every)
    try:
        said = run_ranks(_push_while_one_dies, 2, *arguments, timeout=150)
        printed = started[0].communicate(timeout=60)[0]
    finally:
        for worker in started:
            worker.kill()
    assert said[0] == said[1]
    assert "tp1" in said[0]
    # The version that was torn is not served; the one before is said to be, and then the next one.
    assert "served 3" in printed, printed
    assert "tp0 serves version 1" in printed, printed
    assert not list(tmp_path.glob("tp*-2.pt"))
    expected = workers.loaded(config, 0, 2, tmp_path / "saved", BF16)
    found = torch.load(tmp_path / "tp0-3.pt")
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []
