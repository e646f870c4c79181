"""Save an identifier's checkpoint from its shards, with all ranks in one process."""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.conformance.checkpoints import changes_prefixes, choose, keep_prefixes, save, transpose_checked
from tests.conformance.sharded import filled, layout_of, prepare_model
from tests.conformance.suite import dtype_of
from tests.state.saving.test_saving import tensors_in
from zerostart.checkpoint.catalog import Catalog
from zerostart.checkpoint.write.shards import plan_shards
from zerostart.checkpoint.write.writer import CheckpointWriter
from zerostart.distributed.world import World
from zerostart.engines import Shard
from zerostart.live.model import LiveModel, remember_load
from zerostart.recipe import Recipe
from zerostart.state.saving.contents import describe_contents
from zerostart.state.saving.writing import plan_own_writes
from zerostart.transfer.writing import write_out
from zerostart.upstream.transformers.models import keep_conversions

WORLDS = (1, 2, 3, 4)


def check_saving(identifier: str, worlds: tuple[int, ...] = WORLDS) -> list[str]:
    """Write an identifier's checkpoints, load and save their shards, and list differences."""
    kind, config = choose(identifier)
    dtype = dtype_of(identifier)
    lines = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "hub"
        result = save(kind, config, path, dtype)
        transpose_checked(result, path)
        lines += [f"hub: {line}" for line in round_trip(kind, path, worlds)]
        if changes_prefixes(result):
            path = Path(folder) / "prefixes"
            save(kind, config, path, dtype, keep_prefixes)
            lines += [f"with prefixes: {line}" for line in round_trip(kind, path, worlds)]
    return lines


def round_trip(kind: Any, path: Path, worlds: tuple[int, ...] = WORLDS, converter: Any = None) -> list[str]:
    """Return differences between the checkpoint in ``path`` and saves of its shards.

    Unused tensors of the checkpoint are not saved; missing ones are, once initialised.
    """
    loaded = prepare_model(kind, path, converter)
    recipes = [*loaded.origins.parameters.values(), *loaded.origins.buffers.values()]
    used = {str(s) for r in recipes if isinstance(r, Recipe) for piece in r.pieces for s in piece.source}
    extra = loaded.catalog.tensors.keys() - used
    lacking = bool(loaded.origins.initialised)
    model = loaded.built.model
    keep_conversions(model, loaded.recipes.conversions)
    values = filled(loaded)
    lines = []
    for world in worlds:
        for flat in (True, False):
            where = f"world {world}, {'flat' if flat else 'Shard(0)'}"
            with tempfile.TemporaryDirectory() as out:
                own = _save(loaded, values, world, flat, Path(out))
                lines += [f"{where}: {name} has its own name: {why}" for name, why in own.items()]
                lines += [f"{where}: {line}" for line in _differences(Path(out), path, extra, lacking)]
    return lines


def _save(loaded: Any, values: dict[str, torch.Tensor], size: int, flat: bool, out: Path) -> dict[str, str]:
    model = loaded.built.model
    origins = loaded.origins
    recipes = {n: r for n, r in {**origins.parameters, **origins.buffers}.items() if isinstance(r, Recipe)}
    own: dict[str, str] = {}
    writer: CheckpointWriter | None = None
    for rank in range(size):
        shards = {
            alias: _shard(name, value, flat, rank, size)
            for name, value in values.items()
            for alias in loaded.names[name]
        }
        record: Any = _Record(loaded.catalog, recipes, shards)
        remember_load(model, record)
        live = LiveModel(model, World(rank, size, None))
        contents = describe_contents(live, live.tensors()[0], None)
        layout = plan_shards(contents.entries, "300KB")
        if writer is None:
            writer, own = CheckpointWriter(out, layout, durable=False), contents.own_names
            writer.create()
        assert writer.layout == layout, "ranks plan different files"
        plan, sources = plan_own_writes(layout, contents.outgoing, 1 << 16)
        write_out(plan, sources, writer)
    assert writer is not None
    writer.commit()
    return own


@dataclass(frozen=True)
class _Record:
    """A record of a simulated load, with given shards."""

    catalog: Catalog
    recipes: dict[str, Recipe]
    given_shards: dict[str, Shard]

    def shards(self, model: object) -> dict[str, Shard]:
        return self.given_shards


def _shard(name: str, value: torch.Tensor, flat: bool, rank: int, size: int) -> Shard:
    at: Callable[[int], Any] = lambda r: layout_of(tuple(value.shape), flat, r, size)  # noqa: E731
    layout = at(rank)
    storage = torch.zeros(layout.numel, dtype=value.dtype)
    for first, count, place in layout.runs():
        storage[place : place + count] = value.reshape(-1)[first : first + count]
    return Shard(name, layout, storage, at)


def _differences(out: Path, path: Path, extra: set[str], lacking: bool) -> list[str]:
    got, want = tensors_in(out), tensors_in(path if path.is_dir() else path.parent)
    lines = [f"{name} is not saved" for name in want.keys() - got.keys() - extra]
    if not lacking:
        lines += [f"{name} is saved and was not there" for name in got.keys() - want.keys()]
    for name in sorted((want.keys() & got.keys()) - extra):
        item, other = got[name], want[name]
        if item.dtype == torch.float32 and other.dtype in (torch.float16, torch.bfloat16):
            item = item.to(other.dtype)  # the model also saves in fp32 the tensors that it keeps so
        if (item.dtype, item.shape) != (other.dtype, other.shape):
            lines.append(
                f"{name} is {item.dtype} {tuple(item.shape)}, not {other.dtype} {tuple(other.shape)}"
            )
        elif not torch.equal(item.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8)):
            lines.append(f"{name} has other values")
    return lines
