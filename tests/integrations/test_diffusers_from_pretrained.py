"""Compare diffusers' ``from_pretrained`` with and without zerostart."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import zerostart
from tests.ranks import run_ranks

CONFIG = {
    "num_attention_heads": 2,
    "attention_head_dim": 12,
    "in_channels": 4,
    "out_channels": 4,
    "text_dim": 16,
    "freq_dim": 8,
    "ffn_dim": 24,
    "num_layers": 2,
    "rope_max_seq_len": 16,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small transformer: one file, several files, a subdirectory, missing weights."""
    import diffusers
    from safetensors.torch import load_file, save_file

    root = tmp_path_factory.mktemp("diffusers")
    torch.manual_seed(0)
    model = diffusers.WanTransformer3DModel(**CONFIG)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.1)
    model.save_pretrained(root / "one")
    model.save_pretrained(root / "several", max_shard_size="8KB")
    model.save_pretrained(root / "pipeline" / "transformer")
    model.save_pretrained(root / "missing")
    file = root / "missing" / "diffusion_pytorch_model.safetensors"
    tensors = load_file(file)
    tensors["surplus"] = tensors.pop("proj_out.bias")
    save_file(tensors, file, metadata={"format": "pt"})
    return root


def load_enabled(path: Path, settings: dict[str, Any], loading: dict[str, Any], out: Path) -> dict[str, Any]:
    # enable() before the imports does not import diffusers itself.
    zerostart.enable(**settings)
    assert "diffusers" not in sys.modules
    from diffusers import WanTransformer3DModel

    model, info = WanTransformer3DModel.from_pretrained(path, output_loading_info=True, **loading)
    check_start(WanTransformer3DModel, settings)
    zerostart.disable()
    assert zerostart.report(model).engine == settings["engine"]
    result = attributes_of(model, info)
    result["tensors"] = dict(zerostart.full_tensors(model, rank=None))
    whole = WanTransformer3DModel.from_pretrained(path, **loading)
    assert type(next(whole.parameters()).data) is torch.Tensor
    # As in diffusers' scripts: only the main process saves a model that is not sharded.
    model.save_pretrained(out, is_main_process=torch.distributed.get_rank() == 0)
    return result


def check_start(kind: Any, settings: dict[str, Any]) -> None:
    """Check that models without a checkpoint start alike in diffusers and in ``load``."""
    torch.manual_seed(3)
    whole = kind.from_config(CONFIG)
    assert all(type(parameter.data) is torch.Tensor for parameter in whole.parameters())
    torch.manual_seed(3)
    model = zerostart.load(None, model=lambda: kind.from_config(CONFIG), progress=False, **settings)
    assert zerostart.digest(model) == zerostart.digest(whole)


def attributes_of(model: Any, info: dict[str, Any]) -> dict[str, Any]:
    return {
        "config": dict(model.config),
        "training": model.training,
        "dtype": model.dtype,
        "buffers": {n: b.clone() for n, b in model.named_buffers()},
        "info": {key: sorted(value) for key, value in info.items()},
    }


def stock(path: Path, loading: dict[str, Any]) -> dict[str, Any]:
    from diffusers import WanTransformer3DModel

    model, info = WanTransformer3DModel.from_pretrained(path, output_loading_info=True, **loading)
    return {**attributes_of(model, info), "tensors": dict(model.state_dict())}


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "one": ("one", {}),
    "several": ("several", {"torch_dtype": torch.bfloat16}),
    "subfolder": ("pipeline", {"subfolder": "transformer"}),
    "missing": ("missing", {}),
}
SETTINGS: dict[str, dict[str, Any]] = {
    "zero3": {"engine": "deepspeed"},
    "zero2": {"engine": "deepspeed", "zero_stage": 2},
    "fsdp2": {"engine": "fsdp2"},
}


@pytest.mark.parametrize(
    ("setting", "case"),
    [
        ("zero3", "several"),
        pytest.param("zero2", "one", marks=pytest.mark.slow),
        pytest.param("fsdp2", "subfolder", marks=pytest.mark.slow),
        pytest.param("fsdp2", "missing", marks=pytest.mark.slow),
    ],
)
def test_a_load_equals_diffusers(setting: str, case: str, folder: Path, tmp_path: Path) -> None:
    name, loading = CASES[case]
    expected = stock(folder / name, loading)
    results = run_ranks(load_enabled, 2, folder / name, SETTINGS[setting], loading, tmp_path / "saved")
    saved = stock(tmp_path / "saved", loading)
    assert saved["config"] | {"_name_or_path": ""} == expected["config"] | {"_name_or_path": ""}
    assert [n for n, t in saved["tensors"].items() if not torch.equal(t, results[0]["tensors"][n])] == []
    for ours in results:
        missing = set(ours["info"]["missing_keys"])
        assert missing == ({"proj_out.bias"} if case == "missing" else set())
        assert ours["tensors"].keys() == expected["tensors"].keys()
        for part in ("tensors", "buffers"):
            assert [
                key
                for key, tensor in expected[part].items()
                if key not in missing
                and (tensor.dtype != ours[part][key].dtype or not torch.equal(tensor, ours[part][key]))
            ] == []
        for fact in ("config", "training", "dtype", "info"):
            assert ours[fact] == expected[fact]
