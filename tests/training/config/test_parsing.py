"""Parsing of hand-written files: duplicate keys and wrong types are named."""

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.training.language import CAUSAL
from zerostart.errors import CheckpointError, ConfigError
from zerostart.training.adapt.lora_files import _parse, _read
from zerostart.training.config.engine_config import user_config
from zerostart.training.config.load import load_config, parse_config
from zerostart.training.config.parsing import parse_yaml
from zerostart.training.loop.checkpoints import _extra

RUN = """
model: {source: m}
task: {name: "tests.training.language:CausalLanguage", source: d}
train:
  steps: 5
output: {directory: o}
"""
DUPLICATES = [
    (f"{RUN}train: {{steps: 6}}\n", r"run\.yaml, line 7, .*: train is given twice, first in line 4"),
    (
        RUN.replace("  steps: 5", "  steps: 5\n  seed: 1\n  steps: 6"),
        "line 7, .* steps is given twice, .* line 5",
    ),
    (RUN.replace("{source: m}", "{source: m, source: n}"), "line 2, .* source is given twice"),
    (f"{RUN}engine: {{config: {{a: {{b: 1, b: 1}}}}}}\n", "line 7, .* b is given twice"),
]


@pytest.mark.parametrize(("text", "message"), DUPLICATES)
def test_duplicate_keys_are_named(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_config(tmp_path / "run.yaml")


def test_duplicate_keys_in_overrides_are_named(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(RUN)
    with pytest.raises(ConfigError, match=r"override 'engine=.* name is given twice"):
        load_config(tmp_path / "run.yaml", ["engine={name: fsdp2, name: deepspeed}"])


def test_engine_config_file_must_be_a_json_object(tmp_path: Path) -> None:
    values = {"model": {"source": "m"}, "task": {"name": CAUSAL, "source": "d"}}
    values |= {"train": {"steps": 1}, "output": {"directory": "o"}}
    file = tmp_path / "ds.json"
    config = parse_config(values | {"engine": {"config": str(file)}})
    for text, message in (("[]", r"ds\.json is not a JSON object"), ("{", r"ds\.json: not valid JSON")):
        file.write_text(text)
        with pytest.raises(ConfigError, match=message):
            user_config(config.engine)


def test_broken_lora_metadata_is_named(tmp_path: Path) -> None:
    """Metadata in the header and in ``adapter_config.json``."""
    path = tmp_path / "adapter_model.safetensors"
    tensors = {"a.lora_A.weight": torch.zeros(1, 2), "a.lora_B.weight": torch.zeros(2, 1)}
    for text, message in (("[1]", "is a JSON list and not an object"), ("{", "not valid JSON")):
        save_file(tensors, path, {"lora_adapter_metadata": text})
        with pytest.raises(CheckpointError, match=rf"adapter_model\.safetensors: .*{message}"):
            _read(path, str(path))
        save_file(tensors, path)
        (tmp_path / "adapter_config.json").write_text(text)
        with pytest.raises(CheckpointError, match=rf"adapter_config\.json: .*{message}"):
            _read(path, str(path))
    (tmp_path / "adapter_config.json").write_text('{"lora_alpha": [8]}')
    with pytest.raises(CheckpointError, match=r"lora_alpha is \[8\], not a number"):
        _parse(*_read(path, str(path)), str(path))


def test_state_of_another_program_is_refused(tmp_path: Path) -> None:
    document = {"format": 1, "world_size": 1, "ties": {}, "left_out": [], "optimizer": {}, "engine": {}}
    for extra in (None, [1], {}):
        (tmp_path / "state.json").write_text(json.dumps({**document, "extra": extra}))
        with pytest.raises(ConfigError, match="was not saved by zerostart train"):
            _extra(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"a: {'9' * 5000}", "not valid YAML: Exceeds the limit"),
        ("a: b\n" * 100_000, "500000 characters, but at most"),
        ("[" * 2000, "not valid YAML"),
        (
            "train:\n  steps: 1\n   batch_size: 2\n",
            r"run\.yaml, line 3, column 14: not valid YAML: mapping values are not allowed here",
        ),
        ("train:\n   steps: 1\n  seed: 2\n", r"run\.yaml, line 3, column 3: .*indented alike\?"),
    ],
    ids=["number", "long", "deep", "deeper line", "outer line"],
)
def test_broken_documents_are_named(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_yaml(text, "run.yaml")


@pytest.mark.parametrize("kind", ["fifo", "zero", "directory"])
def test_configuration_must_be_a_regular_file(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "run.yaml"
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "zero":
        path.symlink_to("/dev/zero")
    else:
        path.mkdir()
    with pytest.raises(ConfigError, match=r"cannot read the configuration .*not a regular file"):
        load_config(path)
