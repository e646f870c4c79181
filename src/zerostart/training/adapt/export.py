"""What a run exports: a whole model, its trained tensors alone, or a LoRA, in the format its reader expects.

Nothing is gathered: each rank writes its own bytes, whatever the format (``zerostart.save``).
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from zerostart.distributed.world import current_world
from zerostart.engines import full_shape
from zerostart.errors import ConfigError
from zerostart.live.model import bare_model
from zerostart.models import library_of
from zerostart.state.saving.adapters import PEFT_FORMAT, AdapterFormat
from zerostart.state.saving.contents import TensorOverrides
from zerostart.state.saving.save import SaveReport, SaveRequest, save_model
from zerostart.training.adapt.diffsynth_names import PREFIX, names_for
from zerostart.training.adapt.ema import Ema
from zerostart.training.adapt.tool_names import comfyui_names, kohya_names
from zerostart.training.loop.task import Task

if TYPE_CHECKING:
    from zerostart.training.config.configuration import TrainConfig

#: In the output directory: what is saved before the end, a folder for each step.
EXPORTS = "exports"
#: Where the average of the weights goes, beside the model or in the folder of a step.
AVERAGE = "ema"
#: Formats of a LoRA for other tools: what gives the names of factors there.
TOOLS: Mapping[str, Callable[[nn.Module], Callable[[str], str]]] = {
    "comfyui": comfyui_names,
    "kohya": kohya_names,
}
#: Of diffusers' LoRA files: the name, what names begin with, and where PEFT's configuration is in the header.
_LORA_WEIGHTS, _COMPONENT, _METADATA = "pytorch_lora_weights", "transformer.", "lora_adapter_metadata"


def step_folder(directory: Path, step: int) -> Path:
    """Where in the output directory the export after ``step`` goes."""
    return directory / EXPORTS / f"step-{step}"


def check_export(model: nn.Module, config: TrainConfig) -> None:
    """Raise ConfigError for what ``model`` could not be saved as once it is trained.

    ``model`` is as it will be trained, adapters and all: at the end the training would be lost.
    """
    save_request(model, config, 0).check()
    if not config.output.merge:
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
    config: TrainConfig,
    step: int,
    beside: Callable[[Path], object] | None = None,
    overrides: TensorOverrides | None = None,
) -> SaveRequest:
    """How ``model``, as it is trained, is saved after ``step`` steps.

    ``overrides`` are values to save in the place of its own. Raises ConfigError for names that DiffSynth has
    not.
    """
    output = config.output
    request = SaveRequest(output.max_shard_size, beside=beside, overrides=overrides)
    if config.lora is not None:
        if output.merge:
            return replace(request, merge_adapters=True)
        # Without merging only the factors are written; the model is the one that the run was started from.
        return replace(request, adapters_only=True, adapter_format=_adapter_format(model, config, step))
    if output.format == "diffsynth":
        names = _diffsynth(model)
        return replace(
            request,
            trainable_only=True,
            renamed=_without(output.remove_prefix, lambda name: PREFIX + names(name)),
            stem=f"step-{step}",
            max_shard_size=2**62,  # one file, as there
        )
    if output.trainable_only:
        prefix = output.remove_prefix
        # None keeps the names of the model's own library.
        renamed = _without(prefix, lambda name: name) if prefix else None
        return replace(request, trainable_only=True, renamed=renamed)
    return request


def _adapter_format(model: nn.Module, config: TrainConfig, step: int) -> AdapterFormat:
    output, inner = config.output, bare_model(model)
    kind, prefix = output.format or library_of(inner).adapter_format, output.remove_prefix
    if kind == "peft":
        return replace(PEFT_FORMAT, renamed=_without(prefix, lambda name: name))
    if kind in TOOLS:
        # These tools read the scale from an alpha beside each pair of factors, not from a configuration.
        return AdapterFormat(_LORA_WEIGHTS, TOOLS[kind](inner), False, configured=False, alphas=True)
    component = _without(prefix, lambda name: _COMPONENT + name)
    if kind != "diffsynth":
        described = functools.partial(_described, component)
        return AdapterFormat(_LORA_WEIGHTS, component, False, described, configured=False)
    names = names_for(inner)
    renamed = component
    # Of modules that are one there, its loader puts together what diffusers' names stand for.
    if names is None or not names.fused:
        of = _diffsynth(model)
        renamed = _without(prefix, lambda name: PREFIX + _with_adapter(of(name)))
    # DiffSynth reads no alpha: what scales the product is folded into the factors.
    return AdapterFormat(f"step-{step}", renamed, False, configured=False, folded=True)


def _with_adapter(name: str) -> str:
    """DiffSynth's names have that of the adapter in them, as the parameters of PEFT's layers have."""
    return name.replace(".lora_A.", ".lora_A.default.").replace(".lora_B.", ".lora_B.default.")


def _diffsynth(model: nn.Module) -> Callable[[str], str]:
    inner = bare_model(model)
    names = names_for(inner)
    if names is None or names.fused:
        raise ConfigError(
            f"output.format diffsynth: DiffSynth has no {type(inner).__name__} with the same "
            "modules; leave output.format out to save in the format of the model's own library"
        )
    return names.of


def _without(prefix: str, named: Callable[[str], str]) -> Callable[[str], str]:
    return lambda name: named(name).removeprefix(prefix)


def _described(named: Callable[[str], str], config: Any) -> dict[str, str]:
    """PEFT's configuration as diffusers writes it into the header of a LoRA file."""
    values = {
        # Lists of modules are sets in PEFT, which JSON has not; sorted, so that equal runs give equal files.
        named(key): sorted(value) if isinstance(value, set) else value
        for key, value in config.to_dict().items()
    }
    return {"format": "pt", _METADATA: json.dumps(values, indent=2, sort_keys=True)}


def export_model(
    model: nn.Module, task: Task, directory: Path, step: int = 0, ema: Ema | None = None
) -> SaveReport:
    """Save ``model``, as loaded or as trained in ``step`` steps, with what ``task`` puts beside it.

    In the format of the section ``output``; a model of its own for its average ``ema``. Collective; see
    ``zerostart.save``. What an earlier run has saved in ``directory`` is replaced once the new is whole.
    """
    # The model before what completes the directory: an index that stands there names models that are whole.
    report = _save(model, task, task.saved_in(directory), directory / AVERAGE, step, ema)
    world = current_world()
    with world.phase("completing the output directory"):
        if world.rank == 0:
            task.finish(directory)
    return report


def export_step(model: nn.Module, task: Task, directory: Path, ema: Ema | None, step: int) -> None:
    """Save what ``export_model`` saves into a folder of its own, after ``step`` steps; collective."""
    folder = step_folder(directory, step)
    _save(model, task, folder, folder / AVERAGE, step, ema)


def _save(
    model: nn.Module, task: Task, folder: Path, averaged: Path, step: int, ema: Ema | None
) -> SaveReport:
    # Two saves one after the other, each collective: the average is a model of its own, with its own marker.
    report = save_model(model, folder, save_request(model, task.config, step, task.beside))
    if ema is not None:
        save_model(model, averaged, save_request(model, task.config, step, task.beside, ema.overrides))
    return report
