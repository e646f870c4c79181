"""Push weights from trainer ranks into worker processes, and compare with their load of a save."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zerostart
from tests.ranks import _context, run_ranks
from tests.refit import workers
from tests.tiny import TINY, TinyCheckpoints
from zerostart.refit.receiver import Receiver

BF16 = torch.bfloat16


def _change(model: torch.nn.Module, by: float) -> None:
    """Scale the shards of all parameters."""
    for parameter in model.parameters():
        shard = getattr(parameter, "ds_tensor", None)
        local = shard if shard is not None else getattr(parameter.data, "_local_tensor", parameter.data)
        local.data.mul_(by)


def _train(path: Path, out: Path, address: str, options: dict[str, Any]) -> list[str]:
    """Push twice on one rank, and save the model each time."""
    model = zerostart.load(path, progress=False, **options)
    reports = []
    with zerostart.refit(model, address, workers=2, timeout=60) as refitter:
        for version in (1, 2):
            _change(model, 1.0 if version == 1 else -0.5)
            report = refitter.push()
            assert report.version == version
            # The image is written once.
            assert report.moved_bytes == report.owned_bytes
            zerostart.save(model, out / f"saved-{version}")
            reports.append(str(report))
    return reports


@pytest.mark.parametrize(
    "options",
    [
        {"engine": "fsdp2"},
        pytest.param({"engine": "deepspeed", "zero_stage": 3}, marks=pytest.mark.slow),
    ],
    ids=["fsdp2", "zero3"],
)
def test_workers_have_what_their_own_load_of_a_save_gives(
    checkpoints: TinyCheckpoints, tmp_path: Path, options: dict[str, Any]
) -> None:
    path = checkpoints("qwen3_even", BF16)
    config = dict(TINY["qwen3_even"][1])
    (tmp_path / "config.json").write_text(json.dumps(config))
    address = f"unix://{tmp_path}/workers"
    started = [workers.start(tmp_path / "config.json", rank, 2, address, tmp_path) for rank in range(2)]
    try:
        reports = run_ranks(_train, 2, path, tmp_path, address, options, timeout=120)
        printed = [worker.communicate(timeout=60)[0] for worker in started]
    finally:
        for worker in started:
            worker.kill()
    assert all("served 2" in text for text in printed), printed
    assert reports[0] == reports[1]
    for version in (1, 2):
        for rank in range(2):
            expected = workers.loaded(config, rank, 2, tmp_path / f"saved-{version}", BF16)
            actual = torch.load(tmp_path / f"tp{rank}-{version}.pt")
            assert actual.keys() == expected.keys()
            wrong = [name for name in actual if not torch.equal(actual[name], expected[name])]
            assert wrong == []


#: Elements of bf16: 300 MiB.
WIDE = (12800, 12288)


def _wide(name: str) -> tuple[nn.Module, Receiver]:
    """Create a worker with one large, transposed matrix whose halves are swapped."""
    half = WIDE[0] // 2
    engine = nn.Module()
    engine.weight = nn.Parameter(torch.zeros(WIDE[1], WIDE[0], dtype=BF16), requires_grad=False)

    def load(weights: Any) -> None:
        for _, tensor in weights:
            engine.weight.data[:, :half].copy_(tensor[half:].t())  # type: ignore[operator, union-attr]
            engine.weight.data[:, half:].copy_(tensor[:half].t())  # type: ignore[operator, union-attr]

    return engine, Receiver(engine, load, name=name)


def _follow_wide(address: str, out: Path) -> None:
    from zerostart.refit.connection import Connection
    from zerostart.transfer.meter import PeakMeter

    with Connection(_wide("wide")[1], address) as connection:
        peaks = []
        for _ in range(2):
            with PeakMeter(torch.device("cpu")) as meter:
                connection.follow()
            peaks.append(meter.host_bytes)
        (out / "peak").write_text(str(max(peaks)))


def _push_wide(address: str) -> int:
    model = zerostart.load(
        None, lambda: nn.Linear(WIDE[1], WIDE[0], bias=False, dtype=BF16), engine="fsdp2", progress=False
    )
    with zerostart.refit(model, address, dtype=BF16) as refitter:
        first = refitter.push()
        second = refitter.push()
        assert first.moved_bytes == first.owned_bytes
        return max(first.peak_host_bytes, second.peak_host_bytes)


@pytest.mark.slow
def test_a_push_takes_at_most_256_mib_beside_the_weights(tmp_path: Path) -> None:
    address = f"unix://{tmp_path}/workers"
    worker = _context().Process(target=_follow_wide, args=(address, tmp_path), daemon=True)
    worker.start()
    try:
        (peak,) = run_ranks(_push_wide, 1, address, timeout=120)
        worker.join(60)
    finally:
        worker.kill()
    assert 0 < peak < 256 << 20
    assert 0 < int((tmp_path / "peak").read_text()) < 256 << 20


@pytest.mark.parametrize("target", ["tcp://127.0.0.1:0", "file:///tmp/versions"])
def test_no_port_is_opened_and_no_directory_written(target: str) -> None:
    with pytest.raises(
        zerostart.errors.ConfigError, match=r"no address of a refit: pass unix:///.*weight_source"
    ):
        zerostart.refit(nn.Linear(2, 2), target)
