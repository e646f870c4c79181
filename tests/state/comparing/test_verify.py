"""What is saved says what it was: any change of files or tensors afterwards is named."""

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
def saved(checkpoints: TinyCheckpoints, tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = zerostart.load(checkpoints("qwen3_moe", torch.bfloat16), engine="fsdp2", progress=False)
    path = tmp_path_factory.mktemp("saved") / "model"
    zerostart.save(model, path, max_shard_size="8KB")
    return path


@pytest.fixture
def copy(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "copy"))


def some_tensor(path: Path) -> tuple[Path, str, dict[str, torch.Tensor]]:
    """A file, the largest tensor in it, and all of them."""
    file = sorted(path.glob("*.safetensors"))[1]
    tensors = load_file(file)
    return file, max(tensors, key=lambda name: tensors[name].numel()), tensors


def test_as_it_was_saved(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = zerostart.verify(saved)
    files = [file for file in saved.iterdir() if file.name != "zerostart.json"]
    assert found.files == len(files)
    assert found.bytes == sum(file.stat().st_size for file in files)
    assert found.tensors == len(
        json.loads((saved / "model.safetensors.index.json").read_text())["weight_map"]
    )
    with pytest.raises(SystemExit) as ended:
        main(["verify", str(saved)])
    assert ended.value.code == 0
    assert "all as they were saved" in capsys.readouterr().out


def flip(path: Path) -> list[str]:
    """One bit of the last byte of a file, which belongs to a tensor."""
    file, _, _ = some_tensor(path)
    with file.open("r+b") as handle:
        handle.seek(-1, os.SEEK_END)
        last = handle.read(1)[0]
        handle.seek(-1, os.SEEK_END)
        handle.write(bytes([last ^ 0x80]))
    return [str(file), "other contents"]


def swap(path: Path) -> list[str]:
    file, name, tensors = some_tensor(path)
    tensors[name] = tensors[name].flip(0).contiguous()
    save_file(tensors, file, metadata={"format": "pt"})
    return [str(file), name, "other contents"]


def transpose(path: Path) -> list[str]:
    file, name, tensors = some_tensor(path)
    tensors[name] = tensors[name].reshape(-1).reshape(tensors[name].shape[::-1]).contiguous()
    size = file.stat().st_size
    save_file(tensors, file, metadata={"format": "pt"})
    assert file.stat().st_size == size
    return [str(file), name, "other contents"]


def rename(path: Path) -> list[str]:
    file, name, tensors = some_tensor(path)
    other = name[:-1] + "x"
    save_file({(other if n == name else n): t for n, t in tensors.items()}, file, metadata={"format": "pt"})
    return [repr(name), repr(other), "none of its files", "not saved with it"]


def truncate(path: Path) -> list[str]:
    file, _, _ = some_tensor(path)
    os.truncate(file, file.stat().st_size - 8)
    return [str(file), "bytes and had"]


def remove(path: Path) -> list[str]:
    file, _, _ = some_tensor(path)
    file.unlink()
    return [str(file), "is missing"]


def exchange(path: Path) -> list[str]:
    """Two shards under each other's names."""
    one, other = sorted(path.glob("*.safetensors"))[:2]
    one.rename(path / "aside")
    other.rename(one)
    (path / "aside").rename(other)
    return [one.name]


def configure(path: Path) -> list[str]:
    file = path / "config.json"
    text = file.read_text()
    file.write_text(text.replace("1", "2", 1))
    return [str(file), "other contents"]


def damage_header(path: Path) -> list[str]:
    file, _, _ = some_tensor(path)
    with file.open("r+b") as handle:
        handle.seek(8)
        handle.write(b"[")
    return [str(file)]


DAMAGES: list[Callable[[Path], list[str]]] = [
    flip, swap, transpose, rename, truncate, remove, exchange, configure, damage_header,
]  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_damage_is_named(
    damage: Callable[[Path], list[str]], copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = damage(copy)
    with pytest.raises(zerostart.errors.VerifyError) as told:
        zerostart.verify(copy)
    for word in words:
        assert word in str(told.value)
    with pytest.raises(SystemExit) as ended:
        main(["verify", str(copy)])
    assert ended.value.code == 1
    assert capsys.readouterr().err.startswith("error: ")


@pytest.mark.parametrize(
    "text",
    [
        "", "[]", "{", '{"format": 2, "files": {}}', '{"format": 1}',
        '{"format": 1, "files": {"../x": {"bytes": 1}}}',
        '{"format": 1, "files": {"x": 1}}', '{"format": 1, "files": {}, "digests": {"/": {}}}',
    ],
)  # fmt: skip
def test_a_marker_that_makes_no_sense(text: str, tmp_path: Path) -> None:
    (tmp_path / "zerostart.json").write_text(text)
    with pytest.raises(zerostart.errors.VerifyError, match=r"zerostart\.json"):
        zerostart.verify(tmp_path)


def test_without_a_marker(checkpoints: TinyCheckpoints, tmp_path: Path) -> None:
    for path, message in (
        (checkpoints("qwen3"), r"no zerostart\.json"),
        (tmp_path, r"no zerostart\.json"),
        (tmp_path / "nowhere", "no such directory"),
        (checkpoints("qwen3") / "config.json", "is a file; name the directory"),
    ):
        with pytest.raises(zerostart.errors.VerifyError, match=message):
            zerostart.verify(path)


def test_files_that_others_add_do_no_harm(copy: Path) -> None:
    (copy / "README.md").write_text("mine")
    (copy / "other.safetensors").write_bytes(b"not ours")
    assert zerostart.verify(copy).files
