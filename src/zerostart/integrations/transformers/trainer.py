"""Save and resume sharded models with the HF Trainer, on DeepSpeed and FSDP2.

A checkpoint has an ordinary model, as of ``save_pretrained``, the Trainer's own files, and a directory of
``save_state`` instead of DeepSpeed's or accelerate's files.
"""

from __future__ import annotations

import copy
import logging
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from zerostart.checkpoint.formats.saved_state import state_in
from zerostart.checkpoint.strict_json import read_json
from zerostart.distributed.world import current_world
from zerostart.errors import CheckpointError, ReadError
from zerostart.integrations.saving import already_saved, is_sharded, save_weights
from zerostart.live.model import find_loaded_models
from zerostart.state.resuming.load_state import restore_state
from zerostart.state.saving.adapters import find_adapted_model, has_adapters
from zerostart.upstream.types import Trainer

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

Original = Callable[[], object]
#: The Trainer's schedule file.
_SCHEDULE = "scheduler.pt"
#: Its checkpoint directories, and the last file that it writes there.
_CHECKPOINT, _STATE = re.compile(r"checkpoint-(\d+)"), "trainer_state.json"
logger = logging.getLogger("zerostart")


def save_model(
    original: Original, *, self: Trainer, output_dir: str | None, _internal_call: bool, **_: object
) -> object:
    """Replace ``Trainer.save_model``, which every rank calls."""
    trainer = self
    directory = output_dir if output_dir is not None else trainer.args.output_dir
    model = trainer.accelerator.unwrap_model(trainer.model, keep_torch_compile=False)
    if not _saves_shards(trainer, model):
        return original()
    save_weights(model, directory)
    # The Trainer, or a subclass, writes the other files.
    with (
        current_world().phase("saving next to the model"),
        already_saved(model, directory),
        already_saved(trainer.model, directory),
    ):
        trainer._save(directory, state_dict={})
    if trainer.args.push_to_hub and not _internal_call:
        trainer.push_to_hub(commit_message="Model save", revision=trainer.args.hub_revision)
    return None


def _saves_shards(trainer: Trainer, model: nn.Module) -> bool:
    sharding = trainer.is_deepspeed_enabled or _is_fsdp2(trainer)
    if not sharding or trainer.args.save_on_each_node or not hasattr(model, "save_pretrained"):
        return False
    if has_adapters(model) and find_adapted_model(model) is None:
        return False  # a wrapper: its parameters are not only the adapters of the model inside
    return next(find_loaded_models(model), None) is not None or is_sharded(model)


def _is_fsdp2(trainer: Trainer) -> bool:
    plugin = getattr(trainer.accelerator.state, "fsdp_plugin", None)
    return plugin is not None and plugin.fsdp_version == 2


def load_deepspeed(
    original: Original, *, deepspeed_engine: DeepSpeedEngine, checkpoint_path: str, **_: object
) -> object:
    """Replace ``deepspeed_load_checkpoint``, which looks for DeepSpeed's file names."""
    if state_in(checkpoint_path) is None:
        return original()
    deepspeed_engine.load_checkpoint(checkpoint_path)
    return None


def last_checkpoint(original: Original, *, folder: str, **_: object) -> str | None:
    """Replace ``get_last_checkpoint``: return the newest complete checkpoint; None without any.

    The Trainer writes its state last.
    """
    entries = Path(folder).iterdir()
    numbered = {int(m[1]): path for path in entries if (m := _CHECKPOINT.fullmatch(path.name))}
    # Newest first. trainer_state.json is written last: a checkpoint without it is incomplete.
    for number in sorted(numbered, reverse=True):
        try:
            read_json(numbered[number] / _STATE, "Trainer's state")
        except (CheckpointError, ReadError) as error:
            logger.warning("%s is not a complete checkpoint and is skipped: %s", numbered[number], error)
        else:
            return os.fspath(numbered[number])
    return None


def load_from_checkpoint(
    original: Original, *, self: Trainer, resume_from_checkpoint: str, model: nn.Module | None, **_: object
) -> object:
    """Replace ``Trainer._load_from_checkpoint``: on FSDP2, load model and optimizer."""
    path = state_in(resume_from_checkpoint) if _is_fsdp2(self) else None
    if path is None:
        return original()
    restore_state(path, model if model is not None else self.model, self.optimizer)
    return None


def load_optimizer_and_scheduler(
    original: Original, *, self: Trainer, checkpoint: str | None, **_: object
) -> object:
    """Replace ``Trainer._load_optimizer_and_scheduler``: on FSDP2, load only the schedule."""
    if checkpoint is None or not _is_fsdp2(self) or state_in(checkpoint) is None:
        return original()
    schedule = Path(os.fspath(checkpoint)) / _SCHEDULE
    if schedule.is_file():
        self.lr_scheduler.load_state_dict(torch.load(schedule, weights_only=True))
    return None


def prepare_for_training(original: Original, *, self: Trainer, **_: object) -> object:
    """Replace ``Trainer._prepare_for_training``: let DeepSpeed train a model a second time.

    ``train`` has destroyed the engine of the last call, and takes it for a wrapped model.
    """
    if self.is_deepspeed_enabled and next(find_loaded_models(self.model), None) is not None:
        self.model_wrapped, self.deepspeed = self.model, None
    return original()


def evaluation_loop(original: Original, *, self: Trainer, **_: object) -> object:
    """Replace ``Trainer.evaluation_loop``: evaluate a sharded model before training.

    The Trainer would prepare the model here for evaluation only, and could not train it afterwards.
    """
    sharding = self.is_deepspeed_enabled or _is_fsdp2(self)
    if not sharding or self.accelerator._models or next(find_loaded_models(self.model), None) is None:
        return original()
    with _prepared_for_evaluation(self):
        return original()


@contextmanager
def _prepared_for_evaluation(trainer: Trainer) -> Iterator[None]:
    deepspeed, fsdp = trainer.is_deepspeed_enabled, trainer.is_fsdp_enabled
    config = trainer.accelerator.state.deepspeed_plugin.hf_ds_config if deepspeed else None
    before = copy.deepcopy(config.config) if config is not None else {}
    # ZeRO-3 gathers parameters in an engine. Others run the model as it is: FSDP2 has its hooks already, and
    # ZeRO-1 and 2 have whole parameters.
    if config is None or not config.is_zero3():
        trainer.is_deepspeed_enabled = trainer.is_fsdp_enabled = False
    try:
        yield
    finally:
        trainer.is_deepspeed_enabled, trainer.is_fsdp_enabled = deepspeed, fsdp
        trainer.accelerator.unwrap_model(trainer.model, keep_fp32_wrapper=False)
        if config is not None:
            # Evaluation replaces "auto" and deletes the optimizer.
            config.config.clear()
            config.config.update(before)
            trainer.deepspeed = None
        trainer.accelerator.free_memory()  # and the engine
        trainer.model_wrapped = trainer.model
