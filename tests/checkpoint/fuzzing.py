"""Small checkpoints of every format, ways to damage them, and reference readers.

A checkpoint is a mapping of file names to contents. :func:`damage` changes bytes, mostly of pickles and JSON
because tensors may hold any number, or replaces a value inside a known pickle. ``READERS`` open a checkpoint
with zerostart, and ``ORACLES`` with the library that wrote it, if it has a reader.
"""

import contextlib
import copy
import dataclasses
import functools
import io
import json
import logging
import pickle
import random
import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, deserialize
from safetensors.torch import save as safetensors_bytes
from torch.distributed.checkpoint import CheckpointException

from zerostart.checkpoint.catalog import DTYPE_BITS, TORCH_NAMES, Catalog, TensorEntry
from zerostart.checkpoint.formats.training import training_states
from zerostart.checkpoint.source import open_catalog

Files = dict[str, bytes]
#: Bytes of each tensor's elements, by tensor name.
Values = dict[str, bytes]
#: Tensors with more elements, as damaged shapes claim, are not read.
MAX_ELEMENTS = 1 << 16
_TORCH_DTYPES = {name: torch_name for torch_name, name in TORCH_NAMES.items()}


# -- checkpoints ------------------------------------------------------------------------------------------


def dumps(value: Any, **options: Any) -> bytes:
    out = io.BytesIO()
    torch.save(value, out, **options)
    return out.getvalue()


def state_dict() -> dict[str, torch.Tensor]:
    weight = torch.arange(12.0).view(4, 3)
    return {
        "a.weight": weight,
        "a.t": weight.t(),
        "b": torch.arange(5, dtype=torch.int16),
        "s": torch.tensor(2.5),
    }


def contiguous_state_dict() -> dict[str, torch.Tensor]:
    return {name: tensor.contiguous().clone() for name, tensor in state_dict().items()}


def single_file() -> Files:
    return {"model.safetensors": safetensors_bytes(contiguous_state_dict(), {"format": "pt"})}


def sharded() -> Files:
    names = {
        "a.weight": "m-1.safetensors",
        "b": "m-2.safetensors",
        "s": "m-2.safetensors",
        "a.t": "m-2.safetensors",
    }
    shards: dict[str, dict[str, torch.Tensor]] = {}
    for name, file in names.items():
        shards.setdefault(file, {})[name] = contiguous_state_dict()[name]
    index = {"metadata": {"total_size": 82}, "weight_map": names}
    files = {file: safetensors_bytes(tensors) for file, tensors in shards.items()}
    return {**files, "model.safetensors.index.json": json.dumps(index).encode()}


def torch_zip() -> Files:
    return {"pytorch_model.bin": dumps({"state_dict": state_dict(), "step": 3})}


def legacy_pickle() -> Files:
    return {"pytorch_model.bin": dumps(state_dict(), _use_new_zipfile_serialization=False)}


def zero_checkpoint(stage: int, ranks: int = 2) -> Files:
    shapes = [{"w": torch.Size([3, 4]), "v": torch.Size([3])}]
    files: Files = {}
    row = torch.arange(20.0)
    for rank in range(ranks):
        key = "fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"
        flat = row[rank * 8 : rank * 8 + 8].clone()
        states = {
            "zero_stage": stage,
            "partition_count": ranks,
            key: [flat],
            "param_alignment_paddings": None,
            "loss_scaler": None,
            "base_optimizer_state": {
                "state": {0: {"exp_avg": flat + 1, "step": torch.tensor(3.0)}},
                "param_groups": [{"lr": 0.1, "params": [0]}],
            },
        }
        model = {
            "module": {"w": torch.zeros(3, 4), "v": torch.zeros(3), "seen": torch.arange(3.0)},
            "buffer_names": ["seen"],
            "param_shapes": shapes,
            "frozen_param_shapes": {"f": torch.Size([2])} if stage == 3 else None,
            "frozen_param_fragments": {"f": torch.ones(1)} if stage == 3 else None,
            "shared_params": {"tied": "w"},
            "ds_version": "0.19.0",
            "global_steps": 3,
            "lr_scheduler": {"last": 1},
        }
        files[f"g/zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"] = dumps({"optimizer_state_dict": states})
        if stage == 3:
            files[f"g/zero_pp_rank_{rank}_mp_rank_00_model_states.pt"] = dumps(model)
        elif rank == 0:
            files["g/mp_rank_00_model_states.pt"] = dumps(model)
    return {"latest": b"g", **files}


