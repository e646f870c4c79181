"""The catalog is made by one rank for all: who opens which files, and what becomes of an error."""

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
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file for each layer."""
    path = tmp_path_factory.mktemp("layers")
    listed = {}
    for number in range(FILES):
        name, key = f"model-{number + 1:05d}-of-{FILES:05d}.safetensors", f"layers.{number}.weight"
        save_file({key: torch.full((64, 64), float(number))}, path / name)
        listed[key] = name
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": listed}))
    return path


@pytest.mark.slow
def test_headers_are_read_by_one_rank(folder: Path) -> None:
    seen = run_ranks(open_only, 3, folder)
    assert [len(opened) for opened, _ in seen] == [FILES, 0, 0]
    assert len({names for _, names in seen}) == 1
    assert len(seen[0][1]) == FILES


def open_only(path: Path) -> tuple[set[str], tuple[str, ...]]:
    opened = listening()
    catalog = open_source(path, current_world())
    return set(opened), tuple(catalog.tensors)


def listening() -> list[str]:
    """Weight files that this process opens from now on."""
    opened: list[str] = []

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and str(arguments[0]).endswith(".safetensors"):
            opened.append(str(arguments[0]))

    sys.addaudithook(hook)
    return opened


@pytest.mark.slow
def test_a_rank_opens_only_files_with_bytes_of_its_own(folder: Path) -> None:
    """One layer's file, and those of which it looks up whether they are in the page cache."""
    opened = run_ranks(load_one_layer, 2, folder)
    assert opened[0] == FILES
    assert opened[1] <= SAMPLED_FILES + 1


def load_one_layer(path: Path) -> int:
    opened = listening()
    model = nn.Module()
    model.layers = nn.ModuleList([nn.Linear(64, 64, bias=False, device="meta")])
    zerostart.load(path, model, engine="fsdp2", strict=False, progress=False)
    return len(set(opened))


def test_an_error_of_the_one_is_raised_on_all(folder: Path, tmp_path: Path) -> None:
    broken = tmp_path / "model.safetensors"
    broken.write_bytes(b"\xff" * 100)
    outcomes = rank_outcomes(open_only, 3, broken)
    assert {outcome.error for outcome in outcomes} == {"zerostart.errors.CheckpointError"}
    assert len({outcome.message for outcome in outcomes}) == 1
    assert "model.safetensors" in outcomes[0].message
    assert max(outcome.seconds for outcome in outcomes) < 30
