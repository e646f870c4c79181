"""diffusers' pipelines: their classes, those of their components, and making one of components."""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from torch import nn
from torch.distributed.fsdp import FSDPModule

from zerostart.errors import BuildError
from zerostart.upstream.diffusers.weights import require
from zerostart.upstream.guard import Use, demand
from zerostart.upstream.transformers.code import unasked, without_bars
from zerostart.upstream.types import Pipeline

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline

TOUCHED = (
    Use(
        "diffusers.pipelines.pipeline_utils:DiffusionPipeline",
        "from_pretrained, register_modules, components, register_to_config",
        "a pipeline is made of models that are loaded already",
    ),
    Use(
        "diffusers.pipelines.pipeline_loading_utils",
        "_fetch_class_library_tuple",
        "what a pipeline's index calls the class of a model",
    ),
)

#: Packages whose classes components may be of. Other names are folders of diffusers' own pipelines.
_PACKAGES = ("diffusers", "transformers")


def pipeline_class(name: object, root: Path) -> type[DiffusionPipeline]:
    """The pipeline class ``name`` of diffusers; raises BuildError if there is none."""
    require()
    demand(TOUCHED)
    import diffusers

    found = getattr(diffusers, name, None) if isinstance(name, str) else None
    if not (isinstance(found, type) and issubclass(found, diffusers.DiffusionPipeline)):
        raise BuildError(
            f"{root / 'model_index.json'} names the pipeline {name!r}, which diffusers "
            f"{diffusers.__version__} does not have; pipelines with code of their own are not "
            "supported: load their components one by one"
        )
    return found


def component_class(library: str, kind: str, where: str) -> type[nn.Module]:
    """The class of a model as a pipeline's index names it; raises BuildError if there is none."""
    require()
    module = library if library in _PACKAGES else f"diffusers.pipelines.{library}"
    found = None
    if re.fullmatch(r"[a-z0-9_]+", library):
        try:
            found = getattr(importlib.import_module(module), kind, None)
        except ImportError:
            found = None
    if not (isinstance(found, type) and issubclass(found, nn.Module)):
        raise BuildError(f"{where} has the class {library}.{kind}, which cannot be imported")
    return found


def name_classes(pipe: Pipeline) -> None:
    """Have the index of a pipeline name the classes that FSDP2 has put its own in front of."""
    demand(TOUCHED)
    from diffusers.pipelines.pipeline_loading_utils import _fetch_class_library_tuple

    for name, model in pipe.components.items():
        plain = next((k for k in type(model).__mro__ if not issubclass(k, FSDPModule)), None)
        if isinstance(model, FSDPModule) and plain is not None:
            pipe.register_to_config(**{name: _fetch_class_library_tuple(plain)})


def assembled(
    kind: type[DiffusionPipeline], root: Path, models: Mapping[str, nn.Module | None]
) -> DiffusionPipeline:
    """The pipeline in ``root`` with these models; everything else by diffusers itself, from its files.

    Raises BuildError for what diffusers cannot make of them.
    """
    try:
        # Without its bar: the models, which are what takes time, are loaded already.
        with unasked(), without_bars("diffusers"):
            return kind.from_pretrained(str(root), local_files_only=True, **models)
    except Exception as error:  # of many types, for a tokenizer or a scheduler that is not there or damaged
        told = " ".join(str(error).split())
        raise BuildError(
            f"{root}: diffusers cannot make a {kind.__name__} of the files beside its models "
            f"({told}); restore its tokenizers, schedulers and processors"
        ) from error