def dcp() -> Files:
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        TensorProperties,
        TensorStorageMetadata,
    )

    values: dict[str, torch.Tensor] = {
        "w": torch.arange(12.0).view(4, 3),
        "v": torch.arange(5, dtype=torch.int64),
    }
    metadata: dict[str, Any] = {}
    storage: dict[Any, Any] = {}
    files = {"__0_0.distcp": b"", "__1_0.distcp": b""}
    for name, tensor in values.items():
        half, chunks = tensor.shape[0] // 2, []
        for file, (low, high) in zip(files, ((0, half), (half, len(tensor))), strict=True):
            offset = torch.Size([low, *[0] * (tensor.dim() - 1)])
            box = dumps(tensor[low:high].clone())
            storage[MetadataIndex(f"model.{name}", offset)] = _StorageInfo(file, len(files[file]), len(box))
            files[file] += box
            chunks.append(ChunkStorageMetadata(offset, tensor[low:high].shape))
        metadata[f"model.{name}"] = TensorStorageMetadata(
            TensorProperties(dtype=tensor.dtype), tensor.shape, chunks
        )
    routes: Any = {f"model.{name}": ("model", name) for name in values}
    return {**files, ".metadata": pickle.dumps(Metadata(metadata, routes, storage))}


FORMATS: dict[str, Callable[[], Files]] = {
    "safetensors": single_file,
    "index": sharded,
    "torch zip": torch_zip,
    "legacy pickle": legacy_pickle,
    "DCP": dcp,
    "ZeRO-1": lambda: zero_checkpoint(1),
    "ZeRO-2": lambda: zero_checkpoint(2),
    "ZeRO-3": lambda: zero_checkpoint(3),
}


def write(files: Files, root: Path) -> Path:
    shutil.rmtree(root, ignore_errors=True)
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return root


# -- damage -----------------------------------------------------------------------------------------------

_NUMBERS = (-1, 0, 1, 2, 3, 5, 2**31, 2**63, 2**70, -(2**40), 1.5, float("nan"), True)
_TEXTS = ("", "w", "../x", "a\0b", "\x1b[2J", b"\0")
_SHAPES = (None, [], [1], {}, {"w": 1}, (), (3, 4), (4, 3), (-1,), (2**40, 2**40), torch.Size([2]))
_TENSORS = (torch.zeros(0), torch.zeros(2), torch.zeros(8)[::2], torch.zeros(1).expand(8))
WEIRD: tuple[Any, ...] = (*_NUMBERS, *_TEXTS, *_SHAPES, *_TENSORS, torch.tensor(1.0), torch.bfloat16)
TOKENS = [
    token.encode()
    for token in (
        *["-1", "0", "99999999999999999999", "1e9", "null", "true", "[]", "{}", "[[", "..", "/"],
        *('""', "\n", ": ", "\0", "\x1b", "\\u0000", "\\ud800", '"shape":[1]'),
    )
]


def damage(files: Files, rng: random.Random) -> Files:
    """Change, cut, swap or delete some of the files."""
    out = dict(files)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        name = rng.choice(sorted(out))
        kind = rng.random()
        if kind < 0.02 and len(out) > 1:
            del out[name]
        elif kind < 0.04:
            second = rng.choice(sorted(out))
            out[name], out[second] = out[second], out[name]
        elif kind < 0.5 and (tree := _load_pickle(name, files[name])) is not None:
            value = _change_value(tree, rng)
            with contextlib.suppress(Exception):  # the value cannot be pickled
                out[name] = pickle.dumps(value) if name == ".metadata" else dumps(value)
        else:
            out[name] = _change_bytes(out[name], name, rng)
    return out


