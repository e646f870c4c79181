"""Open paths and hub ids as catalogs."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from zerostart.checkpoint.source import config_path, open_catalog, read_config
from zerostart.errors import CheckpointError, CheckpointNotFoundError

SHARDS = {
    "model-00001-of-00003.safetensors": ("b", "a"),
    "model-00002-of-00003.safetensors": ("d", "c"),
    "model-00003-of-00003.safetensors": ("e",),
}


def save(path: Path, *names: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: torch.arange(4.0) + ord(name[0]) for name in names}, path, metadata={"format": "pt"})
    return path


def save_index(folder: Path, shards: dict[str, Any] = SHARDS, stem: str = "model", **extra: str) -> Path:
    for file, names in shards.items():
        save(folder / file, *names)
    weight_map = {name: file for file, names in shards.items() for name in names} | extra
    index = folder / f"{stem}.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 80.0}, "weight_map": weight_map}))
    return index


def test_single_file_is_opened(tmp_path: Path) -> None:
    path = save(tmp_path / "anything.safetensors", "b", "a")
    catalog = open_catalog(path)
    assert catalog == open_catalog(str(path))
    assert catalog.files == (str(path),)
    assert catalog.sizes == (path.stat().st_size,)
    assert catalog.root == str(tmp_path)
    assert list(catalog.tensors) == ["a", "b"]
    assert catalog.metadata == {"format": "pt"}
    entry = catalog.tensors["b"]
    data = path.read_bytes()[entry.offset : entry.offset + entry.nbytes]
    assert torch.frombuffer(bytearray(data), dtype=torch.float32).tolist() == [98.0, 99.0, 100.0, 101.0]


@pytest.mark.parametrize("name", ["model", "diffusion_pytorch_model", "adapter_model", "odd"])
def test_directory_with_one_file_is_opened(name: str, tmp_path: Path) -> None:
    path = save(tmp_path / f"{name}.safetensors", "a")
    assert open_catalog(tmp_path).files == (str(path),)


@pytest.mark.parametrize("stem", ["model", "diffusion_pytorch_model", "odd"])
def test_directory_with_an_index_is_opened(stem: str, tmp_path: Path) -> None:
    index = save_index(tmp_path, stem=stem)
    catalog = open_catalog(tmp_path)
    assert catalog == open_catalog(index)
    assert [Path(file).name for file in catalog.files] == list(SHARDS)
    assert list(catalog.tensors) == ["a", "b", "c", "d", "e"]
    assert [entry.file for entry in catalog.tensors.values()] == [0, 0, 1, 1, 2]
    assert catalog.nbytes == 80


def test_standard_names_take_precedence(tmp_path: Path) -> None:
    save(tmp_path / "consolidated.safetensors", "z")
    save_index(tmp_path)
    assert "z" not in open_catalog(tmp_path).tensors
    save(tmp_path / "model.safetensors", "y")  # transformers prefers it to an index
    assert list(open_catalog(tmp_path).tensors) == ["y"]


def test_relative_and_home_paths_are_resolved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path / "here" / "model.safetensors", "a")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for source in ("here", "./here", Path("here"), "here/../here", "~/here"):
        assert open_catalog(source).root == str(tmp_path / "here")


def test_missing_sources_are_errors(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFoundError, match="no such file or directory"):
        open_catalog(tmp_path / "absent")
    with pytest.raises(CheckpointNotFoundError) as caught:
        open_catalog(tmp_path)
    for name in ("model.safetensors", "model.safetensors.index.json", "diffusion_pytorch_model.safetensors"):
        assert name in str(caught.value)


def test_missing_shard_is_named_with_its_index(tmp_path: Path) -> None:
    save_index(tmp_path)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointNotFoundError) as caught:
        open_catalog(tmp_path)
    assert "model-00002-of-00003.safetensors" in str(caught.value)
    assert "model.safetensors.index.json" in str(caught.value)
    assert isinstance(caught.value, FileNotFoundError)


def test_two_candidates_are_an_error(tmp_path: Path) -> None:
    save(tmp_path / "one.safetensors", "a")
    save(tmp_path / "two.safetensors", "b")
    with pytest.raises(CheckpointError, match=r"one\.safetensors.*two\.safetensors"):
        open_catalog(tmp_path)


@pytest.mark.parametrize(
    "name",
    [
        "../outside.safetensors",
        "sub/../../outside.safetensors",
        "/etc/passwd.safetensors",
        "..\\outside.safetensors",
        "C:\\outside.safetensors",
        "C:outside.safetensors",
        "out\0side.safetensors",
        "..",
    ],
)
def test_index_entries_outside_the_directory_are_refused(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "inside"
    save(tmp_path / "outside.safetensors", "evil")
    save_index(folder, evil=name)
    with pytest.raises(CheckpointError, match="outside the checkpoint's directory"):
        open_catalog(folder)


def test_listed_tensor_without_a_shard_is_an_error(tmp_path: Path) -> None:
    save_index(tmp_path, ghost="model-00001-of-00003.safetensors")
    with pytest.raises(CheckpointError, match=r"places tensor 'ghost' in .*00001.*no shard has it"):
        open_catalog(tmp_path)


def test_listed_tensor_in_another_shard_is_an_error(tmp_path: Path) -> None:
    save_index(tmp_path, a="model-00003-of-00003.safetensors")
    with pytest.raises(CheckpointError, match=r"places tensor 'a' in .*00003.*00001.* has it"):
        open_catalog(tmp_path)


def test_tensor_in_two_shards_is_an_error(tmp_path: Path) -> None:
    save_index(tmp_path)
    save(tmp_path / "model-00003-of-00003.safetensors", "e", "b")
    with pytest.raises(CheckpointError, match=r"00003.*tensor 'b' is also in .*00001"):
        open_catalog(tmp_path)


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Local hub cache with one sharded model."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    storage = tmp_path / "cache" / "models--someone--tiny"
    commit = "0123456789abcdef0123456789abcdef01234567"
    snapshot = storage / "snapshots" / commit
    save_index(tmp_path / "original")
    snapshot.mkdir(parents=True)
    (storage / "blobs").mkdir()
    for number, path in enumerate(sorted((tmp_path / "original").iterdir())):
        path.rename(storage / "blobs" / f"{number:064x}")
        (snapshot / path.name).symlink_to(f"../../blobs/{number:064x}")
    (storage / "refs").mkdir()
    (storage / "refs" / "main").write_text(commit)
    return snapshot


def test_cached_hub_id_is_opened(hub_cache: Path) -> None:
    catalog = open_catalog("someone/tiny")
    assert list(catalog.tensors) == ["a", "b", "c", "d", "e"]
    assert catalog.root == str(hub_cache)
    assert all(Path(file).parent == hub_cache for file in catalog.files)
    assert open_catalog(f"someone/tiny@{hub_cache.name}") == catalog
    assert open_catalog("someone/tiny@main") == catalog


@pytest.mark.parametrize("name", ["someone/absent", "someone/tiny@v9", "nothing"])
def test_uncached_hub_id_is_an_error(name: str, hub_cache: Path) -> None:
    with pytest.raises(CheckpointNotFoundError, match="hf download"):
        open_catalog(name)


def test_config_is_read(tmp_path: Path) -> None:
    assert config_path(tmp_path) is None
    assert read_config(tmp_path) is None
    (tmp_path / "config.json").write_text('{"a": 1.5, "time_step_limit": [0.0, Infinity]}')
    assert config_path(tmp_path) == tmp_path / "config.json"
    assert read_config(tmp_path) == {"a": 1.5, "time_step_limit": [0.0, float("inf")]}
    # The last of repeated keys counts, as in transformers and diffusers.
    (tmp_path / "config.json").write_text('{"a": 1, "b": {"c": 2, "c": 3}, "a": 4}')
    assert read_config(tmp_path) == {"a": 4, "b": {"c": 3}}
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match="configuration"):
        read_config(tmp_path)


@pytest.mark.slow
def test_reading_a_catalog_needs_no_torch(tmp_path: Path) -> None:
    save_index(tmp_path)
    program = (
        "import sys; from zerostart.checkpoint.source import open_catalog; "
        f"assert len(open_catalog({str(tmp_path)!r}).tensors) == 5; "
        "assert not {'torch', 'transformers', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
