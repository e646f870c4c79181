"""Test ``zerostart synth``, which writes random weights in the hub's layout."""

import json
from pathlib import Path

import pytest
import torch

from tests.cli.running import make_runner
from zerostart.checkpoint.catalog import Catalog
from zerostart.checkpoint.source import open_catalog
from zerostart.models.synth import synthesise

REPOSITORY = Path(__file__).parents[2]
BENCHMARK = REPOSITORY / "benchmarks" / "configs" / "qwen3_moe_3.4gb.json"


run = make_runner("synth")


def read_tensor(catalog: Catalog, name: str) -> torch.Tensor:
    entry = catalog.tensors[name]
    with Path(catalog.files[entry.file]).open("rb") as file:
        file.seek(entry.offset)
        data = bytearray(file.read(entry.nbytes))
    dtype = {"BF16": torch.bfloat16, "F32": torch.float32, "F16": torch.float16}[entry.dtype]
    return torch.frombuffer(data, dtype=dtype).reshape(entry.shape)


def qwen3_tied(folder: Path) -> Path:
    folder.mkdir()
    path = folder / "config.json"
    path.write_text(json.dumps({"model_type": "qwen3", "tie_word_embeddings": True, "dtype": "float32"}))
    return path


@pytest.mark.parametrize(
    "model_type",
    [
        "qwen3",
        "qwen3_moe",
        "gpt_oss",
        "deepseek_v3",
        "bert",
        "t5",
        "inkling2_text",
        "dory",
    ],
)
def test_transformers_loads_and_runs_it(model_type: str, tmp_path: Path) -> None:
    import transformers

    if model_type not in transformers.CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {model_type}")
    source = str(qwen3_tied(tmp_path / "source")) if model_type == "qwen3" else model_type
    synthesised = synthesise(source, tmp_path / "out", size="tiny")
    assert synthesised.parameters < 2_000_000
    kind = getattr(transformers, synthesised.architecture)
    model, info = kind.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values()), info
    # Heads truncate their logits to the vocabulary without padding.
    assert getattr(model.config, "unpadded_vocab_size", 0) <= model.config.vocab_size
    assert str(model.dtype) == ("torch.float32" if model_type == "qwen3" else "torch.bfloat16")
    inputs = {"input_ids": torch.arange(12).reshape(2, 6)}
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = inputs["input_ids"]
    with torch.no_grad():
        assert torch.isfinite(model(**inputs).logits.float()).all()
    if model_type == "qwen3":
        assert "lm_head.weight" not in open_catalog(tmp_path / "out").tensors


@pytest.mark.parametrize("model_type", ["qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_names_shapes_and_dtypes_equal_save_pretrained(model_type: str, tmp_path: Path) -> None:
    import transformers

    synthesise(model_type, tmp_path / "ours", size="tiny")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours", dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "stock")
    ours, stock = open_catalog(tmp_path / "ours"), open_catalog(tmp_path / "stock")
    assert {n: (e.dtype, e.shape) for n, e in ours.tensors.items()} == {
        n: (e.dtype, e.shape) for n, e in stock.tensors.items()
    }


def test_sparse_files_take_no_space(tmp_path: Path) -> None:
    synthesised = synthesise(BENCHMARK, tmp_path, sparse=True, max_shard_size="1GB")
    assert synthesised.nbytes == 3_438_352_384
    assert synthesised.files == 4
    files = list(tmp_path.glob("*.safetensors"))
    assert sum(path.stat().st_size for path in files) > synthesised.nbytes
    assert sum(path.stat().st_blocks * 512 for path in files) < 5_000_000
    catalog = open_catalog(tmp_path)
    assert not read_tensor(catalog, "model.layers.15.mlp.experts.63.up_proj.weight").any()


def test_quantisation_is_removed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "config.json"
    fields = {"model_type": "llama", "quantization_config": {"quant_method": "fp8"}, "dtype": "float16"}
    source.write_text(json.dumps(fields))
    code, out, _ = run(capsys, str(source), str(tmp_path / "out"), "--size", "tiny")
    assert code == 0
    assert "quantization_config was left out" in out
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert "quantization_config" not in written
    assert (written["dtype"], written["architectures"]) == ("float16", ["LlamaForCausalLM"])


def test_failures_and_usage_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "out")
    code, _, err = run(capsys, "qwen3_mo", out)
    assert code == 1
    assert err.startswith("error: qwen3_mo: ")
    assert "nor a model type of transformers" in err
    (tmp_path / "file").write_text("")
    assert run(capsys, "llama", str(tmp_path / "file"), "--size", "tiny")[0] == 1
    for options in (
        ("--size", "huge"),
        ("--size", "0.5"),
        ("--dtype", "int8"),
        ("--seed", "x"),
    ):
        assert run(capsys, "llama", out, *options)[0] == 2
    assert run(capsys, "llama", out, "--max-shard-size", "5XB")[0] == 2
    assert run(capsys, "llama")[0] == 2
    assert not Path(out).exists()
