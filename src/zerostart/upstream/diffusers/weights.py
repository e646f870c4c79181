"""Single-file converters, weights and pipelines of diffusers."""

from __future__ import annotations

import functools
import importlib
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from zerostart.errors import BuildError, UnsupportedVersionError
from zerostart.upstream.guard import Use, demand, is_of_class
from zerostart.upstream.transformers.models import refuse_questions, without_bars
from zerostart.upstream.types import Pipeline

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline, ModelMixin

TOUCHED = (
    Use(
        "diffusers.loaders.single_file_model",
        "SINGLE_FILE_LOADABLE_CLASSES",
        "the converters of single files, by class name",
    ),
    Use(
        "diffusers.loaders.single_file_utils",
        "LDM_UNET_KEY, LDM_VAE_KEYS, infer_diffusers_model_type, DIFFUSERS_DEFAULT_PIPELINE_PATHS, "
        "fetch_diffusers_config(checkpoint)",
        "prefixes of a component's keys in a file with several",
    ),
    Use(
        "diffusers.models.modeling_utils:ModelMixin",
        "_keep_in_fp32_modules, _keys_to_ignore_on_load_unexpected, _fix_state_dict_keys_on_load(state_dict)",
        "the declarations of a model about its tensors",
    ),
)

Converter = Callable[..., Mapping[str, torch.Tensor]]


@functools.cache
def require_version() -> None:
    """Raise UnsupportedVersionError unless diffusers is as expected."""
    try:
        importlib.import_module("diffusers.loaders.single_file_model")
    except ImportError as error:
        raise UnsupportedVersionError(
            f"this is a diffusers model, but diffusers cannot be imported ({error}); install it: "
            "pip install zerostart[diffusers]"
        ) from error
    demand(TOUCHED)


def is_diffusers(model: object) -> bool:
    """Return True for a diffusers model (or class); imports nothing."""
    return is_of_class(model, "diffusers.models.modeling_utils:ModelMixin")


def model_class(name: str) -> type[nn.Module] | None:
    """Return the model class ``name`` of diffusers, or None."""
    require_version()
    import diffusers

    kind = getattr(diffusers, name, None)
    return kind if isinstance(kind, type) and issubclass(kind, diffusers.ModelMixin) else None


def original_layout(kind: type) -> tuple[Converter | None, tuple[str, ...]]:
    """Return the converter that diffusers registers for the class, and prefixes of its keys."""
    require_version()
    from diffusers.loaders import single_file_utils

    prefixes = {
        "transformer": (single_file_utils.LDM_UNET_KEY,),
        "unet": (single_file_utils.LDM_UNET_KEY,),
        "vae": tuple(single_file_utils.LDM_VAE_KEYS),
        "audio_vae": ("audio_vae.",),
    }
    entry = _single_file_entry(kind)
    return entry.get("checkpoint_mapping_fn"), prefixes.get(entry.get("default_subfolder", ""), ())


def _single_file_entry(kind: type) -> dict[str, Any]:
    require_version()
    from diffusers.loaders.single_file_model import SINGLE_FILE_LOADABLE_CLASSES

    names = {base.__name__ for base in kind.__mro__ if base.__module__.startswith("diffusers.")}
    return next((entry for name, entry in SINGLE_FILE_LOADABLE_CLASSES.items() if name in names), {})


def original_release(shapes: Mapping[str, Sequence[int]]) -> tuple[str, str | None] | None:
    """Return the repository and folder of a known release's configurations, or None."""
    require_version()
    from diffusers.loaders import single_file_utils as known

    element = torch.empty((), device="meta")
    kind = known.infer_diffusers_model_type(
        {name: element.expand(tuple(shape)) for name, shape in shapes.items()}
    )
    # diffusers also returns "v1" for an unknown release.
    if kind == "v1" and not any(name.startswith(known.LDM_UNET_KEY) for name in shapes):
        return None
    place = known.DIFFUSERS_DEFAULT_PIPELINE_PATHS[kind]
    return place["pretrained_model_name_or_path"], place.get("subfolder")


