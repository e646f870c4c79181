"""One rank reads the headers for all ranks."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import zerostart
from tests.ranks import rank_outcomes, run_ranks
from zerostart.checkpoint.storage.local import SAMPLED_FILES
from zerostart.distributed.world import current_world
from zerostart.loading.source import open_source

FILES = 24


@pytest.fixture(scope="module")
def layer_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with one file per layer."""
    path = tmp_path_factory.mktemp("layers")
    weight_map = {}
    for number in range(FILES):
        name, key = f"model-{number + 1:05d}-of-{FILES:05d}.safetensors", f"layers.{number}.weight"
        save_file({key: torch.full((64, 64), float(number))}, path / name)
        weight_map[key] = name
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return path


@pytest.mark.slow
def test_headers_are_read_by_one_rank(layer_files: Path) -> None:
    results = run_ranks(open_and_list, 3, layer_files)
    assert [len(files) for files, _ in results] == [FILES, 0, 0]
    assert len({names for _, names in results}) == 1
    assert len(results[0][1]) == FILES


def open_and_list(path: Path) -> tuple[set[str], tuple[str, ...]]:
    opened = record_opened_files()
    catalog = open_source(path, current_world())
    return set(opened), tuple(catalog.tensors)


def record_opened_files() -> list[str]:
    """Return a list of the weight files opened later."""
    opened: list[str] = []

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and str(arguments[0]).endswith(".safetensors"):
            opened.append(str(arguments[0]))

    sys.addaudithook(hook)
    return opened


@pytest.mark.slow
def test_each_rank_opens_only_files_that_it_needs(layer_files: Path) -> None:
    """Others are only sampled for the page cache."""
    opened = run_ranks(load_one_layer, 2, layer_files)
    assert opened[0] == FILES
    assert opened[1] <= SAMPLED_FILES + 1


def load_one_layer(path: Path) -> int:
    opened = record_opened_files()
    model = nn.Module()
    model.layers = nn.ModuleList([nn.Linear(64, 64, bias=False, device="meta")])
    zerostart.load(path, model, engine="fsdp2", strict=False, progress=False)
    return len(set(opened))


def test_error_of_the_reading_rank_is_raised_on_all(layer_files: Path, tmp_path: Path) -> None:
    broken = tmp_path / "model.safetensors"
    broken.write_bytes(b"\xff" * 100)
    outcomes = rank_outcomes(open_and_list, 3, broken)
    assert {outcome.error for outcome in outcomes} == {"zerostart.errors.CheckpointError"}
    assert len({outcome.message for outcome in outcomes}) == 1
    assert "model.safetensors" in outcomes[0].message
    assert max(outcome.seconds for outcome in outcomes) < 30
