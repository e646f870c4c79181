"""Read files of torch.save like torch.load(weights_only=True), and refuse others."""

import json
import shutil
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import zerostart
from tests.hypothesis_settings import count_examples
from tests.ranks import run_ranks
from tests.tiny import TinyCheckpoints
from zerostart.checkpoint.catalog import Catalog
from zerostart.checkpoint.formats import torch_zip
from zerostart.checkpoint.source import open_catalog
from zerostart.errors import CheckpointError, CheckpointNotFoundError
from zerostart.geometry.layout import flat_partition
from zerostart.recipe import Recipe, SymbolicTensor, Target, torch_dtype
from zerostart.transfer import Progress, execute
from zerostart.transfer.planning import Destination, PlanOptions, join

DTYPES = [
    torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.bool, torch.int64, torch.int32,
    torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.complex64,
    torch.float8_e4m3fn, torch.float8_e5m2,
]  # fmt: skip


def read_tensor(catalog: Catalog, name: str, size: int = 1, chunk: int = 1 << 20) -> torch.Tensor:
    """Read the tensor shard by shard through plans."""
    entry = catalog.tensors[name]
    dtype = torch_dtype(entry.dtype)
    symbolic = SymbolicTensor.of(name, entry.shape, dtype, entry.strides)
    recipe = Recipe(Target(name, entry.shape, dtype), symbolic.pieces)
    shards = []
    for rank in range(size):
        layout = flat_partition(entry.shape, rank, size)
        destination = Destination(name, layout.numel, layout.owned, dtype, direct=True)
        plan = join(catalog, [(recipe, layout, destination)], PlanOptions(chunk_size=chunk))
        storage = torch.empty(layout.numel, dtype=dtype)
        assert execute(plan, [storage], Progress(plan.read_bytes, shown=False), 2) == plan.read_bytes
        shards.append(storage)
    return torch.cat(shards)[: entry.numel].view(entry.shape)


def as_bytes(tensor: torch.Tensor) -> tuple[torch.dtype, tuple[int, ...], bytes]:
    flat = torch.empty(tensor.numel(), dtype=tensor.dtype)
    flat.view(tensor.shape).copy_(tensor.detach())
    return tensor.dtype, tuple(tensor.shape), flat.view(torch.uint8).numpy().tobytes()


