"""Save a sharded model as a checkpoint in its original layout."""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from rich.filesize import decimal
from torch import nn

from zerostart.checkpoint.manifest import group_of
from zerostart.checkpoint.paths import shown_record, shown_url
from zerostart.checkpoint.strict_json import JsonObject
from zerostart.checkpoint.write.shards import parse_size
from zerostart.distributed.world import current_world
from zerostart.engines import Shard
from zerostart.errors import ConfigError, WriteError
from zerostart.live.model import LiveModel, LoadRecord, LogicalTensor
from zerostart.live.training import LiveTraining
from zerostart.models import ModelLibrary, library_of
from zerostart.state.saving.adapters import (
    PEFT_FORMAT,
    Adapted,
    AdapterFile,
    AdapterFormat,
    find_adapted_model,
    has_adapters,
    list_adapter_files,
    merge_into_weights,
)
from zerostart.state.saving.contents import (
    Contents,
    TensorOverrides,
    apply_overrides,
    describe_contents,
    rename_contents,
)
from zerostart.state.saving.writing import Publication, Written, open_publication, write_tensors


@dataclass(frozen=True)
class SaveRequest:
    """A model to save, wrapped or not, and the arguments of ``zerostart.save``.

    ``write_config``: write the config files. ``copy_files``: copy tokenizer and code files of the source.
    """

    model: nn.Module
    max_shard_size: int | str = "5GB"
    dtype: torch.dtype | None = None
    trainable_only: bool = False
    adapters_only: bool = False
    merge_adapters: bool = False
    memory_limit: int | None = None
    copy_files: bool = True
    write_config: bool = True
    adapter_format: AdapterFormat = PEFT_FORMAT
    renamed: Callable[[str], str] | None = None
    stem: str | None = None
    overrides: TensorOverrides | None = None

    def check(self) -> None:
        """Raise ConfigError for invalid arguments."""
        parse_size(self.max_shard_size)
        if self.dtype is not None and not self.dtype.is_floating_point:
            raise ConfigError(f"dtype={self.dtype!r} must be a floating-point torch.dtype")
        chosen = [n for n in ("trainable_only", "adapters_only", "merge_adapters") if getattr(self, n)]
        if len(chosen) > 1:
            raise ConfigError(f"{' and '.join(chosen)} exclude each other; pass True for one of them only")


@dataclass(frozen=True)
class SaveReport:
    """The result of a save; the same on every rank except ``written_bytes``."""

    path: str
    files: tuple[str, ...]
    #: Names in the files.
    tensors: tuple[str, ...]
    #: Size of all tensors, in bytes.
    total_bytes: int
    #: Bytes that this rank wrote.
    written_bytes: int
    seconds: float
    #: Reason for each tensor that is saved under the model's own name and in its dtype.
    own_names: dict[str, str]
    #: Saved name of each tied tensor that is not saved under its own name.
    tied: dict[str, str]

    def __repr__(self) -> str:
        return shown_record(self)

    def __str__(self) -> str:
        lines = [
            f"saved {len(self.tensors)} tensors, {decimal(self.total_bytes)}, in {len(self.files)} "
            f"files to {shown_url(self.path)} in {self.seconds:.1f} s; this rank "
            f"{decimal(self.written_bytes)}"
        ]
        lines += [f"  {name} under the model's own name: {why}" for name, why in self.own_names.items()]
        return "\n".join(lines)


def save_model(request: SaveRequest, path: str | os.PathLike[str]) -> SaveReport:
    """Save a model; see ``zerostart.save``."""
    start = time.perf_counter()
    world = current_world()
    with world.phase("saving the model"):
        with world.phase("arguments"):
            request.check()
            live = LiveModel(request.model, world)
            adapted = find_adapted_model(live.wrapper, within=request.adapters_only)
            _check_adapters(live.module, adapted, request)
        with open_publication(path, world) as publication:
            if request.adapters_only:
                assert adapted is not None, "checked above"
                saved_parts = _save_adapters(live, adapted, publication, request)
            else:
                saved_parts = [(".", *_save_whole_model(live, publication, request))]
            for folder, written, _ in saved_parts:
                publication.add_digests(written.digests, folder)
    return _make_report(path, saved_parts, publication.names, time.perf_counter() - start)


def _check_adapters(inner: nn.Module, adapted: Adapted | None, request: SaveRequest) -> None:
    is_adapted = has_adapters(inner)
    if (request.adapters_only or request.merge_adapters) and adapted is None:
        argument = "adapters_only" if request.adapters_only else "merge_adapters"
        raise ConfigError(f"{argument}=True, but this {type(inner).__name__} has no adapters; leave it False")
    if is_adapted and not (request.adapters_only or request.merge_adapters or request.trainable_only):
        raise ConfigError(
            f"this {type(inner).__name__} has adapters: save only the adapters with "
            "adapters_only=True, or the whole model with the adapters in its weights with "
            "merge_adapters=True"
        )


