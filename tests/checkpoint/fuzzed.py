"""Small checkpoints of every format, ways to damage them, and what other readers make of the damaged ones.

A checkpoint is its files by their names. ``damaged`` changes one by its bytes (rather those of pickles and
of JSON, for what lies in tensors is any number) or, where a pickle is known, by a value in it. ``OWN`` opens
one with zerostart, ``ORACLES`` with the libraries that wrote it, where these have a reader.
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
#: Bytes of the elements of each tensor, by its name.
Values = dict[str, bytes]
#: More than that a damaged shape may claim without anybody reading it.
MOST = 1 << 16
_SPELLED = {name: spelled for spelled, name in TORCH_NAMES.items()}


# -- examples ---------------------------------------------------------------------------------------------


def saved(value: Any, **options: Any) -> bytes:
    out = io.BytesIO()
    torch.save(value, out, **options)
    return out.getvalue()


def state_dict() -> dict[str, torch.Tensor]:
    whole = torch.arange(12.0).view(4, 3)
    return {
        "a.weight": whole,
        "a.t": whole.t(),
        "b": torch.arange(5, dtype=torch.int16),
        "s": torch.tensor(2.5),
    }


def plain() -> dict[str, torch.Tensor]:
    return {name: tensor.contiguous().clone() for name, tensor in state_dict().items()}


def one_file() -> Files:
    return {"model.safetensors": safetensors_bytes(plain(), {"format": "pt"})}


def sharded() -> Files:
    names = {
        "a.weight": "m-1.safetensors",
        "b": "m-2.safetensors",
        "s": "m-2.safetensors",
        "a.t": "m-2.safetensors",
    }
    shards: dict[str, dict[str, torch.Tensor]] = {}
    for name, file in names.items():
        shards.setdefault(file, {})[name] = plain()[name]
    index = {"metadata": {"total_size": 82}, "weight_map": names}
    files = {file: safetensors_bytes(tensors) for file, tensors in shards.items()}
    return {**files, "model.safetensors.index.json": json.dumps(index).encode()}


def torch_zip() -> Files:
    return {"pytorch_model.bin": saved({"state_dict": state_dict(), "step": 3})}


def legacy() -> Files:
    return {"pytorch_model.bin": saved(state_dict(), _use_new_zipfile_serialization=False)}


def zero(stage: int, ranks: int = 2) -> Files:
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
        files[f"g/zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"] = saved({"optimizer_state_dict": states})
        if stage == 3:
            files[f"g/zero_pp_rank_{rank}_mp_rank_00_model_states.pt"] = saved(model)
        elif rank == 0:
            files["g/mp_rank_00_model_states.pt"] = saved(model)
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
    described: dict[str, Any] = {}
    places: dict[Any, Any] = {}
    files = {"__0_0.distcp": b"", "__1_0.distcp": b""}
    for name, tensor in values.items():
        half, chunks = tensor.shape[0] // 2, []
        for file, (low, high) in zip(files, ((0, half), (half, len(tensor))), strict=True):
            offset = torch.Size([low, *[0] * (tensor.dim() - 1)])
            box = saved(tensor[low:high].clone())
            places[MetadataIndex(f"model.{name}", offset)] = _StorageInfo(file, len(files[file]), len(box))
            files[file] += box
            chunks.append(ChunkStorageMetadata(offset, tensor[low:high].shape))
        described[f"model.{name}"] = TensorStorageMetadata(
            TensorProperties(dtype=tensor.dtype), tensor.shape, chunks
        )
    routes: Any = {f"model.{name}": ("model", name) for name in values}
    return {**files, ".metadata": pickle.dumps(Metadata(described, routes, places))}


FORMATS: dict[str, Callable[[], Files]] = {
    "safetensors": one_file,
    "index": sharded,
    "torch zip": torch_zip,
    "legacy pickle": legacy,
    "DCP": dcp,
    "ZeRO-1": lambda: zero(1),
    "ZeRO-2": lambda: zero(2),
    "ZeRO-3": lambda: zero(3),
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


def damaged(files: Files, rng: random.Random) -> Files:
    """The same files with one or more of them changed, cut, swapped or gone."""
    out = dict(files)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        name = rng.choice(sorted(out))
        kind = rng.random()
        if kind < 0.02 and len(out) > 1:
            del out[name]
        elif kind < 0.04:
            other = rng.choice(sorted(out))
            out[name], out[other] = out[other], out[name]
        elif kind < 0.5 and (tree := _tree(name, files[name])) is not None:
            changed = _changed(tree, rng)
            with contextlib.suppress(Exception):  # what cannot be pickled
                out[name] = pickle.dumps(changed) if name == ".metadata" else saved(changed)
        else:
            out[name] = _bytes_changed(out[name], name, rng)
    return out


def _bytes_changed(content: bytes, name: str, rng: random.Random) -> bytes:
    low, high = _described(content, name)
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
    other = rng.randrange(low, high)
    piece = content[other : other + until - at]
    return content[:at] + piece + content[at + len(piece) :]


def _described(content: bytes, name: str) -> tuple[int, int]:
    """The part of a file that says what it holds: a header, a pickle, all of a text."""
    if name.endswith(".safetensors") and len(content) > 8:
        return 0, min(len(content), 8 + int.from_bytes(content[:8], "little") + 4)
    begin, end = content.find(b"data.pkl"), content.find(b"PK\7\x08")
    return (begin, end) if 0 <= begin < end else (0, len(content))


@functools.cache
def _tree(name: str, content: bytes) -> Any:
    """What a pickle holds, as it is before it is damaged; None for other files."""
    if name == ".metadata":
        return pickle.loads(content)
    if name.endswith((".pt", ".bin")) and "fsdp" not in name and "optimizer_0" not in name:
        return torch.load(io.BytesIO(content), weights_only=False)
    return None


def _changed(value: Any, rng: random.Random) -> Any:
    """A copy with one value in it replaced, removed or repeated."""
    if rng.random() < 0.12:
        return copy.copy(rng.choice(WEIRD))
    if isinstance(value, dict) and value:
        key = rng.choice(list(value))
        made = dict(value)
        kind = rng.random()
        if kind < 0.1:
            del made[key]
        elif kind < 0.2:
            with contextlib.suppress(TypeError):
                made[rng.choice(WEIRD)] = made.pop(key)
        else:
            made[key] = _changed(value[key], rng)
        return made
    if isinstance(value, (list, tuple)) and value:
        items = list(value)
        at = rng.randrange(len(items))
        kind = rng.random()
        if kind < 0.1:
            del items[at]
        elif kind < 0.2:
            items.append(items[at])
        else:
            items[at] = _changed(items[at], rng)
        with contextlib.suppress(Exception):
            return type(value)(items)
        return tuple(items)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        made_of = copy.copy(value)
        fields = [field.name for field in dataclasses.fields(value)]
        if fields:
            field = rng.choice(fields)
            object.__setattr__(made_of, field, _changed(getattr(value, field), rng))
        return made_of
    return copy.copy(rng.choice(WEIRD))


# -- readers ----------------------------------------------------------------------------------------------


def _elements(catalog: Catalog, entry: TensorEntry) -> torch.Tensor:
    """The addresses of a stored tensor, from its first element to its last, as rows of bytes."""
    width, unit = DTYPE_BITS[entry.dtype] // 8, entry.pieces[0].unit
    with Path(catalog.files[entry.file]).open("rb") as file:
        file.seek(entry.offset)
        raw = file.read(unit * width)
    assert len(raw) == unit * width, f"{entry.name} reaches beyond its file"
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(unit, width)


def values_of(catalog: Catalog) -> Values:
    """Every tensor that a catalog speaks of, read element by element as its pieces say."""
    out: Values = {}
    for name, tensor in catalog.weights.items():
        if not 0 < tensor.numel <= MOST:
            out[name] = b""
            continue
        made = torch.full((*tensor.shape, DTYPE_BITS[tensor.dtype] // 8), 0, dtype=torch.uint8)
        written = torch.zeros(tensor.shape, dtype=torch.uint8)
        for piece in tensor.pieces:
            stored = torch.cat(
                [_elements(catalog, catalog.tensors[str(s)])[: piece.unit] for s in piece.source]
            )
            address = torch.full((), piece.offset)
            for axis in piece.axes:
                steps = torch.zeros((), dtype=torch.int64)
                for size, stride in axis:
                    steps = (steps.unsqueeze(-1) + torch.arange(size) * stride).reshape(-1)
                address = address.unsqueeze(-1) + steps.reshape(-1)
            box = tuple(slice(at, at + size) for at, size in zip(piece.origin, piece.extent, strict=True))
            made[box] = stored[address.reshape(piece.extent)]
            written[box] += 1
        assert bool((written == 1).all()), f"{name} has elements that nothing wrote, or that two parts wrote"
        out[name] = bytes(made.reshape(-1).tolist())
    return out


def _catalog(root: Path) -> Values:
    found = values_of(open_catalog(root))
    if (both := training_states(root)) is not None:
        values_of(both[2])
    return found


OWN: dict[str, Callable[[Path], Any]] = {
    **dict.fromkeys(FORMATS, _catalog),
}


class Unread(Exception):
    """The other library does not read it, either."""


def _flat(tensor: torch.Tensor) -> bytes:
    if not 0 < tensor.numel() <= MOST:
        return b""
    return bytes(tensor.detach().contiguous().reshape(-1).view(torch.uint8).tolist())


def _tensors(values: Any) -> Values:
    return {name: _flat(tensor) for name, tensor in values.items() if isinstance(tensor, torch.Tensor)}


def _by_safetensors(*patterns: str) -> Callable[[Path], Values]:
    def read(root: Path) -> Values:
        out: Values = {}
        try:
            for path in sorted(p for pattern in patterns for p in root.glob(pattern)):
                for name, info in deserialize(path.read_bytes()):
                    out[name] = bytes(info["data"])
        except SafetensorError as error:
            raise AssertionError(f"safetensors refuses what was taken: {error}") from error
        return out

    return read


def _by_index(root: Path) -> Values:
    files = sorted(
        set(json.loads((root / "model.safetensors.index.json").read_bytes())["weight_map"].values())
    )
    return _by_safetensors(*files)(root)


@contextlib.contextmanager
def _others() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable(logging.CRITICAL)
        try:
            yield
        except (Exception, CheckpointException) as error:  # the second is none of the first
            raise Unread(str(error)[:200]) from error
        finally:
            logging.disable(logging.NOTSET)


def _by_torch(root: Path) -> Values:
    with _others():
        value = torch.load(root / "pytorch_model.bin", weights_only=True)
        wrapped = value.get("state_dict")
        return _tensors(wrapped if isinstance(wrapped, dict) and _tensors(wrapped) else value)


def _by_deepspeed(root: Path) -> Values:
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    with _others(), contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        return _tensors(get_fp32_state_dict_from_zero_checkpoint(str(root), lazy_mode=False))


def _by_dcp(root: Path) -> Values:
    """By the names in the description; not by the routes there, which may lead to lists of any length."""
    import torch.distributed.checkpoint as saved_by_ranks

    catalog = open_catalog(root)
    value = {
        f"model.{name}": torch.zeros(tensor.shape, dtype=getattr(torch, _SPELLED[tensor.dtype]))
        for name, tensor in catalog.weights.items()
        if tensor.numel <= MOST
    }
    with _others():
        saved_by_ranks.load(value, checkpoint_id=root, no_dist=True)
        return {name.removeprefix("model."): _flat(tensor) for name, tensor in value.items()}


ORACLES: dict[str, Callable[[Path], Any]] = {
    "safetensors": _by_safetensors("model.safetensors"),
    "index": _by_index,
    "torch zip": _by_torch,
    "legacy pickle": _by_torch,
    "DCP": _by_dcp,
    "ZeRO-1": _by_deepspeed,
    "ZeRO-2": _by_deepspeed,
    "ZeRO-3": _by_deepspeed,
}
