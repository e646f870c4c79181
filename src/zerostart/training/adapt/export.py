"""Save a trained model whole, its trained tensors or its LoRA, in the chosen format.

Nothing is gathered: each rank writes its own bytes in every format (``zerostart.save``).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from torch import nn

from zerostart.distributed.world import current_world
from zerostart.engines import full_shape
from zerostart.errors import ConfigError
from zerostart.live.model import unwrap_model
from zerostart.models import library_of
from zerostart.state.saving.adapter_formats import (
    PREFIX,
    drop_prefix,
    find_adapter_format,
    find_diffsynth_names,
)
from zerostart.state.saving.contents import TensorOverrides
from zerostart.state.saving.save import SaveRequest, save_model
from zerostart.training.adapt.ema import Ema
from zerostart.training.loop.task import Task

if TYPE_CHECKING:
    from zerostart.training.config.configuration import OutputConfig

#: Folder of saves before the end, in the output directory, with a folder for each step.
EXPORTS = "exports"
#: Folder of the averaged weights, in the output directory or in the folder of a step.
AVERAGE = "ema"
#: Key of the format, for messages.
_FORMAT = "output.format"


class Exporter:
    """Saves the trained model of a run into its output directory.

    ``output`` has the format; ``adapted``: the model has a LoRA.
    """

    def __init__(
        self, model: nn.Module, output: OutputConfig, adapted: bool, task: Task, directory: Path
    ) -> None:
        """Raises ConfigError if ``model``, with its adapters, cannot be saved in that format."""
        self._model = model
        self._output = output
        self._adapted = adapted
        self._task = task
        self._directory = directory
        self._request(0).check()
        if not output.merge:
            return
        for name, parameter in model.named_parameters():
            if ".lora_" in name and len(full_shape(parameter)) != 2:
                raise ConfigError(
                    f"output.merge: {name} belongs to a convolution, whose adapters cannot be merged shard "
                    "by shard; leave it out of lora.targets, or leave output.merge out"
                )

    def due(self, step: int) -> bool:
        """Return True if the model is to be saved after ``step`` steps."""
        return bool(self._output.every) and step % self._output.every == 0

    def save_step(self, step: int, ema: Ema | None) -> None:
        """Save the model, and its average, into the folder of ``step``; collective."""
        folder = self._directory / EXPORTS / f"step-{step}"
        self._save(folder, folder / AVERAGE, step, ema)

    def save_final(self, step: int, ema: Ema | None) -> None:
        """Save the final model, its average, and the other files of the task; collective."""
        # The model before the task's files: an index names models that are complete.
        self._save(self._task.saved_in(self._directory), self._directory / AVERAGE, step, ema)
        world = current_world()
        with world.phase("completing the output directory"):
            if world.rank == 0:
                self._task.finish(self._directory)

    def _save(self, folder: Path, averaged: Path, step: int, ema: Ema | None) -> None:
        save_model(self._request(step), folder)
        if ema is not None:
            save_model(self._request(step, ema.overrides), averaged)

    def _request(self, step: int, overrides: TensorOverrides | None = None) -> SaveRequest:
        """Return the save after ``step`` steps, with ``overrides`` instead of the model's own values.

        Raises ConfigError for tensors that have no name in DiffSynth.
        """
        model, output = self._model, self._output
        request = SaveRequest(model, output.max_shard_size, overrides=overrides)
        stem, prefix = f"step-{step}", output.remove_prefix
        if self._adapted and output.merge:
            return replace(request, merge_adapters=True)
        if self._adapted:
            inner = unwrap_model(model)
            kind = output.format or library_of(inner).adapter_format
            chosen = find_adapter_format(kind, inner, key=_FORMAT, stem=stem, prefix=prefix)
            return replace(request, adapters_only=True, adapter_format=chosen)
        if output.format == "diffsynth":
            names = find_diffsynth_names(unwrap_model(model), _FORMAT)
            renamed = drop_prefix(prefix, lambda name: PREFIX + names(name))
            # DiffSynth has one file.
            return replace(request, trainable_only=True, renamed=renamed, stem=stem, max_shard_size=2**62)
        if output.trainable_only:
            # None keeps the names of the model's own library.
            plain = drop_prefix(prefix, lambda name: name) if prefix else None
            return replace(request, trainable_only=True, renamed=plain)
        return request
