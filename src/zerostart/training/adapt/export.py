"""What a run leaves in its output directory: at the end, and every so many steps before."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from zerostart.distributed.world import current_world
from zerostart.state.saving.save import SaveReport, save
from zerostart.training.adapt.ema import Ema
from zerostart.training.adapt.exporting import save_request, step_folder
from zerostart.training.loop.task import Task

#: Where the average of the weights goes, beside the model or in the folder of a step.
AVERAGE = "ema"


def export_model(
    model: nn.Module, task: Task, directory: Path, step: int = 0, ema: Ema | None = None
) -> SaveReport:
    """Save ``model``, as loaded or as trained in ``step`` steps, with what ``task`` puts beside it.

    In the format of the section ``output``; a model of its own for its average ``ema``. Collective; see
    ``zerostart.save``. What an earlier run has saved in ``directory`` is replaced once the new is whole.
    """
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
    report = save(model, folder, save_request(model, task.config, step, task.beside))
    if ema is not None:
        save(model, averaged, save_request(model, task.config, step, task.beside, ema.overrides))
    return report