def _change_bytes(content: bytes, name: str, rng: random.Random) -> bytes:
    low, high = _header_range(content, name)
    if high <= low:
        return rng.choice(TOKENS)
    at = rng.randrange(low, high)
    until = min(len(content), at + rng.randint(1, 12))
    kind = rng.randrange(7)
    if kind == 0:
        return content[:at] + bytes([rng.randrange(256)]) + content[at + 1 :]
    if kind == 1:
        return content[:at] + bytes([content[at] ^ (1 << rng.randrange(8))]) + content[at + 1 :]
    if kind == 2:
        return content[:at] + content[until:]
    if kind == 3:
        return content[:until] + content[at:]
    if kind == 4:
        token = rng.choice(TOKENS)
        return content[:at] + token + content[at + (len(token) if rng.random() < 0.7 else 0) :]
    if kind == 5:
        return content[: rng.randrange(len(content))]
    source = rng.randrange(low, high)
    piece = content[source : source + until - at]
    return content[:at] + piece + content[at + len(piece) :]


def _header_range(content: bytes, name: str) -> tuple[int, int]:
    """Return the range of a file's header or pickle."""
    if name.endswith(".safetensors") and len(content) > 8:
        return 0, min(len(content), 8 + int.from_bytes(content[:8], "little") + 4)
    begin, end = content.find(b"data.pkl"), content.find(b"PK\7\x08")
    return (begin, end) if 0 <= begin < end else (0, len(content))


@functools.cache
def _load_pickle(name: str, content: bytes) -> Any:
    """Load the undamaged pickle of a file, or return None."""
    if name == ".metadata":
        return pickle.loads(content)
    if name.endswith((".pt", ".bin")) and "fsdp" not in name and "optimizer_0" not in name:
        return torch.load(io.BytesIO(content), weights_only=False)
    return None


def _change_value(value: Any, rng: random.Random) -> Any:
    """Copy a value with a random change inside it."""
    if rng.random() < 0.12:
        return copy.copy(rng.choice(WEIRD))
    if isinstance(value, dict) and value:
        key = rng.choice(list(value))
        out = dict(value)
        kind = rng.random()
        if kind < 0.1:
            del out[key]
        elif kind < 0.2:
            with contextlib.suppress(TypeError):
                out[rng.choice(WEIRD)] = out.pop(key)
        else:
            out[key] = _change_value(value[key], rng)
        return out
    if isinstance(value, (list, tuple)) and value:
        items = list(value)
        at = rng.randrange(len(items))
        kind = rng.random()
        if kind < 0.1:
            del items[at]
        elif kind < 0.2:
            items.append(items[at])
        else:
            items[at] = _change_value(items[at], rng)
        with contextlib.suppress(Exception):
            return type(value)(items)
        return tuple(items)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        out = copy.copy(value)
        fields = [field.name for field in dataclasses.fields(value)]
        if fields:
            field = rng.choice(fields)
            object.__setattr__(out, field, _change_value(getattr(value, field), rng))
        return out
    return copy.copy(rng.choice(WEIRD))


# -- readers ----------------------------------------------------------------------------------------------


def _read_elements(catalog: Catalog, entry: TensorEntry) -> torch.Tensor:
    """Read a stored tensor's bytes, one row per element."""
    width, unit = DTYPE_BITS[entry.dtype] // 8, entry.pieces[0].unit
    with Path(catalog.files[entry.file]).open("rb") as file:
        file.seek(entry.offset)
        raw = file.read(unit * width)
    assert len(raw) == unit * width, f"{entry.name} reaches beyond its file"
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(unit, width)


