"""Arms of the load benchmark with other readers, which only read.

They do less than a load: each rank gets as many bytes of checkpoint tensors as its shards have, not always
shards of parameters, and no tensor is converted.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cells import PEERS

__all__ = ["PEER_ARMS"]

CHUNK = 2 << 20  # run:ai's own default for a file system


def header(path: Path) -> tuple[dict[str, Any], int]:
    """Return the header of a safetensors file, and the offset of its data."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        entries = json.loads(file.read(size))
    entries.pop("__metadata__", None)
    return entries, 8 + size


def own_names(checkpoint: Path) -> dict[Path, list[str]]:
    """Return the names of this rank's share of tensors by file, in byte order."""
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    shares = {}
    for path in sorted(checkpoint.glob("*.safetensors")):
        entries, _ = header(path)
        names = sorted(entries, key=lambda name: entries[name]["data_offsets"][0])
        total = max(entry["data_offsets"][1] for entry in entries.values())
        shares[path] = [n for n in names if entries[n]["data_offsets"][0] * ranks // total == rank]
    return shares


def prepare_safetensors(checkpoint: Path) -> Callable[[], Any]:
    """Read a dimension-0 shard of every tensor with ``get_slice``, and clone it."""
    from safetensors import safe_open

    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

    def read() -> Any:
        tensors = {}
        for path in sorted(checkpoint.glob("*.safetensors")):
            with safe_open(path, "pt") as file:
                for name in file.keys():  # noqa: SIM118  # no dictionary
                    part = file.get_slice(name)
                    size = part.get_shape()[0]
                    tensors[name] = part[size * rank // ranks : size * (rank + 1) // ranks].clone()
        return tensors

    return read


def prepare_dcp(checkpoint: Path) -> Callable[[], Any]:
    """Read into ``Shard(0)`` DTensors with torch's distributed checkpoint."""
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, empty

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def read() -> Any:
        state: dict[str, Any] = {}
        for path in sorted(checkpoint.glob("*.safetensors")):
            entries, _ = header(path)
            for name, entry in entries.items():
                shape = entry["shape"]
                state[name] = empty(*shape, dtype=torch.bfloat16, device_mesh=mesh, placements=[Shard(0)])
        dcp.load(state, storage_reader=HuggingFaceStorageReader(str(checkpoint)))
        return {name: tensor.to_local() for name, tensor in state.items()}

    return read


def prepare_fastsafetensors(checkpoint: Path) -> Callable[[], Any]:
    """Read a share of the tensors with fastsafetensors' nogds copier on the CPU."""
    sys.path.insert(0, str(PEERS))
    from fastsafetensors import SafeTensorsFileLoader, SingleGroup

    def read() -> Any:
        own = {name for names in own_names(checkpoint).values() for name in names}
        loader = SafeTensorsFileLoader(SingleGroup(), "cpu", nogds=True)
        loader.set_tensor_filter(own.__contains__)
        loader.add_filenames({0: [str(path) for path in sorted(checkpoint.glob("*.safetensors"))]})
        buffers = loader.copy_files_to_device()
        return {name: buffers.get_tensor(name) for name in loader.get_keys()}

    return read


def prepare_runai(checkpoint: Path) -> Callable[[], Any]:
    """Read a share of the bytes with Run:ai Model Streamer, copied from its ring."""
    sys.path.insert(0, str(PEERS))
    import torch
    from runai_model_streamer.file_streamer.file_streamer import FileStreamer
    from runai_model_streamer.file_streamer.requests_iterator import FileChunks

    def read() -> Any:
        requests, starts, total = [], [], 0
        for number, (path, names) in enumerate(own_names(checkpoint).items()):
            entries, data = header(path)
            begin = data + entries[names[0]]["data_offsets"][0]
            end = data + entries[names[-1]]["data_offsets"][1]
            sizes = [min(CHUNK, end - low) for low in range(begin, end, CHUNK)]
            requests.append(FileChunks.contiguous(number, str(path), begin, sizes))
            starts.append(total)
            total += end - begin
        target = torch.empty(total, dtype=torch.uint8)
        with FileStreamer() as streamer:
            streamer.stream_files(requests)
            for number, index, chunk in streamer.get_chunks():
                low = starts[number] + index * CHUNK
                target[low : low + chunk.numel()] = chunk.view(-1)
        return {"": target}

    return read


PEER_ARMS = {
    "safetensors": prepare_safetensors,
    "dcp": prepare_dcp,
    "fastsafetensors": prepare_fastsafetensors,
    "runai-streamer": prepare_runai,
}
