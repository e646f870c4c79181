"""Find the transformer of a flow-matching run, in a diffusers pipeline or by itself."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zerostart.checkpoint.formats.pipeline import components
from zerostart.checkpoint.manifest import WEIGHTS
from zerostart.checkpoint.source import open_catalog, read_config, resolve_source
from zerostart.checkpoint.strict_json import read_json
from zerostart.checkpoint.usual_names import PIPELINE_INDEX
from zerostart.errors import CheckpointError, ConfigError
from zerostart.models import recognise_tensors
from zerostart.training.config.configuration import ModelConfig

_DEFAULT = "transformer"
#: The transformer of a pipeline with two that is for times below the boundary.
_LOW_TIMES = "transformer_2"


@dataclass(frozen=True)
class FlowSource:
    """Directory and configuration of a transformer, and its pipeline's index and its name there.

    ``root`` is the pipeline's directory if that was named, and not only its model.
    """

    directory: Path
    config: dict[str, Any]
    root: Path | None
    index: dict[str, Any]
    component: str | None

    @property
    def boundaries(self) -> tuple[float, float]:
        """The lowest and highest time of the transformer."""
        ratio = self.index.get("boundary_ratio")
        if ratio is None:
            return (0.0, 1.0)
        # Wan 2.2 begins with `transformer`, at the noisy end, and changes to `transformer_2` below the ratio.
        return (0.0, float(ratio)) if self.component == _LOW_TIMES else (float(ratio), 1.0)


def read_source(model: ModelConfig) -> FlowSource:
    """Find the transformer that ``model`` names. Raises CheckpointError or ConfigError if there is none."""
    path = resolve_source(model.source)
    root = path if (path / PIPELINE_INDEX).is_file() else None
    name: str | None = None
    if root is not None:
        name = model.component or _DEFAULT
        models = {one.name: one.path for one in components(root) or ()}
        if name not in models:
            raise ConfigError(
                f"model.component {name} is not a model of {root}; its models are {', '.join(models)}"
            )
        path = models[name]
    elif model.component is not None:
        raise ConfigError(f"model.component: {path} is a single model, not a pipeline; leave it out")
    directory = path if path.is_dir() else path.parent
    config = read_config(directory)
    # A single file without a configuration: the shapes of its tensors may identify the release.
    if config is None and path.is_file():
        tensors = open_catalog(path).weights
        release = recognise_tensors({name: one.shape for name, one in tensors.items()})
        config = None if release is None else release[1]
    if config is None or not isinstance(config.get("_class_name"), str):
        raise CheckpointError(f"{directory} has no config.json of a diffusers transformer")
    # A transformer that is named directly may still lie in its pipeline, whose index has its boundary.
    around = directory.parent if root is None else root
    index: dict[str, object] = {}
    if (around / PIPELINE_INDEX).is_file():
        index = read_json(around / PIPELINE_INDEX, "pipeline index")
    if root is None:
        index, name = (index, directory.name) if directory.name in index else ({}, None)
    return FlowSource(path, config, root, index, name)


def copy_others(root: Path, component: str, directory: Path) -> None:
    """Put the pipeline in ``root`` without ``component`` into ``directory``, its index last.

    Files are hard links if possible, copies otherwise. Files of the same names in ``directory`` are replaced,
    and weights that a reader would prefer to the new ones are deleted. Raises ConfigError.
    """
    index = read_json(root / PIPELINE_INDEX, "pipeline index")
    try:
        if directory.samefile(root):  # the run writes into its own pipeline
            return
        for entry in sorted(root.iterdir()):
            if entry.name not in index or entry.name == component:
                continue
            for folder, inner, _ in os.walk(entry):
                _copy_files(Path(folder), directory / Path(folder).relative_to(root))
                # `os.walk` does not follow links to directories, and would leave them out silently.
                if links := [one for one in inner if Path(folder, one).is_symlink()]:
                    raise OSError(f"{Path(folder, links[0])} is a link to a directory; replace it")
        # A copy, never a link: whoever edits it must not edit the original.
        _replace(root / PIPELINE_INDEX, directory / PIPELINE_INDEX, shutil.copyfile)
    except OSError as error:
        raise ConfigError(f"output.pipeline: {root} cannot be copied to {directory}: {error}") from error


def _copy_files(source: Path, target: Path) -> None:
    if target.is_symlink():
        raise OSError(f"{target} is a link, so its target would be changed: remove the link")
    target.mkdir(parents=True, exist_ok=True)
    files = {path.name: path for path in source.iterdir() if not path.is_dir()}
    # A reader would find older weights of the same stem first (more shards, another format).
    stems = {match["stem"] for name in files if (match := WEIGHTS.fullmatch(name))}
    for file in sorted(target.iterdir()):
        match = WEIGHTS.fullmatch(file.name)
        if match and match["stem"] in stems and file.name not in files and file.is_file():
            file.unlink()
    for name, path in files.items():
        real, there = path.resolve(), target / name
        if not real.is_file():
            raise OSError(f"{path} is not a regular file")
        # An earlier export may have linked the file already.
        if there.is_symlink() or not there.exists() or not there.samefile(real):
            _replace(real, there, _link)


def _replace(source: Path, target: Path, copy: Callable[[Path, Path], object]) -> None:
    part = target.with_name(f".{target.name}.{uuid.uuid4().hex[:12]}.part")
    try:
        copy(source, part)
        # The rename is atomic, and replaces a link itself, not its target.
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system, or another user's file
        shutil.copy2(source, target)
