"""Diffusers pipelines: several models under one root, listed by ``model_index.json``.

The index maps each component's name, which is its folder, to its library and class: ``"transformer":
["diffusers", "WanTransformer3DModel"]``. Components with a ``config.json`` are models; tokenizers, processors
and schedulers have configurations of other names.
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

#: Pattern of component names, which are arguments of the pipeline's constructor.
NAME = re.compile(r"\w+")


@dataclass(frozen=True)
class Component:
    """Model of a pipeline: its name, class and directory.

    ``library`` is the package of the class, or the folder of the pipeline's own code in diffusers.
    """

    name: str
    kind: str
    path: Path
    library: str = ""


class Pipeline(Format):
    """Model of a pipeline, selected by its class."""

    name = "pipeline"

    def recognises(self, path: Path) -> bool:
        return is_pipeline(path)

    def describe(self, path: Path, classes: Collection[str]) -> Catalog:
        component = choose(path, components(path) or (), classes)
        return replace(catalog_at(component.path), component=component.name)


def is_pipeline(path: Path) -> bool:
    """Return True if ``path`` has a pipeline index."""
    return (path / PIPELINE_INDEX).is_file()


def components(root: Path) -> tuple[Component, ...] | None:
    """Return the models of the pipeline in ``root``.

    They are in index order. None if there is no index. Raises CheckpointError if the index is not a JSON
    object.
    """
    if not is_pipeline(root):
        return None
    models = []
    for name, value in read_json(root / PIPELINE_INDEX, "pipeline index").items():
        named = isinstance(value, list) and len(value) == 2 and all(isinstance(v, str) for v in value)
        # A folder below the root only, whatever a stranger's index says.
        if named and NAME.fullmatch(name):
            path = root / name
            if (path / CONFIG_NAME).is_file():
                models.append(Component(name, value[1], path, value[0]))
    return tuple(models)


def choose(root: Path, models: Collection[Component], classes: Collection[str]) -> Component:
    """Choose a component by its class.

    Without ``classes`` it must be the only one. Raises CheckpointError with the names of the components
    if none or several match.
    """
    if not models:
        raise CheckpointError(
            f"{root}: {PIPELINE_INDEX} names no folder that has a {CONFIG_NAME}, so it holds no model"
        )
    fitting = [c for c in models if c.kind in classes] if classes else list(models)
    if len(fitting) == 1:
        return fitting[0]
    if not classes:
        what, remedy = "is a pipeline of several models", ", or pass its class as model="
    else:
        class_name = printable(next(iter(classes)))
        what, remedy = (
            f"is a pipeline with {'several models' if fitting else 'no model'} of class {class_name}",
            "",
        )
    listed = fitting or list(models)
    raise CheckpointError(
        f"{root} {what}: {', '.join(f'{c.name} ({printable(c.kind)})' for c in listed)}. Name "
        f"the directory of the model to load, such as {listed[0].path}{remedy}"
    )
