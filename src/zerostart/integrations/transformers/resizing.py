"""``resize_token_embeddings`` of a model that FSDP2 has sharded already, or that ZeRO-3 partitions."""

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

#: What a model, its configuration and its layers say of their size.
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
    once the model has run or has its optimizer, if tensor parallelism has sliced the embeddings, and if
    another part of ``root`` has the same weight.
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
    """By transformers, which gathers the rows that it copies if it is told of partitions.

    What it leaves is whole on every rank until the engine starts.
    """
    with current_world().phase("resizing the embeddings"), knowing_partitions():
        type(model).resize_token_embeddings(model, *arguments)
    # New rows are drawn at random by each rank: rank 0's hold.
    for layer in (model.get_input_embeddings(), model.get_output_embeddings()):
        for parameter in () if layer is None else layer.parameters():
            if dist.is_initialized():
                dist.broadcast(parameter.data, 0)
    return model.get_input_embeddings()


def _resize_units(root: PreTrainedModel, model: PreTrainedModel, arguments: tuple[object, ...]) -> object:
    """Of FSDP2's units, by transformers, which copies rows from the old weight to the new one.

    So the embeddings, and the head, are whole on every rank while it does; then they are shards again.
    Whatever fails does so on every rank, and leaves the old rows.
    """
    original, embeddings = type(model).resize_token_embeddings, model.get_input_embeddings()
    head = model.get_output_embeddings()
    layers = [layer for layer in (embeddings, head) if layer is not None]
    # transformers writes the new size into all of these; where it fails they get their old one back.
    told = [model, model.config.get_text_config(), *layers]
    sizes = [(one, name, getattr(one, name)) for one in told for name in _SIZES if hasattr(one, name)]
    with get_record(root).engine.whole_for_a_while(root, layers):
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
            # The layers themselves stay: the engine's hooks are on them.
            model.set_input_embeddings(embeddings)
            if head is not None:
                model.set_output_embeddings(head)
    return embeddings


def _check(root: PreTrainedModel, model: PreTrainedModel, have: int, wanted: int | None) -> None:
    what = f"the embeddings of {type(model).__name__} cannot be resized from {have} to {wanted}"
    weight = model.get_input_embeddings().weight
    for engine in engine_families():
        engine.check_replaceable(root, weight, what)
    layers = (model.get_input_embeddings(), model.get_output_embeddings())
    tied = [n for n, m in root.named_modules() if m not in layers and weight in set(m._parameters.values())]
    if tied:
        raise EngineError(
            f"{what}, because {tied[0]} of {type(root).__name__} has the same weight: resize those of "
            f"{type(root).__name__}"
        )
    record = get_record(root)
    whole = record.engine.uses_fully_shard and not isinstance(weight, DTensor)
    if whole or record.parallelism.mesh.tensor_parallel > 1:
        raise EngineError(
            f"{what}, because tensor parallelism has sliced them; use tensor_parallel=1, or resize "
            "them in the checkpoint first (load it outside zerostart.enabled(), resize, "
            "save_pretrained)"
        )


def _take_over(layer: nn.Module, new: nn.Module) -> None:
    """Give ``layer`` the parameters and sizes of ``new``."""
    layer._parameters.update(new._parameters)
    for name in _SIZES:
        if hasattr(new, name):
            setattr(layer, name, getattr(new, name))
