"""The end of a run: a model directory that the model's own library loads."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from zerostart.distributed.world import current_world
from zerostart.state.saving import SaveReport, SaveRequest, save
from zerostart.training.tasks.base import Task

__all__ = ["export_model"]


def export_model(model: nn.Module, task: Task, directory: Path) -> SaveReport:
    """Save ``model``, as loaded or as trained, with its settings and what ``task`` puts beside it.

    Collective; see ``zerostart.save``. What an earlier run has saved in ``directory`` is replaced once the
    new is whole.
    """
    output = task.config.output
    report = save(model, task.saved_in(directory), SaveRequest(output.max_shard_size, beside=task.beside))
    world = current_world()
    with world.phase("completing the output directory"):
        if world.rank == 0:
            task.finish(directory)
    return report
