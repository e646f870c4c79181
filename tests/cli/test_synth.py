"""``zerostart synth``: random weights that transformers loads as if they came from the hub."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cli.running import running
from zerostart.checkpoint.catalog import Catalog
from zerostart.checkpoint.source import open_catalog
from zerostart.errors import BuildError, CheckpointError, ConfigError
from zerostart.models.shrink import scaled, tiny
from zerostart.models.synth import Noise, synthesise

REPOSITORY = Path(__file__).parents[2]
BENCHMARK = REPOSITORY / "benchmarks" / "configs" / "qwen3_moe_3.4gb.json"


run = running("synth")


def tensor(catalog: Catalog, name: str) -> torch.Tensor:
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
        "mixtral",
        "gpt_oss",
        "deepseek_v3",
        "bert",
        "llama",
        "qwen3_next",
        "gemma3_text",
        "t5",
    ],
)
def test_transformers_loads_and_runs_it(model_type: str, tmp_path: Path) -> None:
    import transformers

    source = str(qwen3_tied(tmp_path / "source")) if model_type == "qwen3" else model_type
    made = synthesise(source, tmp_path / "out", size="tiny")
    assert made.parameters < 2_000_000
    kind = getattr(transformers, made.architecture)
    model, info = kind.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values()), info
    assert str(model.dtype) == ("torch.float32" if model_type == "qwen3" else "torch.bfloat16")
    inputs = {"input_ids": torch.arange(12).reshape(2, 6)}
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = inputs["input_ids"]
    with torch.no_grad():
        assert torch.isfinite(model(**inputs).logits.float()).all()
    if model_type == "qwen3":
        assert "lm_head.weight" not in open_catalog(tmp_path / "out").tensors


def test_the_layout_is_the_hubs(tmp_path: Path) -> None:
    synthesise("qwen3_moe", tmp_path / "qwen", size="tiny")
    names = open_catalog(tmp_path / "qwen").tensors
    assert names["model.layers.1.mlp.experts.7.gate_proj.weight"].shape == (32, 64)
    synthesise("mixtral", tmp_path / "mixtral", size="tiny")
    assert "model.layers.0.block_sparse_moe.experts.0.w1.weight" in open_catalog(tmp_path / "mixtral").tensors


@pytest.mark.parametrize("model_type", ["qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_names_shapes_and_dtypes_are_those_of_save_pretrained(model_type: str, tmp_path: Path) -> None:
    import transformers

    synthesise(model_type, tmp_path / "ours", size="tiny")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours", dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "theirs")
    ours, theirs = open_catalog(tmp_path / "ours"), open_catalog(tmp_path / "theirs")
    assert {n: (e.dtype, e.shape) for n, e in ours.tensors.items()} == {
        n: (e.dtype, e.shape) for n, e in theirs.tensors.items()
    }


def test_values(tmp_path: Path) -> None:
    synthesise("bert", tmp_path, size="tiny", dtype="float32")
    catalog = open_catalog(tmp_path)
    weight = tensor(catalog, "bert.encoder.layer.0.intermediate.dense.weight")
    assert abs(weight.std().item() - 0.02) < 0.002
    assert abs(weight.mean().item()) < 0.002
    assert len(weight.unique(dim=0)) == len(weight)
    assert not tensor(catalog, "bert.encoder.layer.0.intermediate.dense.bias").any()
    assert (tensor(catalog, "bert.embeddings.LayerNorm.weight") == 1).all()
    other = tensor(catalog, "bert.encoder.layer.1.intermediate.dense.weight")
    assert not torch.equal(weight, other)


def contents(folder: Path) -> dict[str, bytes]:
    catalog = open_catalog(folder)
    return {
        name: bytes(tensor(catalog, name).flatten().view(torch.uint8).numpy()) for name in catalog.tensors
    }


def test_a_seed_decides_everything(tmp_path: Path) -> None:
    for name, seed, shard in (("one", 0, "5GB"), ("again", 0, "50KB"), ("other", 1, "5GB")):
        synthesise("llama", tmp_path / name, size="tiny", seed=seed, max_shard_size=shard)
    assert len(list((tmp_path / "again").glob("*.safetensors"))) > 3
    assert contents(tmp_path / "one") == contents(tmp_path / "again")
    assert contents(tmp_path / "one") != contents(tmp_path / "other")


def test_noise_beyond_one_block() -> None:
    rows, columns = 9000, 1024  # more than two blocks
    pieces = list(Noise(0, 1.0).content("w", torch.bfloat16, (rows, columns)))
    assert sum(piece.nbytes for piece in pieces) == rows * columns * 2
    assert max(piece.nbytes for piece in pieces) < 10**7
    whole = torch.frombuffer(bytearray(b"".join(pieces)), dtype=torch.bfloat16).reshape(rows, columns)
    assert torch.isfinite(whole.float()).all()
    assert len(whole[::7, :32].float().unique(dim=0)) == len(range(0, rows, 7))


@pytest.mark.parametrize(
    ("name", "dtype", "shape", "expected"),
    [
        ("a.bias", torch.float32, (3,), 0),
        ("a.weight", torch.float16, (3,), 1),
        ("scale", torch.float32, (), 1),
    ],
)
def test_noise_of_vectors(name: str, dtype: torch.dtype, shape: tuple[int, ...], expected: int) -> None:
    data = b"".join(Noise(0, 1.0).content(name, dtype, shape))
    values = torch.frombuffer(bytearray(data), dtype=dtype)
    assert values.numel() == torch.Size(shape).numel()
    assert (values == expected).all()


def test_integers_and_nothing_are_zeros() -> None:
    noise = Noise(0, 1.0)
    assert b"".join(noise.content("n", torch.int64, (2, 2))) == bytes(32)
    assert list(noise.content("n", torch.float32, (0, 4))) == []


def test_sparse_files_take_no_space(tmp_path: Path) -> None:
    made = synthesise(BENCHMARK, tmp_path, sparse=True, max_shard_size="1GB")
    assert made.nbytes == 3_438_352_384
    assert made.files == 4
    files = list(tmp_path.glob("*.safetensors"))
    assert sum(path.stat().st_size for path in files) > made.nbytes
    assert sum(path.stat().st_blocks * 512 for path in files) < 5_000_000
    catalog = open_catalog(tmp_path)
    assert not tensor(catalog, "model.layers.15.mlp.experts.63.up_proj.weight").any()


@pytest.mark.slow
def test_the_largest_models_in_bounded_time_and_memory(tmp_path: Path) -> None:
    program = (
        "import re, time; started = time.process_time(); "
        "from zerostart.models.synth import synthesise; "
        f"made = synthesise('deepseek_v3', {str(tmp_path)!r}, sparse=True); "
        "assert made.parameters == 671_026_419_200, made; "
        # Not ru_maxrss, which a process takes over from the one that starts it.
        "peak = int(re.search(r'VmHWM:\\s+(\\d+) kB', open('/proc/self/status').read())[1]); "
        "assert peak < 1_500_000, peak; "
        "assert time.process_time() - started < 60"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_a_factor_scales_layers_and_experts(tmp_path: Path) -> None:
    synthesise(BENCHMARK, tmp_path, size="0.25", sparse=True)
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["num_hidden_layers"], config["num_local_experts"]) == (4, 16)
    assert config["num_experts_per_tok"] == 8
    names = open_catalog(tmp_path).tensors
    assert "model.layers.3.mlp.experts.15.up_proj.weight" in names
    assert "model.layers.4.input_layernorm.weight" not in names


@pytest.mark.parametrize("factor", [0.001, 0.1, 0.5, 1.5, 2.0])
def test_scaled_configurations_stay_legal(factor: float) -> None:
    import transformers

    for model_type in ("deepseek_v3", "qwen3_moe", "gpt_oss", "qwen3_next"):
        before = transformers.AutoConfig.for_model(model_type).to_dict()
        after = scaled(before, factor)
        config = transformers.CONFIG_MAPPING[model_type].from_dict(after)
        layers = config.num_hidden_layers
        assert layers == max(1, round(before["num_hidden_layers"] * factor))
        experts = next(
            after[key] for key in ("n_routed_experts", "num_experts", "num_local_experts") if key in after
        )
        assert experts >= config.num_experts_per_tok
        assert experts % (after.get("n_group") or 1) == 0
        if getattr(config, "layer_types", None):
            assert len(config.layer_types) == layers


def test_tiny_keeps_every_kind_of_layer() -> None:
    kinds = ["linear", "linear", "linear", "full"] * 3
    config: dict[str, Any] = {"num_hidden_layers": 12, "layer_types": kinds, "mlp_only_layers": [0, 1, 7]}
    small = tiny(config)
    assert small["layer_types"] == ["linear", "full"]
    assert small["mlp_only_layers"] == [0, 1]
    assert config["layer_types"] is kinds


def test_tiny_reaches_nested_configurations() -> None:
    nested = {
        "hidden_size": 4096,
        "num_hidden_layers": 30,
        "vocab_size": 150_000,
        "eos_token_id": [149_999, 1],
    }
    small = tiny(
        {"text_config": nested, "vision_config": {"depth": 32, "hidden_size": 1152}, "image_size": 20}
    )
    assert small["text_config"] == {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "vocab_size": 257,
        "eos_token_id": [256, 1],
    }
    assert small["vision_config"] == {"depth": 2, "hidden_size": 64}
    assert small["image_size"] == 20


def test_quantisation_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "config.json"
    fields = {"model_type": "llama", "quantization_config": {"quant_method": "fp8"}, "dtype": "float16"}
    source.write_text(json.dumps(fields))
    code, out, _ = run(capsys, str(source), str(tmp_path / "out"), "--size", "tiny")
    assert code == 0
    assert "quantization_config was left out" in out
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert "quantization_config" not in written
    assert (written["dtype"], written["architectures"]) == ("float16", ["LlamaForCausalLM"])


def test_the_architecture_of_the_configuration_counts(tmp_path: Path) -> None:
    fields = {"model_type": "bert", "architectures": ["BertForMaskedLM"]}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    made = synthesise(tmp_path, tmp_path / "out", size="tiny")
    assert made.architecture == "BertForMaskedLM"


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("{}", ConfigError, "model_type"),
        ('{"model_type": "absent"}', ConfigError, "absent"),
        ('{"model_type": "llama", "architectures": ["Absent"]}', ConfigError, "Absent"),
        ('{"model_type": "llama", "hidden_size": "many"}', ConfigError, "llama"),
        ('{"model_type": "llama", "hidden_act": "absent"}', BuildError, "LlamaForCausalLM"),
        ("[]", CheckpointError, "not an object"),
        ("nonsense", CheckpointError, "not valid JSON"),
    ],
)
def test_configurations_that_are_none(
    text: str, error: type[Exception], message: str, tmp_path: Path
) -> None:
    source = tmp_path / "config.json"
    source.write_text(text)
    with pytest.raises(error, match=message):
        synthesise(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(
        capsys, "gpt_oss", str(tmp_path), "--size", "tiny", "--dtype", "float32", "--seed", "3"
    )
    assert (code, err) == (0, "")
    assert "GptOssForCausalLM" in out
    assert {entry.dtype for entry in open_catalog(tmp_path).tensors.values()} == {"F32"}


def test_failures_and_usage_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "out")
    code, _, err = run(capsys, "qwen3_mo", out)
    assert code == 1
    assert err.startswith("error: qwen3_mo: ")
    assert "nor a model type of transformers" in err
    (tmp_path / "file").write_text("")
    assert run(capsys, "llama", str(tmp_path / "file"), "--size", "tiny")[0] == 1
    for wrong in (
        ("--size", "huge"),
        ("--size", "0"),
        ("--size", "nan"),
        ("--dtype", "int8"),
        ("--seed", "x"),
    ):
        assert run(capsys, "llama", out, *wrong)[0] == 2
    assert run(capsys, "llama", out, "--max-shard-size", "5XB")[0] == 2
    assert run(capsys, "llama")[0] == 2
    assert not Path(out).exists()