def lora_converter(model: object) -> Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]] | None:
    """Return diffusers' converter of LoRA tensors from other tools, or None."""
    require_version()
    from diffusers import loaders

    for kind in type(model).__mro__:  # FSDP2 changes the classes of models
        family = kind.__name__.partition("Transformer")[0]
        for name in (family, family.removesuffix("Video")):
            mixin: Any = getattr(loaders, f"{name}LoraLoaderMixin", None)
            if mixin is not None:
                convert: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]] = mixin.lora_state_dict
                return convert
    return None


def component_folder(kind: type) -> str | None:
    """Return the usual folder of a class in a pipeline, or None."""
    return _single_file_entry(kind).get("default_subfolder")


def fix_names(model: ModelMixin, state_dict: dict[str, Any]) -> None:
    """Rename keys of older releases in place."""
    require_version()
    model._fix_state_dict_keys_on_load(state_dict)


def kept_in_fp32(model: ModelMixin) -> frozenset[str]:
    """Return name parts of modules and parameters that remain in float32."""
    require_version()
    modules = model._keep_in_fp32_modules or ()
    return frozenset((modules,) if isinstance(modules, str) else modules)


def ignorable_unexpected(model: ModelMixin) -> tuple[str, ...]:
    """Return the model's patterns of ignorable unexpected names."""
    require_version()
    return tuple(model._keys_to_ignore_on_load_unexpected or ())


PIPELINES_TOUCHED = (
    Use(
        "diffusers.pipelines.pipeline_utils:DiffusionPipeline",
        "from_pretrained, register_modules, components, register_to_config",
        "a pipeline gets models that are already loaded",
    ),
    Use(
        "diffusers.pipelines.pipeline_loading_utils",
        "_fetch_class_library_tuple",
        "the names of model classes in a pipeline's index",
    ),
)

_PACKAGES = ("diffusers", "transformers")


def pipeline_class(name: object, root: Path) -> type[DiffusionPipeline]:
    """Return the pipeline class ``name`` of diffusers; raises BuildError."""
    require_version()
    demand(PIPELINES_TOUCHED)
    import diffusers

    kind = getattr(diffusers, name, None) if isinstance(name, str) else None
    if not (isinstance(kind, type) and issubclass(kind, diffusers.DiffusionPipeline)):
        raise BuildError(
            f"{root / 'model_index.json'} names the pipeline {name!r}, which diffusers "
            f"{diffusers.__version__} does not have; pipelines with code of their own are not "
            "supported: load their components one by one"
        )
    return kind


def component_class(library: str, kind: str, where: str) -> type[nn.Module]:
    """Return the model class in a pipeline's index; raises BuildError."""
    require_version()
    module = library if library in _PACKAGES else f"diffusers.pipelines.{library}"
    cls = None
    if re.fullmatch(r"[a-z0-9_]+", library):
        try:
            cls = getattr(importlib.import_module(module), kind, None)
        except ImportError:
            cls = None
    if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
        raise BuildError(f"{where} has the class {library}.{kind}, which cannot be imported")
    return cls


def name_classes(pipe: Pipeline) -> None:
    """Write plain classes, not FSDP2's subclasses, to the index of a pipeline."""
    demand(PIPELINES_TOUCHED)
    from diffusers.pipelines.pipeline_loading_utils import _fetch_class_library_tuple

    for name, model in pipe.components.items():
        plain = next((k for k in type(model).__mro__ if not issubclass(k, FSDPModule)), None)
        if isinstance(model, FSDPModule) and plain is not None:
            pipe.register_to_config(**{name: _fetch_class_library_tuple(plain)})


def assembled(
    kind: type[DiffusionPipeline], root: Path, models: Mapping[str, nn.Module | None]
) -> DiffusionPipeline:
    """Return the pipeline in ``root`` with ``models``; diffusers loads everything else."""
    try:
        with refuse_questions(), without_bars("diffusers"):
            return kind.from_pretrained(str(root), local_files_only=True, **models)
    except Exception as error:  # of many types, for a missing or damaged tokenizer
        text = " ".join(str(error).split())
        raise BuildError(
            f"{root}: diffusers cannot make a {kind.__name__} of the files next to its models "
            f"({text}); restore its tokenizers, schedulers and processors"
        ) from error
