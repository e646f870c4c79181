"""Convert a checkpoint of any readable format to safetensors or to ``torch.distributed.checkpoint``."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from zerostart import geometry, models
from zerostart.checkpoint.catalog import Catalog, TensorEntry
from zerostart.checkpoint.paths import located, scheme_of, shown_record, shown_url
from zerostart.checkpoint.source import read_config
from zerostart.checkpoint.write.shards import parse_size
from zerostart.distributed.world import World, current_world
from zerostart.engines import Shard
from zerostart.errors import ConfigError
from zerostart.geometry.layout.layout import flat_run
from zerostart.loading.preparation import make_comparison
from zerostart.models import Built, ModelLibrary
from zerostart.recipe import Recipe, SymbolicTensor, Target, main_dtype, one_thread
from zerostart.recipe.dtypes import spelling, torch_dtype
from zerostart.state.converting.distributed import save_distributed
from zerostart.state.converting.source import SourceReader, SourceTensor, open_source
from zerostart.state.saving.save import copy_companion_files
from zerostart.state.saving.writing import Outgoing, agree_on_place, open_publication, write_tensors

#: Floating types that may be cast to each other; the others are quantised.
PLAIN_FLOATS = ("F64", "F32", "BF16", "F16")
FORMATS = ("hf", "dcp", "original")


@dataclass(frozen=True)
class Converted:
    """The result of a conversion; ``bytes`` is the size of all tensors."""

    path: Path | str
    files: tuple[str, ...]
    tensors: int
    bytes: int

    def __repr__(self) -> str:
        return shown_record(self)


def convert(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    to: str = "hf",
    *,
    dtype: torch.dtype | None = None,
    max_shard_size: int | str = "5GB",
    replace: bool = False,
) -> Converted:
    """Convert a checkpoint as ``zerostart.convert`` documents it; collective.

    With ``replace`` the directory ``out`` may have files; a model in it is replaced.
    """
    if to not in FORMATS:
        raise ConfigError(f"to={to!r} is none of the formats that are written: {', '.join(FORMATS)}")
    if dtype is not None and not (isinstance(dtype, torch.dtype) and spelling(dtype) in PLAIN_FLOATS):
        raise ConfigError(f"dtype={dtype!r} is not a floating type that weights are stored in")
    parse_size(max_shard_size)
    world = current_world()
    with world.phase("converting"):
        place = agree_on_place(out, world, "converting to")
        with world.phase("opening the source"):
            catalog = open_source(source)
            _check_free(place, catalog, replace)
            weights, dequantised = _describe_weights(catalog, to)
            tensors = {name: _cast(tensor, dtype) for name, tensor in weights.items()}
        reader = SourceReader(catalog)
        if to == "dcp":
            if scheme_of(place):
                raise ConfigError(f"dcp cannot be written to {shown_url(str(place))}: convert to a directory")
            directory = Path(place)
            files = save_distributed(
                reader, tensors, directory, world, lambda to: _copy_settings(catalog, to, dtype, dequantised)
            )
            nbytes = sum(tensor.nbytes for tensor in tensors.values())
            return Converted(located(out), files, len(tensors), nbytes)
        config = _read_config(catalog)
        with open_publication(place, world) as publication:
            written = write_tensors(
                publication,
                [(name, spelling(tensor.dtype, name), tensor.shape) for name, tensor in tensors.items()],
                [_describe_outgoing(reader, name, tensor, world) for name, tensor in tensors.items()],
                world,
                stem="diffusion_pytorch_model" if "_class_name" in config else "model",
                max_shard_size=max_shard_size,
                parameters=sum(tensor.numel for tensor in tensors.values()),
            )
            with publication.open_phase(world, "copying the configuration"):
                if world.rank == 0:
                    _copy_settings(catalog, publication.directory, dtype, dequantised)
            publication.add_digests(written.digests)
    names = [publication.names.get(file.name, file.name) for file in written.layout.files]
    return Converted(located(out), tuple(names), len(tensors), written.layout.total_size)


def _check_free(place: Path | str, catalog: Catalog, replace: bool) -> None:
    """Raise ConfigError if ``place`` is the source or has files to keep."""
    folders = {file.rpartition("/")[0] for file in catalog.files}
    if isinstance(place, str):
        is_source = place in folders
    else:
        is_source = os.path.realpath(place) in map(os.path.realpath, folders)
    if is_source:
        raise ConfigError(f"{shown_url(str(place))} is the checkpoint to convert: name another directory")
    if isinstance(place, Path) and not replace and place.exists():
        if not place.is_dir():
            raise ConfigError(f"{place} is a file: name a directory")
        existing = next((path.name for path in sorted(place.iterdir()) if path.name != ".zerostart"), None)
        if existing is not None:
            raise ConfigError(f"{place}/{existing} exists: convert to an empty or a new directory")


def _read_config(catalog: Catalog) -> Mapping[str, object]:
    return (read_config(catalog.root) if catalog.root else None) or {}


def _cast(tensor: SourceTensor, dtype: torch.dtype | None) -> SourceTensor:
    plain = spelling(tensor.dtype) in PLAIN_FLOATS
    return tensor if dtype is None or not plain else dataclasses.replace(tensor, dtype=dtype)


def _describe_weights(catalog: Catalog, to: str) -> tuple[dict[str, SourceTensor], bool]:
    """Return the tensors to write by name, and True if they are dequantised."""
    if to == "original":
        return _revert_weights(catalog)
    stored = {
        name: SourceTensor(name, torch_dtype(entry.dtype, name), entry.shape, entry.pieces)
        for name, entry in catalog.weights.items()
    }
    if to == "hf" and catalog.assembled is not None and _read_config(catalog).get("tie_word_embeddings"):
        stored = _drop_ties(stored, catalog)
    return stored, False


def _drop_ties(stored: Mapping[str, SourceTensor], catalog: Catalog) -> dict[str, SourceTensor]:
    first_names: dict[object, str] = {}
    for name, tensor in stored.items():
        key = (tuple(_source_ranges(tensor, catalog.tensors)), tensor.shape) if tensor.numel else name
        first_names.setdefault(key, name)
    return {name: stored[name] for name in first_names.values()}


def _source_ranges(tensor: SourceTensor, stored: Mapping[str, TensorEntry]) -> Iterator[object]:
    for piece in tensor.pieces:
        where = [(e.file, e.offset, e.dtype, e.strides) for s in piece.source if (e := stored.get(str(s)))]
        yield piece.origin, piece.axes, tuple(where), piece.unit, piece.offset


def _revert_weights(catalog: Catalog) -> tuple[dict[str, SourceTensor], bool]:
    built, by_name = _build_model(catalog)
    if type(built.library).revert is ModelLibrary.revert:
        raise ConfigError(
            f"{type(built.model).__name__} is of {built.library.name}, which cannot restore the "
            "layout of a release: convert to hf, which keeps the names of the source"
        )
    with one_thread():
        symbols = {
            name: SymbolicTensor.filled(recipe.pieces, recipe.target.shape, recipe.target.dtype)
            for name, recipe in by_name.items()
        }
        reverted = built.library.revert(built.model, dict(symbols))
    weights = {}
    for name, tensor in reverted.items():
        if not isinstance(tensor, SymbolicTensor):
            raise ConfigError(f"{built.library.name} computes {name} when it reverts its conversions")
        weights[name] = SourceTensor(name, tensor.dtype, tuple(tensor.shape), tensor.value.pieces)
    return weights, built.quantizer is not None


def _build_model(catalog: Catalog) -> tuple[Built, Mapping[str, Recipe]]:
    """Build the configured model on meta, and trace where its tensors come from.

    Raises BuildError if the configuration names no class, and CoverageError if names do not match.
    """
    shapes = {name: entry.shape for name, entry in catalog.weights.items()}
    stored = {name: torch_dtype(entry.dtype, name) for name, entry in catalog.weights.items()}
    first = next((d for d in stored.values() if d.is_floating_point and d.itemsize > 1), None)
    main = main_dtype(catalog.weights.values())
    models.import_code(None, catalog.root, shapes)
    built = models.build(None, catalog.root, None, first, main, False, shapes)
    models.set_dtypes(built, stored)
    recipes = built.recipes(catalog, built.library.expectations(built))
    coverage = models.tie_names(built, recipes, make_comparison(catalog, World(0, 1, None)))
    coverage.check(catalog.place, type(built.model).__name__, True)
    return built, recipes.by_name


def _describe_outgoing(reader: SourceReader, name: str, tensor: SourceTensor, world: World) -> Outgoing:
    """Describe a tensor whose elements are read from the source while it is written."""
    layout = flat_run(tensor.shape, 0, tensor.numel)
    # One expanded element: the writer takes the values from ``change``.
    storage = torch.empty(1, dtype=tensor.dtype, device="cpu").expand(tensor.numel)
    shard = Shard(name, layout, storage, lambda _: layout, (world.rank, world.size))
    recipe = Recipe(Target(name, tensor.shape, tensor.dtype), geometry.whole(name, tensor.shape))
    return Outgoing(recipe, shard, lambda first, data: reader.read(tensor, first, data.numel()))


def _copy_settings(catalog: Catalog, to: Path, dtype: torch.dtype | None, dequantised: bool) -> None:
    config, root = dict(_read_config(catalog)), Path(catalog.root)
    if not config:
        return
    copy_companion_files(root, to)
    for name in ("generation_config.json", "adapter_config.json"):
        if (root / name).is_file():
            shutil.copyfile(root / name, to / name)
    if "_class_name" in config or not (dtype or dequantised):
        shutil.copyfile(root / "config.json", to / "config.json")
        return
    if dequantised:
        config.pop("quantization_config", None)
    if dtype is not None:
        config.pop("torch_dtype", None)
        config["dtype"] = str(dtype).removeprefix("torch.")
    text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
    (to / "config.json").write_text(text, encoding="utf-8")
