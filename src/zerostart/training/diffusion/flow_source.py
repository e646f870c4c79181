"""Where the transformer of a flow-matching run is: a pipeline of diffusers, or a directory of its own."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Callable, Sequence
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
#: Of a pipeline with two transformers, the one for times below the boundary.
_BELOW = "transformer_2"


@dataclass(frozen=True)
class FlowSource:
    """A transformer: its directory and configuration; of a pipeline its index and its name there.

    ``root`` is the pipeline's where that was named, and not its model alone.
    """

    directory: Path
    config: dict[str, Any]
    root: Path | None
    index: dict[str, Any]
    component: str | None

    @property
    def boundaries(self) -> tuple[float, float]:
        """The times that the transformer is for."""
        ratio = self.index.get("boundary_ratio")
        if ratio is None:
            return (0.0, 1.0)
        # Wan 2.2 begins with `transformer`, at the noisy end, and changes to `transformer_2` below the ratio.
        return (0.0, float(ratio)) if self.component == _BELOW else (float(ratio), 1.0)


def read_source(model: ModelConfig) -> FlowSource:
    """What ``model`` names. Raises CheckpointError or ConfigError where that is no model of diffusers."""
    path = resolve_source(model.source)
    root = path if (path / PIPELINE_INDEX).is_file() else None
    name: str | None = None
    if root is not None:
        name = model.component or _DEFAULT
        found = {one.name: one.path for one in components(root) or ()}
        if name not in found:
            raise ConfigError(
                f"model.component {name} is not a model of {root}; its models are {', '.join(found)}"
            )
        path = found[name]
    elif model.component is not None:
        raise ConfigError(f"model.component: {path} is a single model, not a pipeline; leave it out")
    directory = path if path.is_dir() else path.parent
    config = read_config(directory)
    # A single file without a configuration beside it: the shapes of its tensors may tell which release it is.
    if config is None and path.is_file():
        tensors = open_catalog(path).weights
        known = recognise_tensors({name: one.shape for name, one in tensors.items()})
        config = None if known is None else known[1]
    if config is None or not isinstance(config.get("_class_name"), str):
        raise CheckpointError(f"{directory} has no config.json of a diffusers transformer")
    # A transformer named by itself may still lie in its pipeline, whose index has the boundary of its times.
    around = directory.parent if root is None else root
    index: dict[str, object] = {}
    if (around / PIPELINE_INDEX).is_file():
        index = read_json(around / PIPELINE_INDEX, "pipeline index")
    if root is None:  # a pipeline's model, named by itself, is for the same times
        index, name = (index, directory.name) if directory.name in index else ({}, None)
    return FlowSource(path, config, root, index, name)


def copy_others(root: Path, component: str, directory: Path) -> None:
    """Put all of the pipeline in ``root`` but ``component`` into ``directory``, its index last.

    All is what the index names: other folders (of runs) are none of the pipeline's. Files are hard links
    where the file system has them for us, copies elsewhere. Of what is in ``directory`` files of the same
    names go, and weights that would be read in the place of these. Nothing is done where it is ``root``.
    Raises ConfigError.
    """
    index = read_json(root / PIPELINE_INDEX, "pipeline index")
    try:
        # The run writes into its own pipeline: everything else is there already.
        if directory.samefile(root):  # whose component was replaced
            return
        for entry in sorted(root.iterdir()):
            if entry.is_dir() and entry.name in index and entry.name != component:
                # `os.walk` does not follow links to directories: they would be left out silently, so they are
                # refused.
                for folder, inner, names in os.walk(entry):
                    for path in (Path(folder, name) for name in inner):
                        if path.is_symlink():
                            raise OSError(
                                f"{path} is a link to a directory, which may lead back to itself; "
                                "replace it with the "
                                "directory"
                            )
                    _copy_files(Path(folder), names, directory / Path(folder).relative_to(root))
        # Last, and a copy, never a link: a directory with an index has all the models that it names, and
        # whoever edits it does not edit the original's.
        _replaced(root / PIPELINE_INDEX, directory / PIPELINE_INDEX, shutil.copyfile)
    except OSError as error:
        raise ConfigError(f"output.pipeline: {root} cannot be copied to {directory}: {error}") from error


def _copy_files(source: Path, names: Sequence[str], target: Path) -> None:
    if target.is_symlink():
        raise OSError(
            f"{target} is a link, and writing would change the directory that it leads to: remove the link"
        )
    target.mkdir(parents=True, exist_ok=True)
    # The stem is the name without number and suffix. Older weights of the same stem that the source has not
    # (more shards, another format) would be found first by a reader.
    stems = {match["stem"] for name in names if (match := WEIGHTS.fullmatch(name))}
    for file in sorted(target.iterdir()):
        match = WEIGHTS.fullmatch(file.name)
        if match and match["stem"] in stems and file.name not in names and file.is_file():
            file.unlink()
    for name in names:
        real, there = Path(os.path.realpath(source / name)), target / name
        if not real.is_file():
            raise OSError(f"{source / name} is not a regular file")
        # Left alone where it is the same file already, linked by an earlier export.
        if there.is_symlink() or not there.exists() or not there.samefile(real):
            _replaced(real, there, _link)


def _replaced(source: Path, target: Path, copy: Callable[[Path, Path], object]) -> None:
    part = target.with_name(f".{target.name}.{uuid.uuid4().hex[:12]}.part")
    try:
        copy(source, part)
        # The rename puts the whole file there at once, and replaces a link itself, not what it points to.
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # on another file system, on one without links, or of another user's file
        shutil.copy2(source, target)
