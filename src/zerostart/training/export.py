"""The end of a run: a model directory that plain transformers loads, written one tensor at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

import zerostart
from zerostart.checkpoint.shards import plan_shards
from zerostart.checkpoint.writer import CheckpointWriter
from zerostart.distributed.world import current_world
from zerostart.recipe.dtypes import spelling

__all__ = ["export_model"]


def export_model(model: nn.Module, tokenizer: Any, directory: Path, max_shard_size: str) -> None:
    """Write ``model`` (a transformers model, as loaded or as trained), its configuration and ``tokenizer``.

    Collective. Tensors have the model's own names and shapes, which ``from_pretrained`` accepts; rank 0
    holds one of them at a time. An earlier model in ``directory`` is replaced once the new one is whole.
    Raises :class:`WriteError` on every rank when writing fails on rank 0.
    """
    world = current_world()
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # a forward without a backward leaves parameters gathered, in the compute type
    with world.phase("saving the configuration"):
        if world.rank == 0:
            directory.mkdir(parents=True, exist_ok=True)
            _save_settings(model, directory)
            tokenizer.save_pretrained(directory)
    tensors = _stored_tensors(model)
    layout = plan_shards(
        [(name, spelling(dtype), shape) for name, (dtype, shape) in tensors.items()], max_shard_size
    )
    if world.rank != 0:
        for _ in zerostart.full_tensors(model):
            continue
        world.raise_together(None, "saving the weights")
        return
    _write_weights(model, CheckpointWriter(directory, layout))


def _write_weights(model: nn.Module, writer: CheckpointWriter) -> None:
    """Rank 0's part. After an error it goes on gathering, or the other ranks would wait for it."""
    gathered = zerostart.full_tensors(model)
    failure: Exception | None = None
    try:
        with writer:
            for name, tensor in gathered:
                if name in writer.layout.tensors and tensor is not None:
                    writer.write(name, tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    except Exception as error:  # raised below, on every rank
        failure = error
        for _ in gathered:
            continue
    current_world().raise_together(failure, "saving the weights")


def _stored_tensors(model: nn.Module) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Dtype and whole shape of each tensor to store; of tied tensors the one that the others follow."""
    followers = set(getattr(model, "all_tied_weights_keys", {}) or {})
    state = model.state_dict(keep_vars=True)
    chosen: dict[int, str] = {}
    for name, tensor in state.items():
        if id(tensor) not in chosen or chosen[id(tensor)] in followers:
            chosen[id(tensor)] = name
    stored = {name: tensor for name, tensor in state.items() if chosen[id(tensor)] == name}
    return {
        name: (tensor.dtype, tuple(getattr(tensor, "ds_shape", tensor.shape)))
        for name, tensor in stored.items()
    }


def _save_settings(model: Any, directory: Path) -> None:
    model.config.architectures = [type(model).__name__.removeprefix("FSDP")]
    model.config.dtype = next(model.parameters()).dtype
    model.config.save_pretrained(directory)
    if model.can_generate() and model.generation_config is not None:
        model.generation_config.save_pretrained(directory)