#: Folder, files and tensors of one part of a save.
SavedPart = tuple[str, Written, Contents]


def _save_whole_model(
    live: LiveModel, publication: Publication, request: SaveRequest
) -> tuple[Written, Contents]:
    world, inner, record = live.world, live.module, live.record
    with world.phase("collecting the tensors"):
        contents, parameters = collect_saved_contents(live, request)
        stem = request.stem or _choose_stem(inner, record)
    written = write_tensors(
        publication,
        contents.entries,
        contents.outgoing,
        world,
        stem=stem,
        max_shard_size=request.max_shard_size,
        parameters=parameters,
        memory_limit=request.memory_limit,
        before=contents.before,
    )
    with publication.open_phase(world, "saving the settings"):
        if world.rank == 0 and request.write_config:
            # A model that zerostart has not loaded has no record of its source directory.
            root = record.catalog.root if record is not None and request.copy_files else ""
            save_settings(inner, publication.directory, root, request.dtype)
    return written, contents


def collect_saved_contents(live: LiveModel, request: SaveRequest) -> tuple[Contents, int]:
    """Return the tensors to save of a whole model, and its parameter count; collective.

    Raises ConfigError for adapters that cannot be merged.
    """
    tensors, tied = live.tensors()
    # The order matters: masters replace rounded parameters, overrides replace both, and adapters are merged
    # into the result.
    if request.dtype == torch.float32:
        tensors = apply_overrides(tensors, _master_overrides(live), live.world)
    if request.overrides is not None:
        tensors = apply_overrides(tensors, request.overrides, live.world)
    if request.merge_adapters:
        tensors = merge_into_weights(live.module, tensors)
    if request.trainable_only:
        tensors = [item for item in tensors if item.trained]
    if request.renamed is not None:
        contents = rename_contents(tensors, request.renamed, request.dtype)
    else:
        contents = describe_contents(live, tensors, request.dtype)
    contents.tied = tied
    return contents, sum(prod(item.shard.layout.shape) for item in tensors if item.is_parameter)


def _save_adapters(
    live: LiveModel, adapted: Adapted, publication: Publication, request: SaveRequest
) -> list[SavedPart]:
    world, written_as = live.world, request.adapter_format
    with world.phase("collecting the adapters"):
        files = _list_adapter_files(live, adapted, request)
    saved_parts = []
    for file in files:
        directory = publication.directory / file.folder
        with publication.open_phase(world, "creating the adapter's folder"):
            if world.rank == 0:
                # Other ranks use the folder after the phase, which ends with a barrier.
                directory.mkdir(exist_ok=True)
        written = write_tensors(
            publication,
            file.contents.entries,
            file.contents.outgoing,
            world,
            folder=file.folder,
            stem=written_as.stem,
            max_shard_size=2**62,  # PEFT reads one file
            metadata=file.metadata,
            memory_limit=request.memory_limit,
        )
        with publication.open_phase(world, "saving the adapter's configuration"):
            if world.rank == 0 and written_as.configured:
                adapted.save_config(file.name, directory, written_as.per_expert)
        saved_parts.append((file.folder, written, file.contents))
    return saved_parts


def _list_adapter_files(live: LiveModel, adapted: Adapted, request: SaveRequest) -> list[AdapterFile]:
    tensors, _ = live.tensors()
    if request.overrides is not None:
        tensors = apply_overrides(tensors, request.overrides, live.world)
    shards = _find_shards_by_id(live.module, tensors)
    return list_adapter_files(adapted, shards, request.dtype, request.adapter_format)


def collect_served_contents(live: LiveModel, dtype: torch.dtype | None, merge_adapters: bool) -> Contents:
    """Return the merged model, or its only adapter, for an inference engine; collective.

    Raises ConfigError for adapters that cannot be merged, and for no or several adapters.
    """
    if merge_adapters:
        request = SaveRequest(live.wrapper, dtype=dtype, merge_adapters=has_adapters(live.module))
        return collect_saved_contents(live, request)[0]
    adapted = find_adapted_model(live.wrapper, within=True)
    request = SaveRequest(live.wrapper, dtype=dtype, adapters_only=True)
    files = [] if adapted is None else _list_adapter_files(live, adapted, request)
    if len(files) != 1:
        names = f"{len(files)} ({', '.join(file.name for file in files)})" if files else "none"
        raise ConfigError(
            f"merge_adapters=False serves exactly one adapter, but this {type(live.module).__name__} has "
            f"{names}: leave the argument out, or delete the other adapters"
        )
    return files[0].contents