def values_of(catalog: Catalog) -> Values:
    """Read a catalog's tensors element by element through their pieces."""
    out: Values = {}
    for name, tensor in catalog.weights.items():
        if not 0 < tensor.numel <= MAX_ELEMENTS:
            out[name] = b""
            continue
        elements = torch.full((*tensor.shape, DTYPE_BITS[tensor.dtype] // 8), 0, dtype=torch.uint8)
        write_counts = torch.zeros(tensor.shape, dtype=torch.uint8)
        for piece in tensor.pieces:
            stored = torch.cat(
                [_read_elements(catalog, catalog.tensors[str(s)])[: piece.unit] for s in piece.source]
            )
            address = torch.full((), piece.offset)
            for axis in piece.axes:
                steps = torch.zeros((), dtype=torch.int64)
                for size, stride in axis:
                    steps = (steps.unsqueeze(-1) + torch.arange(size) * stride).reshape(-1)
                address = address.unsqueeze(-1) + steps.reshape(-1)
            box = tuple(slice(at, at + size) for at, size in zip(piece.origin, piece.extent, strict=True))
            elements[box] = stored[address.reshape(piece.extent)]
            write_counts[box] += 1
        assert bool((write_counts == 1).all()), f"{name} has elements without a source, or with two"
        out[name] = bytes(elements.reshape(-1).tolist())
    return out


def _read_catalog(root: Path) -> Values:
    values = values_of(open_catalog(root))
    if (states := training_states(root)) is not None:
        values_of(states[2])
    return values


READERS: dict[str, Callable[[Path], Any]] = {
    **dict.fromkeys(FORMATS, _read_catalog),
}


class OracleError(Exception):
    """The reference library cannot read the file either."""


def _bytes_of(tensor: torch.Tensor) -> bytes:
    if not 0 < tensor.numel() <= MAX_ELEMENTS:
        return b""
    return bytes(tensor.detach().contiguous().reshape(-1).view(torch.uint8).tolist())


def _tensor_bytes(values: Any) -> Values:
    return {name: _bytes_of(tensor) for name, tensor in values.items() if isinstance(tensor, torch.Tensor)}


def _safetensors_reader(*patterns: str) -> Callable[[Path], Values]:
    def read(root: Path) -> Values:
        out: Values = {}
        try:
            for path in sorted(p for pattern in patterns for p in root.glob(pattern)):
                for name, info in deserialize(path.read_bytes()):
                    out[name] = bytes(info["data"])
        except SafetensorError as error:
            raise AssertionError(f"safetensors refuses what zerostart read: {error}") from error
        return out

    return read


def _read_index(root: Path) -> Values:
    index = root / "model.safetensors.index.json"
    if not index.exists():  # a directory with one file, once index and other file are deleted
        return _safetensors_reader("*.safetensors")(root)
    files = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
    return _safetensors_reader(*files)(root)


@contextlib.contextmanager
def _wrap_errors() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable(logging.CRITICAL)
        try:
            yield
        except (Exception, CheckpointException) as error:  # CheckpointException is no Exception
            raise OracleError(str(error)[:200]) from error
        finally:
            logging.disable(logging.NOTSET)


def _read_torch(root: Path) -> Values:
    with _wrap_errors():
        value = torch.load(root / "pytorch_model.bin", weights_only=True)
        inner = value.get("state_dict")
        return _tensor_bytes(inner if isinstance(inner, dict) and _tensor_bytes(inner) else value)


def _read_deepspeed(root: Path) -> Values:
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    with _wrap_errors(), contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        return _tensor_bytes(get_fp32_state_dict_from_zero_checkpoint(str(root), lazy_mode=False))


def _read_dcp(root: Path) -> Values:
    """Read tensors by name, because damaged routes may be endless."""
    import torch.distributed.checkpoint as dcp_library

    catalog = open_catalog(root)
    value = {
        f"model.{name}": torch.zeros(tensor.shape, dtype=getattr(torch, _TORCH_DTYPES[tensor.dtype]))
        for name, tensor in catalog.weights.items()
        if tensor.numel <= MAX_ELEMENTS
    }
    with _wrap_errors():
        dcp_library.load(value, checkpoint_id=root, no_dist=True)
        return {name.removeprefix("model."): _bytes_of(tensor) for name, tensor in value.items()}


ORACLES: dict[str, Callable[[Path], Any]] = {
    "safetensors": _safetensors_reader("model.safetensors"),
    "index": _read_index,
    "torch zip": _read_torch,
    "legacy pickle": _read_torch,
    "DCP": _read_dcp,
    "ZeRO-1": _read_deepspeed,
    "ZeRO-2": _read_deepspeed,
    "ZeRO-3": _read_deepspeed,
}
