"""Layers whose tensors are alike are converted once; layers that differ are not taken for alike."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.core_model_loading import WeightConverter

import zerostart
from tests.tiny import TinyCheckpoints

EXPERT = "model.layers.2.mlp.experts.1.up_proj.weight"


@pytest.mark.parametrize(("dtype", "runs"), [(torch.bfloat16, 2), (torch.float32, 3)])
def test_a_layer_with_another_dtype_is_converted_by_itself(
    checkpoints: TinyCheckpoints,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
    runs: int,
) -> None:
    source = checkpoints("qwen3_moe", torch.bfloat16)
    tensors = load_file(source / "model.safetensors")
    tensors[EXPERT] = torch.randn(tensors[EXPERT].shape).to(dtype)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_bytes((source / "config.json").read_bytes())
    expected = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).state_dict()
    converted: list[str] = []
    convert = WeightConverter.convert

    def counted(self: WeightConverter, layer_name: str, **options: object) -> object:
        converted.append(layer_name)
        return convert(self, layer_name, **options)

    monkeypatch.setattr(WeightConverter, "convert", counted)
    model = zerostart.load(tmp_path, engine="fsdp2", dtype=torch.bfloat16, progress=False)
    assert len(converted) == runs
    loaded = dict(zerostart.full_tensors(model))
    assert loaded.keys() >= {name for name, _ in model.named_parameters()}
    for name, tensor in loaded.items():
        assert torch.equal(tensor, expected[name]), name