def assert_equals_torch_load(path: Path, **options: int) -> Catalog:
    """Compare the catalog's tensors with those that torch loads."""
    catalog = open_catalog(path)
    loaded = torch.load(path, weights_only=True)
    assert list(catalog.tensors) == list(loaded)
    for name, tensor in loaded.items():
        assert as_bytes(read_tensor(catalog, name, **options)) == as_bytes(tensor), name
    return catalog


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_is_read(dtype: torch.dtype, tmp_path: Path) -> None:
    path = tmp_path / "pytorch_model.bin"
    tensor = torch.arange(60).remainder(7).to(dtype).view(5, 12)
    torch.save({"w": tensor, "scalar": tensor[2, 3], "empty": tensor[:0], "rows": tensor[1:3]}, path)
    catalog = assert_equals_torch_load(path)
    assert open_catalog(tmp_path) == catalog
    assert catalog.tensors["w"].nbytes == 60 * dtype.itemsize
    assert catalog.sizes == (path.stat().st_size,)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_views_are_read_by_strides(size: int, tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    base = torch.arange(210.0).view(5, 6, 7)
    tensors = {
        "transposed": base.permute(2, 0, 1),
        "sliced": base[1:4, ::2, 3:],
        "expanded": base[:, :1, :].expand(5, 4, 7),
        "one": torch.ones(()).expand(3, 5),
        "windows": base.reshape(-1).unfold(0, 8, 3),
        "plain": base,
        "column": base[:, 2, 3],
        "parameter": torch.nn.Parameter(base[2].t()),
        "size one": base.as_strided((1, 7), (999, 1), 7),
    }
    torch.save(tensors, path)
    catalog = assert_equals_torch_load(path, size=size, chunk=64)
    assert_equals_torch_load(path, size=size)
    assert catalog.tensors["plain"].strides is None
    assert catalog.tensors["size one"].strides is None
    assert catalog.tensors["transposed"].strides == (1, 42, 7)
    assert catalog.tensors["expanded"].strides == (42, 0, 1)
    assert path.stat().st_size < 5000


def test_shards_with_an_index(tmp_path: Path) -> None:
    shards = {
        f"pytorch_model-0000{i}-of-00002.bin": {f"a{i}": torch.randn(3), f"b{i}": torch.randn(2, 2)}
        for i in (1, 2)
    }
    for name, tensors in shards.items():
        torch.save(tensors, tmp_path / name)
    index = tmp_path / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": {k: f for f, t in shards.items() for k in t}}))
    catalog = open_catalog(tmp_path)
    assert catalog == open_catalog(index)
    for tensors in shards.values():
        for name, tensor in tensors.items():
            assert torch.equal(read_tensor(catalog, name), tensor)
    (tmp_path / "pytorch_model-00002-of-00002.bin").unlink()
    with pytest.raises(CheckpointNotFoundError, match="00002"):
        open_catalog(tmp_path)


def test_safetensors_take_precedence(tmp_path: Path) -> None:
    torch.save({"t": torch.ones(1)}, tmp_path / "pytorch_model.bin")
    torch.save({"o": torch.ones(1)}, tmp_path / "training_args.bin")
    assert list(open_catalog(tmp_path).tensors) == ["t"]
    save_file({"s": torch.ones(1)}, tmp_path / "model.safetensors")
    assert list(open_catalog(tmp_path).tensors) == ["s"]


@pytest.mark.parametrize("key", torch_zip.WRAPPERS)
def test_wrapped_state_dict_is_unwrapped(key: str, tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    path = tmp_path / "last.ckpt"
    torch.save({key: model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3, "name": "x"}, path)
    catalog = open_catalog(path)
    assert list(catalog.tensors) == ["weight", "bias"]
    assert torch.equal(read_tensor(catalog, "weight"), model.weight)
    assert catalog.metadata == {"format": "pt", "state_dict": key, "ignored": "optimizer, epoch, name"}


def test_two_wrapped_state_dicts_are_an_error(tmp_path: Path) -> None:
    torch.save({"model": {"a": torch.ones(1)}, "module": {"a": torch.ones(1)}}, tmp_path / "x.pt")
    with pytest.raises(CheckpointError, match="model and module"):
        open_catalog(tmp_path)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([torch.ones(1)], "list"),
        (torch.ones(1), "tensor"),
        ({"epoch": 1, "inner": {"deep": {"w": torch.ones(1)}}}, "epoch, inner"),
        ({1: torch.ones(1)}, "int"),
        ({"w": torch.ones(2, dtype=torch.complex64).conj()}, "resolve_conj"),
        ({"w": torch.ones(2, dtype=torch.complex128)}, "complex128"),
        ({"w": torch.ones(2, 2).to_sparse()}, "_rebuild_sparse_tensor"),
        ({"w": torch.ones(2, device="meta")}, "_rebuild_meta_tensor_no_storage"),
        ({"w": torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)}, "_rebuild_qtensor"),
    ],
)  # fmt: skip
def test_other_values_are_refused(value: Any, message: str, tmp_path: Path) -> None:
    torch.save(value, tmp_path / "x.pt")
    with pytest.raises(CheckpointError, match=message) as caught:
        open_catalog(tmp_path)
    assert "x.pt" in str(caught.value)


def test_a_storage_of_two_dtypes_is_refused(tmp_path: Path) -> None:
    """Torch would give both tensors the first dtype."""
    path = tmp_path / "pytorch_model.bin"
    torch.save({"a": torch.arange(5.0), "b": torch.arange(5).half()}, path)
    raw = path.read_bytes()
    second = b"X\x01\x00\x00\x001"  # the key of a storage in the pickle
    assert raw.count(second) == 1
    path.write_bytes(raw.replace(second, second[:-1] + b"0"))
    with pytest.raises(CheckpointError, match=r"gives the storage '?0'? two dtypes"):
        open_catalog(tmp_path)


def test_harmless_values_are_ignored(tmp_path: Path) -> None:
    extra = [
        torch.Size((1, 2)),
        torch.float32,
        torch.device("cpu"),
        b"raw",
        {1, 2},
        1j,
        2**70,
        None,
        0.5,
        "s",
    ]
    path = tmp_path / "x.pt"
    torch.save({"w": torch.ones(2), "extra": extra, "od": OrderedDict(a=1), "t": (1, (2, (3, 4)), [])}, path)
    assert list(open_catalog(path).tensors) == ["w"]
    assert open_catalog(path).metadata["ignored"] == "extra, od, t"


