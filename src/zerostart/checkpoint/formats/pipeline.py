"""Several models under one root: a diffusers pipeline, whose ``model_index.json`` names them.

The index maps each component's name, which is its folder, to the library and class that it is of:
``"transformer": ["diffusers", "WanTransformer3DModel"]``. Of these the ones with a ``config.json`` are
models; tokenizers, processors and schedulers have configurations of other names.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path

from zerostart.checkpoint.catalog import Catalog
from zerostart.checkpoint.formats.base import CONFIG_NAME, Format, catalog_at
from zerostart.checkpoint.strict_json import read_json
from zerostart.checkpoint.usual_names import PIPELINE_INDEX
from zerostart.errors import CheckpointError, printable

#: A component is an argument of the pipeline's constructor.
NAME = re.compile(r"\w+")


@dataclass(frozen=True)
class Component:
    """One model of a pipeline: its name, the class that the index says it has, and its directory.

    ``library`` is the package that the class is of, or the folder of the pipeline's own code in diffusers.
    """

    name: str
    kind: str
    path: Path
    library: str = ""


class Pipeline(Format):
    """The model of a pipeline that is asked for by its class, or its only one."""

    name = "pipeline"

    def recognises(self, path: Path) -> bool:
        """Whether there is an index of a pipeline."""
        return is_pipeline(path)

    def describe(self, path: Path, classes: Collection[str]) -> Catalog:
        """That of the component, in whatever format it is."""
        component = choose(path, components(path) or (), classes)
        return replace(catalog_at(component.path), component=component.name)


def is_pipeline(path: Path) -> bool:
    """Whether ``path`` is a directory with the index of a pipeline."""
    return (path / PIPELINE_INDEX).is_file()


def components(root: Path) -> tuple[Component, ...] | None:
    """The models of the pipeline in directory ``root``, in the order of its index; None if it is none.

    Raises CheckpointError if the index is no JSON object.
    """
    if not is_pipeline(root):
        return None
    found = []
    for name, value in read_json(root / PIPELINE_INDEX, "pipeline index").items():
        named = isinstance(value, list) and len(value) == 2 and all(isinstance(v, str) for v in value)
        # A folder below the root only, whatever a stranger's index says.
        if named and NAME.fullmatch(name):
            path = root / name
            if (path / CONFIG_NAME).is_file():
                found.append(Component(name, value[1], path, value[0]))
    return tuple(found)


def choose(root: Path, found: Collection[Component], classes: Collection[str]) -> Component:
    """The one component whose class is among ``classes``, or the only one if no class is given.

    Raises CheckpointError that names the components where none, or more than one, is meant.
    """
    if not found:
        raise CheckpointError(
            f"{root}: {PIPELINE_INDEX} names no folder that has a {CONFIG_NAME}, so it holds no model"
        )
    fitting = [c for c in found if c.kind in classes] if classes else list(found)
    if len(fitting) == 1:
        return fitting[0]
    if not classes:
        what, remedy = "is a pipeline of several models", ", or pass its class as model="
    else:
        wanted = printable(next(iter(classes)))
        what, remedy = (
            f"is a pipeline with {'several models' if fitting else 'no model'} of class {wanted}",
            "",
        )
    listed = fitting or list(found)
    raise CheckpointError(
        f"{root} {what}: {', '.join(f'{c.name} ({printable(c.kind)})' for c in listed)}. Name "
        f"the directory of the model to load, such as {listed[0].path}{remedy}"
    )
