"""The HF Trainer's ``save_model``, and what it resumes from, on DeepSpeed and FSDP2.

Its checkpoints have an ordinary model, as ``save_pretrained`` leaves it, the Trainer's own files, and a
directory of ``save_state`` where DeepSpeed's or accelerate's would be.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from zerostart.checkpoint.finding import state_in
from zerostart.checkpoint.strict_json import read_json
from zerostart.distributed.world import current_world
from zerostart.errors import CheckpointError, ReadError
from zerostart.integrations.saving import already_saved, in_shards, save_weights
from zerostart.live.record import loaded_models
from zerostart.state.resuming.load_state import load_state

Original = Callable[[], Any]
#: The Trainer's file of its schedule.
_SCHEDULE = "scheduler.pt"
#: The directories of its checkpoints, and the file that it writes last there.
_CHECKPOINT, _STATE = re.compile(r"checkpoint-(\d+)"), "trainer_state.json"
logger = logging.getLogger("zerostart")


def save_model(original: Original, **call: Any) -> Any:
    """``Trainer.save_model``, which every rank calls."""
    trainer = call["self"]
    directory = call["output_dir"] if call["output_dir"] is not None else trainer.args.output_dir
    model = trainer.accelerator.unwrap_model(trainer.model, keep_torch_compile=False)
    if not _served(trainer, model):
        return original()
    save_weights(model, directory)
    # What belongs beside the weights is written as ever: by the Trainer, or by a class of one's own.
    with (
        current_world().phase("saving beside the model"),
        already_saved(model, directory),
        already_saved(trainer.model, directory),
    ):
        trainer._save(directory, state_dict={})
    if trainer.args.push_to_hub and not call["_internal_call"]:
        trainer.push_to_hub(commit_message="Model save", revision=trainer.args.hub_revision)
    return None


def _served(trainer: Any, model: Any) -> bool:
    sharding = trainer.is_deepspeed_enabled or _is_fsdp2(trainer)
    if not sharding or trainer.args.save_on_each_node or not hasattr(model, "save_pretrained"):
        return False
    return next(loaded_models(model), None) is not None or in_shards(model)


def _is_fsdp2(trainer: Any) -> bool:
    plugin = getattr(trainer.accelerator.state, "fsdp_plugin", None)
    return plugin is not None and plugin.fsdp_version == 2


def load_deepspeed(original: Original, **call: Any) -> Any:
    """``deepspeed_load_checkpoint``, which knows DeepSpeed's checkpoints by their names."""
    if state_in(call["checkpoint_path"]) is None:
        return original()
    call["deepspeed_engine"].load_checkpoint(call["checkpoint_path"])
    return None


def last_checkpoint(original: Original, **call: Any) -> Any:
    """``get_last_checkpoint``, as the Trainer calls it: of those that are complete; None without any.

    The Trainer writes its own state into a checkpoint when all else is there.
    """
    folder = Path(call["folder"])
    numbered = {int(m[1]): path for path in folder.iterdir() if (m := _CHECKPOINT.fullmatch(path.name))}
    for number in sorted(numbered, reverse=True):
        try:
            read_json(numbered[number] / _STATE, "Trainer's state")
        except (CheckpointError, ReadError) as error:
            logger.warning("%s is not complete, and is passed over: %s", numbered[number], error)
        else:
            return os.fspath(numbered[number])
    return None


def load_from_checkpoint(original: Original, **call: Any) -> Any:
    """``Trainer._load_from_checkpoint``: on FSDP2 the model, with its optimizer."""
    trainer, checkpoint = call["self"], call["resume_from_checkpoint"]
    path = state_in(checkpoint) if _is_fsdp2(trainer) else None
    if path is None:
        return original()
    load_state(path, call["model"] if call["model"] is not None else trainer.model, trainer.optimizer)
    return None


def load_optimizer_and_scheduler(original: Original, **call: Any) -> Any:
    """``Trainer._load_optimizer_and_scheduler``: after the above the schedule is left."""
    trainer, checkpoint = call["self"], call["checkpoint"]
    if checkpoint is None or not _is_fsdp2(trainer) or state_in(checkpoint) is None:
        return original()
    schedule = Path(os.fspath(checkpoint)) / _SCHEDULE
    if schedule.is_file():
        trainer.lr_scheduler.load_state_dict(torch.load(schedule, weights_only=True))
    return None
