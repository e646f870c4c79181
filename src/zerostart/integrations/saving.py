"""Save sharded models with ``save_pretrained`` and accelerate's ``save_model``."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from zerostart.distributed.world import current_world
from zerostart.errors import ConfigError
from zerostart.integrations.barrier import announce_local_save, join_save
from zerostart.live.model import find_loaded_models, find_record, find_shards, unwrap_model
from zerostart.state.saving.adapters import find_adapted_model, has_adapters
from zerostart.state.saving.save import SaveRequest, save_model
from zerostart.upstream.diffusers.weights import name_classes
from zerostart.upstream.types import Pipeline

Original = Callable[[], object]
#: Unsupported arguments of a sharded save: default value and remedy.
_REFUSED: Mapping[str, tuple[object, str]] = {
    "push_to_hub": (False, "save it first, and upload the directory (huggingface_hub.upload_folder)"),
    "variant": (None, "save it without, into a directory of its own"),
    "save_original_format": (
        True,
        "leave it out; accelerator.save_model has the model's own names",
    ),
    "save_peft_format": (True, "leave it out"),
    "safe_serialization": (True, "leave it out: what is saved is safetensors"),
    "path_initial_model_for_weight_conversion": (None, "gather the model and use PEFT's save_pretrained"),
    "save_embedding_layers": ("auto", "leave it out"),
    "use_flashpack": (False, "leave it out: what is saved is safetensors"),
}
#: Models with saved weights, and their directories, while a Trainer writes the other files.
_saved: list[tuple[nn.Module, Path]] = []


def is_sharded(model: nn.Module) -> bool:
    """True if a rank holds only a part of ``model``."""
    record = find_record(unwrap_model(model))
    if record is not None and record.parallelism.mesh.parallel:
        return True
    config = getattr(model, "config", None)
    if record is None and (getattr(config, "distributed_config", None) or getattr(model, "_tp_size", None)):
        return False  # transformers has sharded the model, and gathers it
    return bool(find_shards(model, current_world()))


def save_pretrained(original: Original, **call: Any) -> object:
    """Replace ``save_pretrained`` of transformers and diffusers.

    Raises ConfigError for unsupported arguments.
    """
    model, directory = call["self"], call["save_directory"]
    # All ranks have written the weights; the Trainer calls this for the other files.
    if _is_saved(model, directory):
        return None
    if call.get("distributed_checkpoint") or not is_sharded(model):
        return original()
    # The script has gathered the state dict, so only rank 0 saves it; announce this.
    if call.get("state_dict") is not None:
        announce_local_save(directory)
        return original()
    _refuse(call)
    if join_save(directory):
        save_weights(model, directory, call["max_shard_size"])
    return None


def save_pipeline(original: Original, *, self: Pipeline, **_: object) -> object:
    """Replace ``DiffusionPipeline.save_pretrained``, which saves each model."""
    name_classes(self)
    return original()


def push_to_hub(original: Original, *, self: object, **_: object) -> object:
    """Replace ``push_to_hub``; raise ConfigError for a sharded model."""
    parts: Mapping[str, object] = getattr(self, "components", {"": self})
    for name, part in parts.items():
        if isinstance(part, nn.Module) and is_sharded(part):
            raise ConfigError(
                f"push_to_hub of {name or type(part).__name__}, which is sharded, would upload each "
                "rank's part; call save_pretrained(directory) on every rank, and upload the directory "
                "from one rank (huggingface_hub.upload_folder)"
            )
    return original()


def save_adapters(original: Original, **call: Any) -> object:
    """Replace ``PeftModel.save_pretrained``; raise ConfigError for unsupported arguments."""
    model, directory = call["self"], call["save_directory"]
    saved = _is_saved(model, directory)
    if not saved and not is_sharded(model):
        return original()
    if not saved and call.get("state_dict") is not None:
        announce_local_save(directory)
        return original()
    _refuse(call)
    chosen, every = call["selected_adapters"], list(model.peft_config)
    if chosen is not None and sorted(chosen) != sorted(every):
        raise ConfigError(
            f"selected_adapters={chosen} of a sharded model that has the adapters {every} is not "
            "available: leave it out"
        )
    if not saved:
        if not join_save(directory):
            return None
        save_weights(model, directory)
    with current_world().phase("saving the model card") if not saved else contextlib.nullcontext():
        if call["is_main_process"] and current_world().rank == 0:
            model.create_or_update_model_card(os.fspath(directory))
    return None


def accelerator_save_model(
    original: Original,
    *,
    model: nn.Module,
    save_directory: str | os.PathLike[str],
    max_shard_size: int | str,
    safe_serialization: bool,
    **_: object,
) -> object:
    """Replace ``Accelerator.save_model``, which every rank calls."""
    # Leave adapters and pickles to accelerate.
    ours = next(find_loaded_models(model), None) is not None or is_sharded(model)
    if not ours or not safe_serialization or has_adapters(model):
        return original()
    request = SaveRequest(model, max_shard_size, renamed=str, stem="model", write_config=False)
    save_model(request, save_directory)
    return None


def save_weights(
    model: nn.Module, directory: str | os.PathLike[str], max_shard_size: int | str = "50GB"
) -> None:
    """Save a model like ``save_pretrained``, or only its adapters, if it has some; collective.

    Raises ConfigError for models that cannot be saved so. The script saves its own tokenizer.
    """
    adapted = find_adapted_model(model)
    # PEFT's wrapper saves each adapter into a folder; the mixins of transformers and diffusers save one file.
    if adapted is not None and adapted.model is unwrap_model(model):
        names = list(adapted.peft_config)
        if names != ["default"]:
            raise ConfigError(
                f"the adapters {names} of a sharded {type(model).__name__} cannot be saved together: "
                "name the one to save 'default', or use get_peft_model"
            )
    request = SaveRequest(model, max_shard_size, adapters_only=adapted is not None, copy_files=False)
    save_model(request, directory)


@contextlib.contextmanager
def already_saved(model: nn.Module, directory: str | os.PathLike[str]) -> Iterator[None]:
    """Let ``save_pretrained`` of ``model`` into ``directory`` skip the weights inside the block."""
    entry = (model, Path(directory))
    _saved.append(entry)
    try:
        yield
    finally:
        _saved.remove(entry)


def _is_saved(model: nn.Module, directory: str | os.PathLike[str]) -> bool:
    return any(m is model and path == Path(directory) for m, path in _saved)


def _refuse(call: Mapping[str, Any]) -> None:
    for name, (usual, remedy) in _REFUSED.items():
        value = call.get(name, usual)
        if name == "save_peft_format" and not has_adapters(call["self"]):
            continue  # the default of diffusers' pipelines
        if value != usual:
            raise ConfigError(f"{name}={value!r} of save_pretrained is not available here: {remedy}")
