"""``zerostart.verify`` names every later change of files or tensors."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import zerostart
from tests.tiny import TinyCheckpoints
from zerostart.cli import main


@pytest.fixture(scope="module")
def saved_model(checkpoints: TinyCheckpoints, tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = zerostart.load(checkpoints("qwen3_moe", torch.bfloat16), engine="fsdp2", progress=False)
    path = tmp_path_factory.mktemp("saved") / "model"
    zerostart.save(model, path, max_shard_size="8KB")
    return path


@pytest.fixture
def model_copy(saved_model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved_model, tmp_path / "copy"))


def second_shard(path: Path) -> tuple[Path, str, dict[str, torch.Tensor]]:
    """Return a shard, its largest tensor's name, and its tensors."""
    file = sorted(path.glob("*.safetensors"))[1]
    tensors = load_file(file)
    return file, max(tensors, key=lambda name: tensors[name].numel()), tensors


def test_unchanged_model_passes(saved_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = zerostart.verify(saved_model)
    files = [file for file in saved_model.iterdir() if file.name != "zerostart.json"]
    assert report.files == len(files)
    assert report.bytes == sum(file.stat().st_size for file in files)
    assert report.tensors == len(
        json.loads((saved_model / "model.safetensors.index.json").read_text())["weight_map"]
    )
    with pytest.raises(SystemExit) as exit_info:
        main(["verify", str(saved_model)])
    assert exit_info.value.code == 0
    assert "all as they were saved" in capsys.readouterr().out


def flip_bit(path: Path) -> list[str]:
    file, _, _ = second_shard(path)
    with file.open("r+b") as handle:
        handle.seek(-1, os.SEEK_END)
        last = handle.read(1)[0]
        handle.seek(-1, os.SEEK_END)
        handle.write(bytes([last ^ 0x80]))
    return [str(file), "other contents"]


def reverse_rows(path: Path) -> list[str]:
    file, name, tensors = second_shard(path)
    tensors[name] = tensors[name].flip(0).contiguous()
    save_file(tensors, file, metadata={"format": "pt"})
    return [str(file), name, "other contents"]


def transpose(path: Path) -> list[str]:
    file, name, tensors = second_shard(path)
    tensors[name] = tensors[name].reshape(-1).reshape(tensors[name].shape[::-1]).contiguous()
    size = file.stat().st_size
    save_file(tensors, file, metadata={"format": "pt"})
    assert file.stat().st_size == size
    return [str(file), name, "other contents"]


def rename(path: Path) -> list[str]:
    file, name, tensors = second_shard(path)
    other = name[:-1] + "x"
    save_file({(other if n == name else n): t for n, t in tensors.items()}, file, metadata={"format": "pt"})
    return [repr(name), repr(other), "none of its files", "not saved with it"]


def truncate(path: Path) -> list[str]:
    file, _, _ = second_shard(path)
    os.truncate(file, file.stat().st_size - 8)
    return [str(file), "bytes and had"]


def remove(path: Path) -> list[str]:
    file, _, _ = second_shard(path)
    file.unlink()
    return [str(file), "is missing"]


def exchange(path: Path) -> list[str]:
    """Exchange the names of two shards."""
    first, second = sorted(path.glob("*.safetensors"))[:2]
    first.rename(path / "aside")
    second.rename(first)
    (path / "aside").rename(second)
    return [first.name]


def edit_config(path: Path) -> list[str]:
    file = path / "config.json"
    text = file.read_text()
    file.write_text(text.replace("1", "2", 1))
    return [str(file), "other contents"]


def damage_header(path: Path) -> list[str]:
    file, _, _ = second_shard(path)
    with file.open("r+b") as handle:
        handle.seek(8)
        handle.write(b"[")
    return [str(file)]


DAMAGES: list[Callable[[Path], list[str]]] = [
    flip_bit, reverse_rows, transpose, rename, truncate, remove, exchange, edit_config, damage_header,
]  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_damage_is_named(
    damage: Callable[[Path], list[str]], model_copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = damage(model_copy)
    with pytest.raises(zerostart.errors.VerifyError) as caught:
        zerostart.verify(model_copy)
    for word in words:
        assert word in str(caught.value)
    with pytest.raises(SystemExit) as exit_info:
        main(["verify", str(model_copy)])
    assert exit_info.value.code == 1
    assert capsys.readouterr().err.startswith("error: ")


@pytest.mark.parametrize(
    "text",
    [
        "", "[]", "{", '{"format": 2, "files": {}}', '{"format": 1}',
        '{"format": 1, "files": {"../x": {"bytes": 1}}}',
        '{"format": 1, "files": {"x": 1}}', '{"format": 1, "files": {}, "digests": {"/": {}}}',
    ],
)  # fmt: skip
def test_malformed_manifests_are_errors(text: str, tmp_path: Path) -> None:
    (tmp_path / "zerostart.json").write_text(text)
    with pytest.raises(zerostart.errors.VerifyError, match=r"zerostart\.json"):
        zerostart.verify(tmp_path)


def test_missing_manifests_are_errors(checkpoints: TinyCheckpoints, tmp_path: Path) -> None:
    for path, message in (
        (checkpoints("qwen3"), r"no zerostart\.json"),
        (tmp_path, r"no zerostart\.json"),
        (tmp_path / "nowhere", "no such directory"),
        (checkpoints("qwen3") / "config.json", "is a file; name the directory"),
    ):
        with pytest.raises(zerostart.errors.VerifyError, match=message):
            zerostart.verify(path)


def test_foreign_files_are_ignored(model_copy: Path) -> None:
    (model_copy / "README.md").write_text("mine")
    (model_copy / "other.safetensors").write_bytes(b"not ours")
    assert zerostart.verify(model_copy).files
