"""What a run exports: a whole model, its trained tensors alone, or a LoRA, in the format its reader expects.

Nothing is gathered: each rank writes its own bytes, whatever the format (``zerostart.save``).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from torch import nn

from zerostart.distributed.world import current_world
from zerostart.engines import full_shape
from zerostart.errors import ConfigError
from zerostart.live.model import bare_model
from zerostart.models import library_of
from zerostart.state.saving.adapter_formats import PREFIX, adapter_format, diffsynth_names, without
from zerostart.state.saving.adapters import AdapterFormat
from zerostart.state.saving.contents import TensorOverrides
from zerostart.state.saving.save import SaveRequest, save_model
from zerostart.training.adapt.ema import Ema
from zerostart.training.loop.task import Task

if TYPE_CHECKING:
    from zerostart.training.config.configuration import OutputConfig

#: In the output directory: what is saved before the end, a folder for each step.
EXPORTS = "exports"
#: Where the average of the weights goes, beside the model or in the folder of a step.
AVERAGE = "ema"
#: The key of the format, as errors name it.
_FORMAT = "output.format"


def check_export(model: nn.Module, output: OutputConfig, adapted: bool) -> None:
    """Raise ConfigError for what ``model`` could not be saved as once it is trained.

    ``model`` is as it will be trained, adapters and all: at the end the training would be lost.
    """
    save_request(model, output, adapted, 0).check()
    if not output.merge:
        return
    for name, parameter in model.named_parameters():
        shape = full_shape(parameter)
        if ".lora_" in name and len(shape) != 2:
            raise ConfigError(
                f"output.merge: {name} belongs to a convolution, whose adapters cannot be merged shard "
                "by shard; leave it out of lora.targets, or leave output.merge out"
            )


def save_request(
    model: nn.Module,
    output: OutputConfig,
    adapted: bool,
    step: int,
    overrides: TensorOverrides | None = None,
) -> SaveRequest:
    """How ``model``, as it is trained, is saved after ``step`` steps.

    ``adapted``: a LoRA is trained; ``overrides`` are values to save in the place of the model's own. Raises
    ConfigError for names that DiffSynth has not.
    """
    request = SaveRequest(model, output.max_shard_size, overrides=overrides)
    if adapted:
        if output.merge:
            return replace(request, merge_adapters=True)
        # Without merging only the factors are written; the model is the one that the run was started from.
        return replace(request, adapters_only=True, adapter_format=_adapter_format(model, output, step))
    if output.format == "diffsynth":
        names = diffsynth_names(bare_model(model), _FORMAT)
        return replace(
            request,
            trainable_only=True,
            renamed=without(output.remove_prefix, lambda name: PREFIX + names(name)),
            stem=f"step-{step}",
            max_shard_size=2**62,  # one file, as there
        )
    if output.trainable_only:
        prefix = output.remove_prefix
        # None keeps the names of the model's own library.
        renamed = without(prefix, lambda name: name) if prefix else None
        return replace(request, trainable_only=True, renamed=renamed)
    return request


def _adapter_format(model: nn.Module, output: OutputConfig, step: int) -> AdapterFormat:
    inner = bare_model(model)
    return adapter_format(
        output.format or library_of(inner).adapter_format,
        inner,
        key=_FORMAT,
        stem=f"step-{step}",
        prefix=output.remove_prefix,
    )


def export_model(
    model: nn.Module, task: Task, directory: Path, step: int = 0, ema: Ema | None = None
) -> None:
    """Save ``model``, as trained in ``step`` steps, and the files that ``task`` adds; collective.

    In the format of the section ``output``; a model of its own for its average ``ema``. What an earlier run
    has saved in ``directory`` is replaced once the new is whole.
    """
    # The model before what completes the directory: an index that stands there names models that are whole.
    _save(model, task, task.saved_in(directory), directory / AVERAGE, step, ema)
    world = current_world()
    with world.phase("completing the output directory"):
        if world.rank == 0:
            task.finish(directory)


def export_step(model: nn.Module, task: Task, directory: Path, ema: Ema | None, step: int) -> None:
    """Save what ``export_model`` saves into a folder of its own, after ``step`` steps; collective."""
    folder = directory / EXPORTS / f"step-{step}"
    _save(model, task, folder, folder / AVERAGE, step, ema)


def _save(model: nn.Module, task: Task, folder: Path, averaged: Path, step: int, ema: Ema | None) -> None:
    # Two saves one after the other, each collective: the average is a model of its own, with its own marker.
    output, adapted = task.config.output, task.config.lora is not None
    save_model(save_request(model, output, adapted, step), folder)
    if ema is not None:
        save_model(save_request(model, output, adapted, step, ema.overrides), averaged)
