"""Weights from real trainer ranks into real worker processes: as the engine's own load of what ``save`` "
"writes."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import zerostart
from tests.ranks import run_ranks
from tests.state.refitting import workers
from tests.tiny import TINY, TinyCheckpoints

BF16 = torch.bfloat16


def _change(model: torch.nn.Module, by: float) -> None:
    """Another value for each element, on the shards; engines' own copies are none of the parameters."""
    for parameter in model.parameters():
        held = getattr(parameter, "ds_tensor", None)
        local = held if held is not None else getattr(parameter.data, "_local_tensor", parameter.data)
        local.data.mul_(by)


def _train(path: Path, out: Path, address: str, options: dict[str, Any]) -> list[str]:
    """On one rank: two pushes, the model saved beside each."""
    transport = options.pop("transport", None)
    model = zerostart.load(path, progress=False, **options)
    reports = []
    with zerostart.refit(model, address, workers=2, timeout=60, transport=transport) as refitter:
        for version in (1, 2):
            _change(model, 1.0 if version == 1 else -0.5)
            report = refitter.push()
            assert report.version == version
            # An image in memory is written once, a message goes to each worker that wants it.
            assert report.moved_bytes == (report.wanted_bytes if transport else report.owned_bytes)
            zerostart.save(model, out / f"saved-{version}")
            reports.append(str(report))
            assert report.peak_host_bytes < 256 << 20
    return reports


@pytest.mark.parametrize(
    "options",
    [
        {"engine": "fsdp2"},
        {"engine": "deepspeed", "zero_stage": 3},
        {"engine": "fsdp2", "transport": "group"},
    ],
    ids=["fsdp2", "zero3", "group"],
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
            found = torch.load(tmp_path / f"tp{rank}-{version}.pt")
            assert found.keys() == expected.keys()
            wrong = [name for name in found if not torch.equal(found[name], expected[name])]
            assert wrong == []
