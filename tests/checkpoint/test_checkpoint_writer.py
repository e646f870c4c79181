"""Plan and write checkpoint files."""

import os
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import load_file

from zerostart.checkpoint.write.shards import parse_size, plan_shards
from zerostart.checkpoint.write.writer import CheckpointWriter
from zerostart.errors import CheckpointError, ConfigError, WriteError

TENSORS = [("a", "F32", (4,)), ("b", "BF16", (2, 3)), ("c", "I64", ())]


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("5GB", 5 * 10**9), ("5gb", 5 * 10**9), (" 1.5 MB ", 1_500_000), ("50KB", 50_000),
        ("2TB", 2 * 10**12), ("5GiB", 5 * 2**30), ("1kib", 1024), ("123", 123), ("7B", 7), (17, 17),
        ("9007199254740993", 2**53 + 1),
    ],
)  # fmt: skip
def test_sizes_are_parsed(text: str | int, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text", ["", "GB", "5 XB", "-5GB", "0", 0, -1, "nanGB", "infGB", "1e3", "5G", True, None, 1.5]
)
def test_invalid_sizes_are_errors(text: object) -> None:
    with pytest.raises(ConfigError, match="not a size"):
        parse_size(text)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "sizes",
    [[60, 60, 20, 60, 20, 20], [200, 10, 10], [10, 200, 10], [100, 100], [1] * 30, [99, 1, 1], [0, 0]],
)
def test_shards_equal_those_of_huggingface_hub(sizes: Sequence[int]) -> None:
    tensors = [(f"t{i}", "U8", (size,)) for i, size in enumerate(sizes)]
    layout = plan_shards(tensors, 100, total_parameters=sum(sizes))
    state = {name: torch.zeros(shape, dtype=torch.uint8) for name, _, shape in tensors}
    expected = split_torch_state_dict_into_shards(state, max_shard_size=100)
    files: dict[str, list[str]] = {file.name: [] for file in layout.files}
    for name, entry in layout.tensors.items():
        files[layout.files[entry.file].name].append(name)
    assert {file: sorted(names) for file, names in files.items()} == {
        file: sorted(names) for file, names in expected.filename_to_tensors.items()
    }
    if layout.index is not None:
        assert layout.index["weight_map"] == expected.tensor_to_filename
        assert layout.index["metadata"] == {**expected.metadata, "total_parameters": sum(sizes)}


@pytest.mark.parametrize(("limit", "expected"), [(100, "abc de f"), (99, "abde c f"), (130, "abdec f")])
def test_earlier_division_into_files_is_kept(limit: int, expected: str) -> None:
    """Tensors stay in their files if the limit allows it."""
    sizes = {"a": 50, "b": 40, "d": 5, "e": 1, "c": 10, "f": 160}
    before = {"a": 0, "b": 0, "c": 0, "d": 1, "e": 1, "f": 2}
    tensors = [(name, "U8", (size,)) for name, size in sizes.items()]
    layout = plan_shards(tensors, limit, before=before)
    groups = ["".join(n for n in sizes if layout.tensors[n].file == f) for f in range(len(layout.files))]
    assert sorted(map(sorted, groups)) == sorted(map(sorted, expected.split()))


@pytest.mark.parametrize(
    "tensors",
    [
        [("a", "F32", (1,)), ("a", "F32", (1,))],
        [("__metadata__", "F32", (1,))],
        [("a", "F99", (1,))],
        [("a", "F4", (3,))],
        [("a", "F32", (-1,))],
    ],
)
def test_invalid_tensors_are_errors(tensors: list[tuple[str, str, tuple[int, ...]]]) -> None:
    with pytest.raises(CheckpointError, match="tensor"):
        plan_shards(tensors)


@pytest.mark.parametrize(
    ("name", "length", "offset"), [("a", 17, 0), ("a", 1, 16), ("a", 1, -1), ("x", 1, 0)]
)
def test_writes_outside_a_tensor_are_errors(name: str, length: int, offset: int, tmp_path: Path) -> None:
    with (
        pytest.raises(CheckpointError, match=f"tensor '{name}'"),
        CheckpointWriter(tmp_path, plan_shards(TENSORS)) as writer,
    ):
        writer.write(name, bytes(length), offset)


def test_impossible_directory_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(WriteError, match="the directory cannot be created"):
            CheckpointWriter(folder, plan_shards(TENSORS)).create()


def test_full_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def raise_no_space(*_: object) -> int:
        raise OSError(28, "No space left on device")

    writer = CheckpointWriter(tmp_path, plan_shards(TENSORS))
    writer.create()
    monkeypatch.setattr(os, "pwrite", raise_no_space)
    with pytest.raises(WriteError, match=r"model\.safetensors: writing failed: No space left on device"):
        writer.write("a", bytes(16))
    writer.discard()


def test_interrupted_and_partial_writes_are_completed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda handle, data, offset: pwrite(handle, bytes(data)[:3], offset))
    with CheckpointWriter(tmp_path, plan_shards(TENSORS)) as writer:
        writer.write("a", torch.arange(4.0).numpy().data)
    assert load_file(tmp_path / "model.safetensors")["a"].tolist() == [0.0, 1.0, 2.0, 3.0]
