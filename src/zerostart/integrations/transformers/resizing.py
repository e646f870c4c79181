"""Resize the token embeddings of a model in shards."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from zerostart.distributed.world import current_world
from zerostart.engines import engine_families, full_shape
from zerostart.errors import EngineError
from zerostart.live.model import get_record
from zerostart.upstream.transformers.loading import knowing_partitions

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: Size attributes of a model, its configuration and its layers.
_SIZES = ("vocab_size", "num_embeddings", "in_features", "out_features")


def resize_token_embeddings(
    root: PreTrainedModel,
    model: PreTrainedModel,
    new_num_tokens: int | None = None,
    pad_to_multiple_of: int | None = None,
    mean_resizing: bool = True,
) -> object:
    """Resize the embeddings of ``model``, which is ``root`` or a part of it, in shards; collective.

    Takes the other arguments of transformers' method. Rank 0 draws the rows of new tokens. Raises EngineError
    after the first forward, after the optimizer is created, if tensor parallelism has sliced the embeddings,
    and if another part of ``root`` has the same weight.
    """
    arguments = (new_num_tokens, pad_to_multiple_of, mean_resizing)
    have = full_shape(model.get_input_embeddings().weight)[0]
    if new_num_tokens in (None, have) and pad_to_multiple_of is None:
        return model.get_input_embeddings()
    _check(root, model, have, new_num_tokens)
    if get_record(root).engine.uses_fully_shard:
        return _resize_units(root, model, arguments)
    return _resize_partitions(model, arguments)


def _resize_partitions(model: PreTrainedModel, arguments: tuple[object, ...]) -> object:
    """Resize ZeRO-3's parameters with transformers, which gathers the rows that it copies.

    The new weights are whole on every rank until the engine starts.
    """
    with current_world().phase("resizing the embeddings"), knowing_partitions():
        type(model).resize_token_embeddings(model, *arguments)
    # Each rank has drawn new rows: use those of rank 0.
    for layer in (model.get_input_embeddings(), model.get_output_embeddings()):
        for parameter in () if layer is None else layer.parameters():
            if dist.is_initialized():
                dist.broadcast(parameter.data, 0)
    return model.get_input_embeddings()


def _resize_units(root: PreTrainedModel, model: PreTrainedModel, arguments: tuple[object, ...]) -> object:
    """Resize FSDP2's parameters with transformers; the embeddings are whole meanwhile.

    If it fails, it fails on every rank, and the old rows stay.
    """
    original, embeddings = type(model).resize_token_embeddings, model.get_input_embeddings()
    head = model.get_output_embeddings()
    layers = [layer for layer in (embeddings, head) if layer is not None]
    # transformers writes the new size into all of these: restore it after an error.
    owners = [model, model.config.get_text_config(), *layers]
    sizes = [(one, name, getattr(one, name)) for one in owners for name in _SIZES if hasattr(one, name)]
    with get_record(root).engine.unshard_modules(root, layers):
        try:
            with current_world().phase("resizing the embeddings"):
                original(model, *arguments)
            _take_over(embeddings, model.get_input_embeddings())
            if head is not None:
                _take_over(head, model.get_output_embeddings())
        except BaseException:
            for one, name, size in sizes:
                setattr(one, name, size)
            raise
        finally:
            # Keep the layers: the engine's hooks are on them.
            model.set_input_embeddings(embeddings)
            if head is not None:
                model.set_output_embeddings(head)
    return embeddings


def _check(root: PreTrainedModel, model: PreTrainedModel, size: int, new_size: int | None) -> None:
    message = f"the embeddings of {type(model).__name__} cannot be resized from {size} to {new_size}"
    weight = model.get_input_embeddings().weight
    for engine in engine_families():
        engine.check_replaceable(root, weight, message)
    layers = (model.get_input_embeddings(), model.get_output_embeddings())
    tied = [n for n, m in root.named_modules() if m not in layers and weight in set(m._parameters.values())]
    if tied:
        raise EngineError(
            f"{message}, because {tied[0]} of {type(root).__name__} has the same weight: resize those of "
            f"{type(root).__name__}"
        )
    record = get_record(root)
    is_sliced = record.engine.uses_fully_shard and not isinstance(weight, DTensor)
    if is_sliced or record.parallelism.mesh.tensor_parallel > 1:
        raise EngineError(
            f"{message}, because tensor parallelism has sliced them; use tensor_parallel=1, or resize "
            "them in the checkpoint first (load it outside zerostart.enabled(), resize, "
            "save_pretrained)"
        )


def _take_over(layer: nn.Module, new: nn.Module) -> None:
    """Move the parameters and sizes of ``new`` to ``layer``."""
    layer._parameters.update(new._parameters)
    for name in _SIZES:
        if hasattr(new, name):
            setattr(layer, name, getattr(new, name))
