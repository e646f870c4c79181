"""Save and read small tensors in one directory."""

import json
import time
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file

from zerostart.checkpoint.digest import Digests
from zerostart.checkpoint.formats.saved_state import open_saved_state
from zerostart.checkpoint.manifest import documents
from zerostart.checkpoint.write.shards import plan_shards
from zerostart.checkpoint.write.writer import CheckpointWriter
from zerostart.distributed.world import World
from zerostart.state.saving.writing import Publication, open_publication

ONE_RANK = World(0, 1, None)
ENTRIES = [("a", "F32", (4, 3)), ("b", "F32", (5,)), ("c", "F32", ())]
SHARDS, SINGLE = 40, 1 << 30


def write(publication: Publication, folder: str, value: float, size: int, stem: str) -> None:
    """Write tensors full of ``value`` by this process."""
    layout = plan_shards(ENTRIES, size, stem)
    digests = Digests(ENTRIES)
    with CheckpointWriter(publication.directory / folder, layout) as writer:
        for name, _, shape in ENTRIES:
            tensor = torch.full(shape, float(value)).reshape(-1)
            writer.write(name, tensor.numpy().data.cast("B"))
            digests.add(name, 0, tensor)
    publication.add_digests(digests.summed(ONE_RANK), folder)


def write_config(publication: Publication, name: str, value: float) -> None:
    (publication.directory / name).write_text(json.dumps({"value": value}))


def save_model(path: Path, value: float, size: int = SHARDS, world: World = ONE_RANK) -> None:
    with open_publication(path, world) as publication:
        if world.rank == 0:
            write(publication, ".", value, size, "model")
            write_config(publication, "config.json", value)
            write_config(publication, "tokenizer.json", value)


def save_adapters(path: Path, value: float, size: int = SINGLE) -> None:
    """Save two adapters, each in its folder."""
    with open_publication(path, ONE_RANK) as publication:
        for folder in (".", "second"):
            write(publication, folder, value, SINGLE, "adapter_model")
            write_config(publication, f"{folder}/adapter_config.json", value)


def save_state(path: Path, value: float, size: int = SHARDS) -> None:
    with open_publication(path, ONE_RANK, marker="state.json") as publication:
        write(publication, "model", value, size, "model")
        write_config(publication, "model/config.json", value)
        write(publication, "state", value, size, "state")
        publication.document["saved_at_ns"] = time.time_ns()


KINDS: dict[str, Callable[[Path, float, int], None]] = {
    "model": save_model,
    "adapters": save_adapters,
    "state": save_state,
}


def _single_value(values: set[float], source: object) -> float:
    (value,) = values or {float("nan")}
    assert value == value, source
    return value


def _values_in_files(folder: Path, names: list[str]) -> set[float]:
    return {v for name in names for t in load_file(folder / name).values() for v in t.reshape(-1).tolist()}


def read_plainly(folder: Path, stem: str = "model", index_first: bool = False) -> float | None:
    """Read like transformers, or like diffusers with the index first."""
    single, index = folder / f"{stem}.safetensors", folder / f"{stem}.safetensors.index.json"
    for path in (index, single) if index_first else (single, index):
        if path.is_file():
            if path == single:
                return _single_value(_values_in_files(folder, [single.name]), path)
            names = set(json.loads(path.read_text())["weight_map"].values())
            return _single_value(_values_in_files(folder, sorted(names)), path)
    return None


def value_of(path: Path, kind: str) -> float | None:
    """Return the single value that all readers see, or None."""
    if kind == "state":
        if not (path / "state.json").is_file():
            return None
        _, catalogs = open_saved_state(path, ["model", "state"])
        values = {_single_value(_values_in_files(path, list(c.files)), path) for c in catalogs}
        assert read_plainly(path / "model") is not None
        assert read_plainly(path / "model", index_first=True) is not None
        return _single_value(values, path)
    if kind == "model":
        value = read_plainly(path)
        assert (read_plainly(path, index_first=True) is None) == (value is None)
        return value
    return read_plainly(path, "adapter_model")


def listed_files(path: Path) -> list[str]:
    """Return the files that the manifests list."""
    return sorted({name for document in documents(path) for name in document["files"]})
