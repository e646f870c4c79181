"""Turn the ``source`` arguments of all ranks into one catalog."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from zerostart import models
from zerostart.checkpoint.catalog import Catalog
from zerostart.checkpoint.memory import memory_catalog, signature
from zerostart.checkpoint.settings import settings_here
from zerostart.checkpoint.source import (
    WeightFiles,
    fetch_as,
    open_catalog,
    present,
    seen_here,
)
from zerostart.checkpoint.storage import LocalFiles
from zerostart.distributed.machine import describe_mounts
from zerostart.distributed.world import World
from zerostart.errors import ConfigError, ReadError


def open_source(source: object, world: World) -> Catalog:
    """Open the catalog of ``source``; collective. Raises ConfigError if every rank passes None."""
    catalog = open_optional_source(source, world)
    if catalog is None:
        raise ConfigError("source is None on every rank; pass a path, a hub id or a mapping of tensors")
    return catalog


def open_optional_source(
    source: Any, world: World, model: object = None, fetch: bool = False
) -> Catalog | None:
    """Open the catalog of ``source``; None if every rank passes None; collective.

    Rank 0 parses the headers of a path or hub id for all ranks. In a pipeline the component with the class of
    ``model`` is opened. With ``fetch`` each machine downloads a hub id that its cache lacks. A mapping of
    tensors, or a catalog, is passed on every rank.

    Raises ConfigError if ranks pass different sources, and ReadError if copies of the files on several
    machines differ.
    """
    if isinstance(source, Catalog):
        views = world.all_gather_object(describe_mounts(), "arguments")
        return _as_seen_here(source, views, world)
    arguments = world.all_gather_object((_kind(source), describe_mounts()), "arguments")
    kinds = [kind for kind, _ in arguments]
    if set(kinds) == {"None"}:
        return None
    _check_kinds(kinds)
    if kinds[0] == "path":
        # Other ranks wait for a download without a timeout.
        broadcast = world.broadcast_slow if fetch and _may_be_hub_id(source) else world.broadcast_object
        catalog = broadcast(
            lambda: open_catalog(present(source, _classes(model)) if fetch else source, _classes(model)),
            "reading the checkpoint's headers",
        )
        return _as_seen_here(catalog, [view for _, view in arguments], world)
    with world.phase("looking at the mapping"):
        own = memory_catalog(source)
    signatures = world.all_gather_object(signature(own), "looking at the mapping")
    if len(set(signatures)) > 1:
        rank = next(rank for rank, one in enumerate(signatures) if one != signatures[0])
        raise ConfigError(
            f"source: the mappings of ranks 0 and {rank} differ in names, order, dtypes or shapes; pass the "
            "same on each"
        )
    return own


def _as_seen_here(catalog: Catalog, views: Sequence[str], world: World) -> Catalog:
    """Return the catalog with the file states of this machine.

    Machines may share the files or have copies: only their lengths are compared. ``views`` identifies the
    file system of each rank, and the first rank with the same view asks for all.
    """
    first = views.index(views[world.rank])
    if catalog.storage.folder and catalog.root and len(set(views)) > 1:
        return replace(catalog, root=_settings_here(catalog, first, world))
    if len(set(views)) == 1 or not isinstance(catalog.storage, LocalFiles):
        return catalog
    own = catalog
    with world.phase("looking at the files"):
        if world.rank == first:
            fetch_as(catalog.root, catalog.files)
            own = seen_here(catalog)
    states = world.all_gather_object(own.storage.identities, "looking at the files")[first]
    return replace(catalog, storage=replace(catalog.storage, identities=states))


def _settings_here(catalog: Catalog, first: int, world: World) -> str:
    doing = "fetching the files beside the weights"
    own = ""
    with world.phase(doing):
        if world.rank == first:
            own = settings_here(catalog.storage.directory())
            # The directory is named by a digest of its contents.
            if Path(own).name != Path(catalog.root).name:
                raise ReadError(
                    f"{catalog.place}: the files beside the weights were changed while the checkpoint was "
                    "opened; load again when nobody writes to it"
                )
    return world.all_gather_object(own, doing)[first]


def check_model(model: Any, source: object, catalog: Catalog) -> None:
    """Raise ConfigError if ``model`` needs a configuration file, which only a directory has."""
    if catalog.root:
        return
    if models.needs_config(model):
        clause = "without model=" if model is None else f"for model={model.__name__}"
        raise ConfigError(
            f"source is {name_source(source, catalog)}, which has no config.json to build from {clause}; "
            "pass a model built on the meta device, or a callable that builds it: model=lambda: Class(config)"
        )


def name_source(source: object, catalog: Catalog) -> str:
    """Return the name of the source for messages; equal on all ranks."""
    if not isinstance(source, (str, os.PathLike, WeightFiles)):
        return catalog.storage.name
    storage = catalog.storage
    if storage.folder and any(mark in str(source) for mark in "?@"):  # a signature, a password
        return f"{storage.folder}/{storage.asked}".rstrip("/")
    return str(Path(str(source)) / catalog.component) if catalog.component else str(source)


def _may_be_hub_id(source: object) -> bool:
    text = str(source)
    return text.count("/") <= 1 and not text.startswith((".", "/", "~")) and "://" not in text


def _classes(model: object) -> tuple[str, ...]:
    kind = type(model) if isinstance(model, nn.Module) else model
    if not isinstance(kind, type):
        return ()
    return tuple(base.__name__ for base in kind.__mro__ if issubclass(base, nn.Module))


def _kind(source: object) -> str:
    if source is None:
        return "None"
    if isinstance(source, Mapping):
        return "mapping"
    return "path" if isinstance(source, (str, os.PathLike, WeightFiles)) else type(source).__name__


def _check_kinds(kinds: Sequence[str]) -> None:
    """Raise ConfigError unless all ranks pass a path, or all a mapping."""
    for rank, kind in enumerate(kinds):
        if kind not in ("None", "mapping", "path"):
            raise ConfigError(
                f"source is a {kind} (rank {rank}), and neither a path, a hub id nor a mapping of tensors"
            )
    if len(set(kinds)) > 1:
        raise ConfigError(
            f"source is {', '.join(kinds)} on ranks 0 to {len(kinds) - 1}; pass a path or a mapping on every "
            "rank: what one rank has in memory can be saved to a file (safetensors.torch.save_file) first"
        )
