"""Read and write files like the safetensors library."""

from pathlib import Path

import pytest
import safetensors
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from tests.hypothesis_settings import count_examples
from zerostart.checkpoint.formats.safetensors import read_header
from zerostart.checkpoint.source import open_catalog
from zerostart.checkpoint.write.shards import plan_shards
from zerostart.checkpoint.write.writer import CheckpointWriter

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
}
NAMES = st.text(st.characters(exclude_categories=["Cs"]), max_size=12).filter(
    lambda name: name != "__metadata__"
)
SPECS = st.dictionaries(
    NAMES, st.tuples(st.sampled_from(list(DTYPES)), st.lists(st.integers(0, 4), max_size=4)), max_size=6
)
# Never empty: safetensors 0.8.0 writes broken JSON for empty metadata without tensors.
METADATA = st.one_of(st.none(), st.dictionaries(NAMES, NAMES, min_size=1, max_size=3))
SETTINGS = settings(max_examples=count_examples(80))


def random_tensors(specs: dict[str, tuple[torch.dtype, list[int]]]) -> dict[str, torch.Tensor]:
    """Make tensors of random bytes, or random bits for bool."""
    tensors = {}
    for name, (dtype, shape) in specs.items():
        count = torch.Size(shape).numel() * dtype.itemsize
        high = 2 if dtype is torch.bool else 256
        tensors[name] = torch.randint(0, high, (count,), dtype=torch.uint8).view(dtype).reshape(shape)
    return tensors


def raw(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().flatten().view(torch.uint8).numpy())


@SETTINGS
@given(specs=SPECS, metadata=METADATA)
def test_files_of_safetensors_are_read(
    specs: dict[str, tuple[torch.dtype, list[int]]], metadata: dict[str, str] | None, tmp_path: Path
) -> None:
    path = tmp_path / "library.safetensors"
    tensors = random_tensors(specs)
    save_file(tensors, path, metadata=metadata)
    entries, read_metadata, size = read_header(path)
    data = path.read_bytes()
    assert size == len(data)
    assert read_metadata == (metadata or {})
    assert {e.name: (e.dtype, list(e.shape)) for e in entries} == {
        name: (DTYPES[dtype], shape) for name, (dtype, shape) in specs.items()
    }
    for entry in entries:
        assert data[entry.offset : entry.offset + entry.nbytes] == raw(tensors[entry.name])


@SETTINGS
@given(specs=SPECS, metadata=METADATA)
def test_written_bytes_equal_those_of_safetensors(
    specs: dict[str, tuple[torch.dtype, list[int]]], metadata: dict[str, str] | None, tmp_path: Path
) -> None:
    metadata = (
        {key: metadata[key] for key in sorted(metadata)[:1]} if metadata else None
    )  # safetensors writes metadata in hash order
    tensors = random_tensors(specs)
    entries = [(name, DTYPES[tensor.dtype], tuple(tensor.shape)) for name, tensor in tensors.items()]
    layout = plan_shards(entries, "1TB", metadata=metadata or {})
    with CheckpointWriter(tmp_path / "ours", layout, durable=False) as writer:
        for name in reversed(tensors):
            writer.write(name, raw(tensors[name]))
    save_file(tensors, tmp_path / "library.safetensors", metadata=metadata)
    ours = tmp_path / "ours" / "model.safetensors"
    assert ours.read_bytes() == (tmp_path / "library.safetensors").read_bytes()


@SETTINGS
@given(specs=SPECS.filter(bool), limit=st.integers(1, 200))
def test_shards_hold_the_given_tensors(
    specs: dict[str, tuple[torch.dtype, list[int]]], limit: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("shards")
    tensors = random_tensors(specs)
    entries = [(name, DTYPES[tensor.dtype], tuple(tensor.shape)) for name, tensor in tensors.items()]
    layout = plan_shards(entries, limit)
    with CheckpointWriter(folder, layout, durable=False) as writer:
        for name, tensor in tensors.items():
            data = raw(tensor)
            middle = len(data) // 2
            writer.write(name, data[middle:], middle)
            writer.write(name, memoryview(data)[:middle])
    loaded: dict[str, torch.Tensor] = {}
    for file in layout.files:
        assert (folder / file.name).stat().st_size == file.size
        part = load_file(folder / file.name)
        assert len(part) == 1 or sum(t.nbytes for t in part.values()) <= limit
        loaded.update(part)
    assert {name: raw(tensor) for name, tensor in loaded.items()} == {n: raw(t) for n, t in tensors.items()}
    assert {n: t.shape for n, t in loaded.items()} == {n: t.shape for n, t in tensors.items()}
    catalog = open_catalog(folder)
    assert catalog.tensors == layout.tensors
    assert [Path(file).name for file in catalog.files] == [file.name for file in layout.files]
    with safetensors.safe_open(folder / layout.files[0].name, "pt") as file:
        assert file.metadata() == {"format": "pt"}
