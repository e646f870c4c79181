"""A mapping of tensors into a transformers model that the caller has built on meta."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

import zerostart
from tests.identity.snapshots import Snapshot, differences
from tests.ranks import run_ranks
from tests.tiny import TinyCheckpoints


def load_mapping(path: Path, reference: Path, engine: str, everywhere: bool) -> list[str]:
    config = AutoConfig.from_pretrained(path)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    holds = everywhere or dist.get_rank() == 1
    source = load_file(path / "model.safetensors") if holds else None
    loaded = zerostart.load(source, model, engine=engine, progress=False)
    assert loaded is model
    snapshot: Snapshot = torch.load(reference, weights_only=False)
    snapshot.config = {}
    return [line for line in differences(model, snapshot, engine) if not line.startswith("config")]


@pytest.mark.parametrize("everywhere", [True, False], ids=["every rank", "one rank"])
@pytest.mark.parametrize("engine", ["deepspeed", "fsdp2"])
@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe"])
def test_as_from_pretrained(
    checkpoints: TinyCheckpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, engine: str,
    everywhere: bool,
) -> None:  # fmt: skip
    path = checkpoints(name)
    torch.save(Snapshot.of(AutoModelForCausalLM.from_pretrained(path)), tmp_path / "reference.pt")
    # A configuration that happens to lie in the working directory is not the mapping's.
    (tmp_path / "config.json").write_text('{"quantization_config": {"quant_method": "unknown"}}')
    monkeypatch.chdir(tmp_path)
    for lines in run_ranks(load_mapping, 2, path, tmp_path / "reference.pt", engine, everywhere):
        assert not lines, "\n".join(lines)
