"""Weights that DiffSynth's training scripts put into a pipeline after it was loaded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from zerostart.distributed.world import current_world
from zerostart.errors import ConfigError, CoverageError
from zerostart.integrations.saving import in_shards
from zerostart.live.parts import live_shards, loaded_parts
from zerostart.live.shards import with_whole
from zerostart.loading.source import open_source
from zerostart.state.resuming.load_state import planned_reads
from zerostart.transfer import Progress
from zerostart.transfer.collective import execute_together
from zerostart.upstream.deepspeed.state.engine import drop_gathered

Original = Callable[[], Any]


def resume(original: Original, **call: Any) -> Any:
    """``DiffusionTrainingModule.resume_from_checkpoint``: each rank reads its own bytes of the file.

    Raises CoverageError for tensors that the pipeline does not have, and what ``zerostart.load`` raises for
    a file that cannot be read.
    """
    module, path, prefix = call["self"], call["path"], call["remove_prefix_in_ckpt"] or ""
    if path is None or not _shared_out(module):
        return original()
    world = current_world()
    with world.phase("resuming from a file of weights"):
        catalog = open_source(path, world)
        with world.phase("looking at what is resumed"):
            shards = with_whole(module, live_shards(module, world), world)
            unexpected = sorted(name for name in catalog.weights if prefix + name not in shards)
            if unexpected:
                raise CoverageError(
                    f"{path} has {len(unexpected)} tensors that the pipeline does not have, among them "
                    f"{unexpected[0]}; name the prefix that they were saved without "
                    f"(--remove_prefix_in_ckpt, {prefix!r} here)",
                    (),
                    unexpected,
                    {},
                )
            given = [(name, shards[prefix + name]) for name in catalog.weights]
            wanted = [(name, shard.layout, shard.storage) for name, shard in given]
            plan, storages, tuning = planned_reads(catalog, wanted)
        with torch.no_grad():
            execute_together(plan, storages, Progress(plan.read_bytes, False), tuning, world)
        drop_gathered(module.parameters())
    return None


def load_lora(original: Original, **call: Any) -> Any:
    """``BasePipeline.load_lora``, which adds a LoRA to whole weights.

    Raises ConfigError for a model of which each rank has a part.
    """
    model = call["module"]
    if in_shards(model):
        raise ConfigError(
            f"load_lora (--preset_lora_path) adds a LoRA to the weights of {type(model).__name__}, of which "
            "each rank has a part: train on from it with --lora_checkpoint, or fuse it in one process and "
            "load the file of that"
        )
    return original()


def _shared_out(module: nn.Module) -> bool:
    return any(in_shards(part) for _, part, _ in loaded_parts(module))
