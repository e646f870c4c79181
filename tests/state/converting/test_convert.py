"""``zerostart.convert`` writes what other libraries open."""

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import zerostart
from tests.quantised import QUANTISED
from tests.ranks import run_ranks
from tests.tiny import TinyCheckpoints
from zerostart.cli import main
from zerostart.errors import ConfigError, ZerostartError
from zerostart.state.converting import distributed
from zerostart.state.converting.convert import convert

BF16 = torch.bfloat16


def run_convert(*arguments: str) -> int:
    with pytest.raises(SystemExit) as exit_info:
        main(["convert", *arguments])
    return int(exit_info.value.code or 0)


def read_weights(folder: Path) -> dict[str, torch.Tensor]:
    return {name: t for file in folder.glob("*.safetensors") for name, t in load_file(file).items()}


def same_tensors(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(
        a[name].dtype == b[name].dtype and torch.equal(a[name], b[name]) for name in a
    )


def load_dcp(folder: Path, like: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    import torch.distributed.checkpoint as dcp

    tensors = {name: torch.zeros_like(tensor) for name, tensor in like.items()}
    dcp.load(tensors, checkpoint_id=folder, no_dist=True)
    return tensors


def test_round_trips_keep_the_bytes(
    tmp_path: Path, checkpoints: TinyCheckpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(distributed, "_CHUNK_BYTES", 1 << 12)
    folder = checkpoints("qwen3", BF16, sharded=True)
    direct = convert(folder, tmp_path / "direct", "hf", max_shard_size="20KB")
    assert len(direct.files) > 1
    assert convert(folder, tmp_path / "dcp", "dcp").files == ("__0_0.distcp",)
    assert same_tensors(load_dcp(tmp_path / "dcp", read_weights(folder)), read_weights(folder))
    round_trip = convert(tmp_path / "dcp", tmp_path / "again", "hf", max_shard_size="20KB")
    assert round_trip.files == direct.files
    for file in direct.files:
        assert (tmp_path / "again" / file).read_bytes() == (tmp_path / "direct" / file).read_bytes()
    zerostart.verify(tmp_path / "again")
    for name in ("direct", "dcp"):
        assert json.loads((tmp_path / name / "config.json").read_text())["model_type"] == "qwen3"
        assert (tmp_path / name / "tokenizer.json").exists() == (folder / "tokenizer.json").exists()


@pytest.mark.slow
def test_two_ranks_write_the_same_tensors(tmp_path: Path, checkpoints: TinyCheckpoints) -> None:
    folder = checkpoints("qwen3", BF16)
    for to in ("hf", "dcp"):
        run_ranks(convert, 2, str(folder), str(tmp_path / to), to)
    assert same_tensors(read_weights(tmp_path / "hf"), read_weights(folder))
    assert same_tensors(load_dcp(tmp_path / "dcp", read_weights(folder)), read_weights(folder))


def test_fused_experts_are_split_in_the_original_layout(tmp_path: Path, checkpoints: TinyCheckpoints) -> None:
    from transformers import AutoModelForCausalLM

    folder = checkpoints("qwen3_moe", BF16)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=BF16)
    fused = {name: value.clone() for name, value in model.state_dict().items()}
    save_file(fused, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    assert any("gate_up_proj" in name for name in load_file(tmp_path / "model.safetensors"))
    assert run_convert(str(tmp_path), str(tmp_path / "out"), "--to", "original", "--dtype", "bfloat16") == 0
    assert same_tensors(read_weights(tmp_path / "out"), read_weights(folder))


def test_nonempty_target_is_refused(tmp_path: Path, checkpoints: TinyCheckpoints) -> None:
    folder = checkpoints("qwen3", BF16)
    convert(folder, tmp_path / "hf", "hf")
    (tmp_path / "nonempty").mkdir()
    (tmp_path / "nonempty" / "notes").write_text("mine")
    for to in ("hf", "dcp"):
        with pytest.raises(ConfigError, match="notes exists"):
            convert(tmp_path / "hf", tmp_path / "nonempty", to)
        with pytest.raises(ConfigError, match="name another directory"):
            convert(tmp_path / "hf", tmp_path / "hf", to)
    assert os.listdir(tmp_path / "nonempty") == ["notes"]  # noqa: PTH208
    with pytest.raises(ConfigError, match="none of the formats"):
        convert(folder, tmp_path / "zero", "zero")


def test_failure_leaves_nothing(
    tmp_path: Path, checkpoints: TinyCheckpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    from zerostart.state.converting.source import SourceReader

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(SourceReader, "read", fail)
    for to in ("hf", "dcp"):
        with pytest.raises(ZerostartError, match="No space left"):
            convert(checkpoints("qwen3", BF16), tmp_path / "out" / to, to)
        assert not (tmp_path / "out").exists() or not os.listdir(tmp_path / "out")  # noqa: PTH208


def test_empty_tensors_are_not_taken_for_ties(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    values = {"a": torch.empty(0, 2), "b": torch.empty(0, 2), "c": torch.ones(1), "d": torch.tensor(3.0)}
    dcp.save(values, checkpoint_id=tmp_path / "dcp", no_dist=True)
    (tmp_path / "dcp" / "config.json").write_text('{"tie_word_embeddings": true}')
    convert(tmp_path / "dcp", tmp_path / "hf", "hf")
    assert same_tensors(read_weights(tmp_path / "hf"), values)
    convert(tmp_path / "hf", tmp_path / "again", "dcp")
    assert same_tensors(load_dcp(tmp_path / "again", values), values)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*QUANTISED])
def test_dequantised_checkpoint_has_a_plain_configuration(tmp_path: Path, kind: str) -> None:
    from transformers import AutoModelForCausalLM, FineGrainedFP8Config, Mxfp4Config

    quantization = FineGrainedFP8Config if kind.endswith("fp8") else Mxfp4Config
    QUANTISED[kind](tmp_path / "quantised")
    expected = AutoModelForCausalLM.from_pretrained(
        tmp_path / "quantised", quantization_config=quantization(dequantize=True)
    )
    for to in ("original", "hf"):
        convert(tmp_path / "quantised", tmp_path / to, to)
        config = json.loads((tmp_path / to / "config.json").read_text())
        assert ("quantization_config" in config) == (to == "hf"), to
    converted = AutoModelForCausalLM.from_pretrained(tmp_path / "original")
    assert same_tensors(dict(converted.state_dict()), dict(expected.state_dict()))
