"""Versions by a directory: workers that come when they like, files that are torn, and trainers that end."""

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zerostart
from tests.ranks import run_ranks
from tests.state.refitting import workers
from tests.state.refitting.test_refit import _change
from tests.tiny import TINY, TinyCheckpoints
from zerostart import serving
from zerostart.errors import ConfigError, PeerError, ReadError
from zerostart.state.refitting import directory, follower
from zerostart.state.refitting.follower import Follower

BF16 = torch.bfloat16
SIZE = (96, 1024)


class _Columns:
    """A worker that has the second half of the columns of a linear layer, turned round."""

    def __init__(self, path: Path, name: str) -> None:
        self.engine = nn.Linear(SIZE[0], SIZE[1] // 2, bias=False)

        def load(pairs: Any) -> None:
            for key, tensor in pairs:
                if key == "weight":
                    self.engine.weight.data.copy_(tensor.narrow(1, SIZE[1] // 2, SIZE[1] // 2).t())

        self.receiver = serving.Receiver(self.engine, load, name=name)
        self.follower = Follower(self.receiver, path, 5)

    def has(self, model: nn.Module) -> bool:
        weight = model.weight.detach().to_local()  # type: ignore[operator, union-attr]
        return torch.equal(self.engine.weight.detach().t(), weight[:, SIZE[1] // 2 :])


class _Whole(_Columns):
    """One that has all of it as it is."""

    def __init__(self, path: Path, name: str) -> None:
        self.engine = nn.Linear(SIZE[1], SIZE[0])
        load = lambda pairs: self.engine.load_state_dict(dict(pairs))  # noqa: E731
        self.receiver = serving.Receiver(self.engine, load, name=name)
        self.follower = Follower(self.receiver, path, 5)

    def has(self, model: nn.Module) -> bool:
        return torch.equal(self.engine.weight.detach(), model.weight.detach().to_local())  # type: ignore[operator, union-attr]


def _model() -> nn.Module:
    weights = {"weight": torch.rand(SIZE), "bias": torch.rand(SIZE[0])}
    return zerostart.load(weights, lambda: nn.Linear(SIZE[1], SIZE[0]), engine="fsdp2", progress=False)


def _step(model: nn.Module, share: float = 0.02) -> None:
    weight = model.weight.detach().to_local()  # type: ignore[operator, union-attr]
    weight[torch.rand(SIZE) < share] += 1


def test_workers_follow_at_their_own_pace(tmp_path: Path) -> None:
    path = tmp_path / "with a space"
    model = _model()
    with zerostart.refit(model, path.as_uri(), full_every=3) as refitter:
        first = refitter.push()
        assert (first.base, first.workers, first.transport) == (None, (), "file")
        assert first.owned_bytes <= first.moved_bytes <= first.owned_bytes * 1.02
        steady, slow = _Columns(path, "steady"), _Whole(path, "slow")
        assert steady.follower.follow() == slow.follower.follow() == 1
        assert steady.has(model)
        assert slow.has(model)
        assert not steady.follower.pending()
        with pytest.raises(PeerError, match="no further version"):
            steady.follower.follow(0.0)
        _step(model)
        second = refitter.push()
        assert second.base == 1
        # A changed element of fp32 has two units at most, of three bytes each.
        assert 0 < second.moved_bytes < 0.09 * first.moved_bytes
        assert {worker.name: worker.version for worker in second.workers} == {"steady": 1, "slow": 1}
        assert steady.follower.follow() == 2
        assert steady.has(model)
        _step(model)
        refitter.push()
        # From the version of all bytes, and what has changed since.
        late = _Whole(path, "late/../er")
        assert late.follower.follow() == 3
        assert late.has(model)
        for version in range(4, 8):
            _step(model)
            assert refitter.push().base == (None if version in (4, 7) else version - 1)
            if version == 5:
                assert steady.follower.follow() == 5
                assert steady.has(model)
        # The chains that end with the versions 6 and 7 are kept, and nothing of those before.
        stems = {file.name[:8] for file in path.iterdir() if file.name[0] == "0"}
        assert stems == {f"{version:08d}" for version in (4, 5, 6, 7)}
        # One whose versions are gone starts with what is there.
        assert slow.follower.follow() == steady.follower.follow() == 7
        assert slow.has(model)
        assert steady.has(model)
    with pytest.raises(serving.Closed):
        steady.follower.follow()
    slow.follower.close()
    # Another trainer goes on, and all of it is sent; the one before cannot any more.
    again = zerostart.refit(model, path.as_uri(), full_every=3)
    other = zerostart.refit(model, path.as_uri())
    _step(model)
    assert again.push().base is None
    assert steady.follower.follow() == 8
    assert steady.has(model)
    with pytest.raises(ConfigError, match="only one can write"):
        other.push()
    assert not steady.follower.pending()
    # Nor does it end what the other one writes, or make anew what somebody has emptied.
    other.close()
    assert not steady.follower.pending()
    _step(model)
    assert again.push().base == 8
    assert steady.follower.follow() == 9
    assert steady.has(model)
    (path / directory.DOCUMENT).unlink()
    again.close()
    assert not (path / directory.DOCUMENT).exists()


@pytest.mark.parametrize("victim", ["list", "messages"])
def test_a_torn_version_is_not_served(victim: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = _model()
    with zerostart.refit(model, tmp_path.as_uri(), full_every=3) as refitter:
        refitter.push()
        worker = _Columns(tmp_path, "worker")
        worker.follower.follow()
        before = worker.engine.weight.detach().clone()
        _step(model)
        refitter.push()
        (file,) = tmp_path.glob(f"00000002*.{victim}")
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 0x55
        file.write_bytes(data)
        with pytest.raises(zerostart.ZerostartError, match=file.name):
            worker.follower.follow()
        assert torch.equal(worker.engine.weight.detach(), before)
        assert worker.receiver.version == 1
        assert not worker.follower.pending()
        file.unlink()
        late = _Columns(tmp_path, "late")
        monkeypatch.setattr(follower, "LOOKS", 0.3)
        with pytest.raises(ReadError, match="is missing"):
            late.follower.follow()
        # A write that ended half way is no version, and goes with the next.
        left = tmp_path / "00000003-0123abcd-00000.messages"
        left.touch()
        refitter._whole = False
        assert refitter.push().base is None
        assert not left.exists()
        assert worker.follower.follow() == late.follower.follow() == 3
        assert worker.has(model)
        assert late.has(model)


def test_a_byte_beside_one_that_nobody_wants(tmp_path: Path) -> None:
    """Changes travel by two bytes, of which a worker may want the second alone."""
    model, engine = nn.Module(), nn.Module()
    model.register_buffer("codes", torch.zeros(100, 64, dtype=torch.int8))
    engine.register_buffer("codes", torch.zeros(100, 63, dtype=torch.int8))
    load = lambda pairs: engine.codes.copy_(dict(pairs)["codes"][:, 1:])  # noqa: E731
    with zerostart.refit(model, tmp_path.as_uri(), full_every=9) as refitter:
        refitter.push()
        follower = Follower(serving.Receiver(engine, load, name="odd"), tmp_path, 5)
        follower.follow()
        model.codes[7, 1], model.codes[8, 2], model.codes[9, 0] = 1, 2, 3
        assert refitter.push().base == 1
        assert follower.follow() == 2
    assert torch.equal(engine.codes, model.codes[:, 1:])


def test_what_is_wrong_in_the_directory_ends_no_trainer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "versions"
    model = _model()
    refitter = zerostart.refit(model, path.as_uri(), full_every=9)
    refitter.push()
    worker = _Whole(path, "worker " + "\u5de5" * 80)
    assert worker.follower.follow() == 1
    # The version is there, and the push has failed at what comes after: the next one goes on from it.
    with monkeypatch.context() as patched:
        patched.setattr(directory, "sync_directory", _failing)
        _step(model)
        with pytest.raises(zerostart.ZerostartError, match="Input/output"):
            refitter.push()
    assert worker.follower.follow() == 2
    assert worker.has(model)
    _step(model)
    report = refitter.push()
    assert (report.version, report.base) == (3, None)
    assert [each.version for each in report.workers] == [2]
    # What nobody can read, or remove, is passed over.
    for number, given in enumerate(("null", "NaN", "1e999", "9" * 400)):
        said = f'{{"name": "x", "version": 1, "wanted_bytes": 1, "seconds": {given}}}'
        (path / "followers" / f"junk{number}.json").write_text(said)
    (path / "00000001-0123abcd.list").mkdir()
    (path / ".00000001-0123abcd.part").touch()
    report = refitter.push()
    assert (report.version, report.base, len(report.workers)) == (4, 3, 1)
    assert not (path / ".00000001-0123abcd.part").exists()
    # So is a document of another zerostart: what is served goes on being served.
    document = (path / directory.DOCUMENT).read_bytes()
    (path / directory.DOCUMENT).write_text('{"format": 99}')
    assert not worker.follower.pending()
    with pytest.raises(PeerError, match="no document of a refit of this zerostart"):
        Follower(worker.receiver, path, 0.0)
    (path / directory.DOCUMENT).write_bytes(document)
    assert worker.follower.follow() == 4
    # One that has not looked for long is gone.
    (said,) = (path / "followers").glob("worker*.json")
    long_ago = said.stat().st_mtime - 2 * directory.AWAY
    os.utime(said, (long_ago, long_ago))
    assert (refitter.push().workers, said.exists()) == ((), False)
    # What differs from files that are gone is of no use.
    next(path.glob("00000005*.messages")).unlink()
    _step(model)
    assert refitter.push().base is None
    assert worker.follower.follow() == 6
    assert worker.has(model)
    (path / directory.DOCUMENT).unlink()
    report = refitter.push()
    assert (report.version, report.base) == (7, None)
    with directory.alone(path):
        for _ in range(2):
            with pytest.raises(ConfigError, match="another trainer writes"):
                refitter.push()
    # What a push has left that failed in the end takes no room from those after it.
    assert len([*path.glob("00000008*.messages")]) == 1
    assert refitter.push().base is None
    assert worker.follower.follow() == 8
    assert worker.has(model)
    # A file system that is away for a moment is waited for: this may be the last version.
    _step(model)
    refitter.push()
    away = iter([OSError(errno.ESTALE, "Stale file handle"), FileNotFoundError()])

    def late(*given: Any) -> Any:
        if error := next(away, None):
            raise error
        return directory.read_messages(*given)

    monkeypatch.setattr(follower, "read_messages", late)
    assert worker.follower.follow() == 9
    assert worker.has(model)


def _failing(*arguments: Any) -> None:
    raise OSError(errno.EIO, "Input/output error")


def _publish(path: Path, out: Path) -> list[int | None]:
    """On one rank: a version of all bytes and one of what has changed; the model is saved beside the last."""
    model = zerostart.load(path, progress=False, engine="deepspeed", zero_stage=3)
    with zerostart.refit(model, (out / "versions").as_uri(), full_every=2) as refitter:
        bases = [refitter.push().base]
        _change(model, -0.5)
        bases.append(refitter.push(wait=False).wait().base)
        zerostart.save(model, out / "saved")
    return bases


@pytest.mark.slow
def test_two_ranks_write_what_two_workers_load(checkpoints: TinyCheckpoints, tmp_path: Path) -> None:
    config = dict(TINY["qwen3_even"][1])
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert run_ranks(_publish, 2, checkpoints("qwen3_even", BF16), tmp_path, timeout=120) == [[None, 1]] * 2
    address = (tmp_path / "versions").as_uri()
    started = [workers.start(tmp_path / "config.json", rank, 2, address, tmp_path) for rank in range(2)]
    try:
        printed = [worker.communicate(timeout=60)[0] for worker in started]
    finally:
        for worker in started:
            worker.kill()
    assert all("served 2" in text for text in printed), printed
    for rank in range(2):
        expected = workers.loaded(config, rank, 2, tmp_path / "saved", BF16)
        found = torch.load(tmp_path / f"tp{rank}-2.pt")
        assert [name for name in found if not torch.equal(found[name], expected[name])] == []


def test_a_directory_goes_with_no_other_transport(tmp_path: Path) -> None:
    for target, transport in ((tmp_path.as_uri(), "group"), (None, "file")):
        with pytest.raises(ConfigError, match="does not go with"):
            zerostart.refit(nn.Linear(2, 2), target, transport=transport)
    with pytest.raises(ConfigError, match="no directory"):
        zerostart.refit(nn.Linear(2, 2), "file:somewhere")