def _master_overrides(live: LiveModel) -> TensorOverrides:
    """Return the fp32 masters as overrides of the parameters."""
    training = LiveTraining(live.wrapper, None, live.world)
    return TensorOverrides({one.name: one.shard for one in training.masters()}, training.ties)


def _find_shards_by_id(inner: nn.Module, tensors: list[LogicalTensor]) -> dict[int, Shard]:
    """Map the ``id`` of each tensor in the model's state dict to its shard."""
    state = inner.state_dict(keep_vars=True)
    # PEFT selects tensors from the state dict itself, so only ``id`` connects them with their shards.
    return {id(state[t.current_name]): t.shard for t in tensors if t.current_name in state}


def _choose_stem(model: nn.Module, record: LoadRecord | None) -> str:
    stem = library_of(model).weights_stem
    if record is None or stem == ModelLibrary.weights_stem:
        return stem
    if record.catalog.assembled or not any(recipe.converted for recipe in record.recipes.values()):
        return stem
    # A converted checkpoint is saved in the layout of the original release, under its file names.
    files = (Path(file) for file in record.catalog.files if file.endswith((".safetensors", ".sft")))
    stems = {group for file in files if (group := group_of(f"{file.stem}.safetensors"))}
    return stems.pop() if len(stems) == 1 else "model"


def _make_report(
    path: str | os.PathLike[str], saved_parts: list[SavedPart], names: Mapping[str, str], seconds: float
) -> SaveReport:
    files: list[str] = []
    own: JsonObject = {}
    tied: dict[str, str] = {}
    for folder, written, contents in saved_parts:
        prefix = "" if folder == "." else f"{folder}/"
        files += [names.get(prefix + file.name, prefix + file.name) for file in written.layout.files]
        own |= contents.own_names
        tied |= contents.tied
    return SaveReport(
        path=os.fspath(path),
        files=tuple(files),
        tensors=tuple(name for _, written, _ in saved_parts for name in written.layout.tensors),
        total_bytes=sum(written.layout.total_size for _, written, _ in saved_parts),
        written_bytes=sum(written.bytes for _, written, _ in saved_parts),
        seconds=seconds,
        own_names=own,
        tied=tied,
    )


# Config, tokenizer and code files next to the weights.

#: Suffixes of tokenizer, processor and code files to copy from the source.
_SUFFIXES = frozenset({".json", ".txt", ".model", ".jinja", ".py", ".tiktoken", ".vocab", ".bpe", ".spm"})
_COPIED_FOLDERS = ("additional_chat_templates",)
#: Text files that are copied from a source without ``config.json``, since others may be unrelated.
_VOCABULARY_FILES = ("vocab.txt", "merges.txt")
#: Files that describe the old weights or a run, not the model.
_NOT_COPIED = re.compile(
    r".*\.index\.json|(config|generation_config|adapter_config|trainer_state|state|zerostart|model_index)\.json"
    r"|(train|eval|test|all|predict)_results\.json|requirements\.txt|setup\.py|zero_to_(fp32|torch)\.py"
)
#: Maximum size of a copied file, in bytes.
_MAX_COPIED_BYTES = 256 << 20


def save_settings(model: nn.Module, directory: Path, root: str, dtype: torch.dtype | None) -> None:
    """Write the config of ``model`` and copy settings of its source ``root``.

    Call it on one rank. ``dtype`` is the dtype of the saved weights, None for the model's. Raises WriteError.
    """
    try:
        written = library_of(model).save_settings(model, directory, dtype)
        if not written and root and (Path(root) / "config.json").is_file():
            shutil.copyfile(Path(root) / "config.json", directory / "config.json")
        if root:
            copy_companion_files(Path(root), directory)
    except OSError as error:
        raise WriteError(f"{directory}: the settings cannot be saved: {error}") from error


def copy_companion_files(root: Path, directory: Path) -> None:
    """Copy tokenizer, processor, chat template and code files that ``directory`` lacks.

    Only regular files are copied, since a link in a downloaded directory may lead to a device.
    """
    if not root.is_dir():
        return
    configured = (root / "config.json").is_file()
    for path in sorted(root.iterdir()):
        if not configured and path.suffix in (".txt", ".py") and path.name not in _VOCABULARY_FILES:
            continue
        if path.suffix in _SUFFIXES and not _NOT_COPIED.fullmatch(path.name):
            _copy_file(path, directory / path.name)
    for name in _COPIED_FOLDERS:
        for path in sorted((root / name).iterdir()) if (root / name).is_dir() else ():
            _copy_file(path, directory / name / path.name)


def _copy_file(path: Path, to: Path) -> None:
    if path.is_file() and path.stat().st_size <= _MAX_COPIED_BYTES and not to.exists():
        to.parent.mkdir(exist_ok=True)
        shutil.copyfile(path, to)