@settings(max_examples=count_examples(60))
@given(data=st.data())
def test_random_views_equal_those_of_torch_load(tmp_path: Path, data: st.DataObject) -> None:
    base = torch.arange(360, dtype=data.draw(st.sampled_from([torch.float32, torch.int16, torch.bfloat16])))
    tensors = {}
    for i in range(data.draw(st.integers(1, 3))):
        shape = data.draw(st.lists(st.integers(0, 4), max_size=4))
        strides = [data.draw(st.integers(0, 20)) for _ in shape]
        reach = sum(max(0, n - 1) * s for n, s in zip(shape, strides, strict=True))
        tensors[f"t{i}"] = base.as_strided(shape, strides, data.draw(st.integers(0, 359 - reach)))
    path = tmp_path / "x.bin"
    torch.save(tensors, path)
    size = data.draw(st.integers(1, 3))
    assert_equals_torch_load(path, size=size, chunk=data.draw(st.sampled_from([16, 64, 1 << 20])))


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["deepspeed", "fsdp2"])
def test_model_is_loaded_from_torch_shards(engine: str, checkpoints: TinyCheckpoints, tmp_path: Path) -> None:
    """Like old transformers, with some weights stored transposed."""
    source = checkpoints("qwen3_moe", torch.bfloat16)
    shutil.copy(source / "config.json", tmp_path)
    shards: tuple[dict[str, torch.Tensor], ...] = ({}, {})
    for i, (name, tensor) in enumerate(load_file(source / "model.safetensors").items()):
        shards[i % 2][name] = tensor.t().contiguous().t() if i % 3 == 0 and tensor.dim() == 2 else tensor
    names = [f"pytorch_model-0000{i}-of-00002.bin" for i in (1, 2)]
    for name, shard in zip(names, shards, strict=True):
        torch.save(shard, tmp_path / name)
    weight_map = {key: name for name, shard in zip(names, shards, strict=True) for key in shard}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    for differences in run_ranks(load_both, 2, engine, [source, tmp_path]):
        assert differences == []


def load_both(engine: str, sources: list[Path]) -> list[str]:
    models = [zerostart.load(path, engine=engine, progress=False) for path in sources]
    expected, actual = (dict(zerostart.full_tensors(model, rank=None)) for model in models)
    assert list(expected) == list(actual)
    return [name for name in expected if not torch.equal(expected[name], actual[name])]


@pytest.fixture
def torch_file(tmp_path: Path) -> Path:
    torch.save({"w": torch.arange(12.0).view(3, 4), "v": torch.ones(5)}, tmp_path / "x.bin")
    return tmp_path / "x.bin"


def test_zip64_archives_are_read(torch_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lowered limits make Python's writer use the zip64 structures."""
    with zipfile.ZipFile(torch_file) as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    monkeypatch.setattr(zipfile, "ZIP64_LIMIT", 20)
    monkeypatch.setattr(zipfile, "ZIP_FILECOUNT_LIMIT", 2)
    with zipfile.ZipFile(torch_file, "w") as archive:
        for name, content in records.items():
            with archive.open(name, "w", force_zip64=True) as out:
                out.write(content)
    monkeypatch.undo()
    content = bytearray(torch_file.read_bytes())
    content[-14:-2] = b"\xff" * 12  # Python leaves small sizes in place; zip64 readers expect all ones
    torch_file.write_bytes(content)
    assert b"PK\6\6" in content
    catalog = assert_equals_torch_load(torch_file)
    assert torch.equal(read_tensor(catalog, "w"), torch.arange(12.0).view(3, 4))
    content = bytearray(torch_file.read_bytes())
    content[content.index(b"PK\6\7")] = 0
    torch_file.write_bytes(content)
    with pytest.raises(CheckpointError, match="truncated or damaged"):
        open_catalog(torch_file)


@pytest.mark.parametrize("wrapper", [None, "state_dict"])
def test_module_versions_are_read(tmp_path: Path, wrapper: str | None) -> None:
    state = torch.nn.Sequential(torch.nn.BatchNorm1d(3)).state_dict()
    torch.save(state if wrapper is None else {wrapper: state, "epoch": 3}, tmp_path / "model.pt")
    catalog = open_catalog(tmp_path / "model.pt")
    assert catalog.versions == {name: dict(entry) for name, entry in state._metadata.items()}  # type: ignore[attr-defined]
    assert "_metadata" not in catalog.metadata
    torch.save(dict(state), tmp_path / "plain.pt")
    assert open_catalog(tmp_path / "plain.pt").versions is None
