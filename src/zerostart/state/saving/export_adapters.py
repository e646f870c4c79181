"""From a LoRA's file, or a checkpoint of its training, to a file in another format, by one process."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zerostart import models
from zerostart.checkpoint.formats.base import CONFIG_NAME, MODEL_FOLDER
from zerostart.checkpoint.paths import located
from zerostart.checkpoint.source import open_catalog
from zerostart.distributed.world import World
from zerostart.engines import whole_shard
from zerostart.errors import CheckpointError, ConfigError
from zerostart.state.converting.convert import Converted
from zerostart.state.resuming.retention import complete
from zerostart.state.saving.adapter_formats import adapter_format
from zerostart.state.saving.adapters import PEFT_PREFIX, adapter_contents, save_adapter_config
from zerostart.state.saving.lora_files import Factors, LoraFile, read_lora, state_of
from zerostart.state.saving.writing import publishing, write_tensors


def export_adapters(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    kind: str,
    base: str | os.PathLike[str] | None = None,
    dtype: torch.dtype | None = None,
) -> Converted:
    """Write the LoRA at ``source`` into a directory ``out`` in the format ``kind``, by this process alone.

    ``source`` is a training checkpoint of a LoRA run, or the run's directory, whose newest one counts where
    no LoRA lies in it; or a LoRA file of PEFT, diffusers, DiffSynth, ComfyUI or kohya, or its directory.
    ``base`` is the model that it is for, of which no weights are read; None where the checkpoint, or PEFT's
    configuration, says so itself. ``dtype`` is that of the factors, None leaves each as it is stored. They
    are in memory whole, and nothing else is. ``out`` appears whole or not at all. Raises
    CheckpointNotFoundError, CheckpointError, and ConfigError for factors of several ranks or scales, for a
    model that the format has no names for, and where the model has to be named.
    """
    world = World(0, 1, None)
    place = _newest(Path(source))
    file = read_lora(place)
    model, root = _base(file, place, base)
    factors, unexpected = file.factors([name for name, _ in model.named_modules() if name], model)
    if unexpected:
        raise CheckpointError(
            f"{file.named} has factors of {unexpected[0]}, which {type(model).__name__} has not: name the "
            "model that it is for (base)"
        )
    config = _config(factors, file)
    written_as = adapter_format(kind, model)
    held = {
        f"{PEFT_PREFIX}{name}.lora_{letter}.weight": whole_shard(name, value, world)
        for name, pair in factors.items()
        for letter, value in (("A", pair.a), ("B", pair.b))
    }
    contents = adapter_contents("default", config, held, dtype, written_as, world)
    with publishing(out, world) as publication:
        written = write_tensors(
            publication,
            contents.entries,
            contents.outgoing,
            world,
            stem=written_as.stem,
            max_shard_size=2**62,  # readers take one file
            metadata=written_as.metadata(config),
        )
        if written_as.configured:
            save_adapter_config(config, model, root, publication.directory)
        publication.add_digests(written.digests)
    names = [publication.names.get(one.name, one.name) for one in written.layout.files]
    return Converted(located(out), tuple(names), len(contents.entries), written.layout.total_size)


def _newest(path: Path) -> Path:
    """The newest checkpoint of the run whose directory ``path`` is; else ``path`` itself."""
    if state_of(path) is None and not any(path.glob("*.safetensors")):
        folder = path / "checkpoints"
        states = complete(folder) if folder.is_dir() else []
        return Path(states[-1]) if states else path
    return path


def _base(file: LoraFile, place: Path, given: str | os.PathLike[str] | None) -> tuple[nn.Module, str | None]:
    """The model that the LoRA is for, without weights, and where it lies.

    Raises ConfigError where nobody says it.
    """
    state = state_of(place)
    own = None if state is None else state / MODEL_FOLDER
    if given is None and own is not None and (own / CONFIG_NAME).is_file():
        # The configuration in a checkpoint is of the model that was trained, whose weights it has not.
        return models.build(None, str(own), None, None).model, None
    base = given or file.metadata.get("base_model_name_or_path")
    if not base:
        raise ConfigError(
            f"{file.named} does not say which model it is for: name its directory or hub id (base; --base on "
            "the command line)"
        )
    catalog = open_catalog(base)
    shapes = {name: entry.shape for name, entry in catalog.weights.items()}
    return models.build(None, catalog.root, None, None, shapes=shapes).model, os.fspath(base)


def _config(factors: Mapping[str, Factors], file: LoraFile) -> object:
    """PEFT's configuration of these factors. Raises ConfigError where one does not describe them."""
    try:
        from peft import LoraConfig
    except ImportError as error:
        raise ConfigError(f"exporting a LoRA needs PEFT: pip install zerostart[peft] ({error})") from error
    kinds = {(pair.a.shape[0], pair.scaling) for pair in factors.values()}
    if len(kinds) != 1:
        listed = " and ".join(f"rank {rank} times {scaling:g}" for rank, scaling in sorted(kinds)) or "none"
        raise ConfigError(f"{file.named} has factors of different kinds ({listed}), which cannot be exported")
    ((rank, scaling),) = kinds
    alpha: Any = rank * scaling  # a number, though PEFT's annotation says a whole one
    alpha = int(alpha) if alpha == int(alpha) else alpha
    return LoraConfig(r=rank, lora_alpha=alpha, target_modules=list(factors))
