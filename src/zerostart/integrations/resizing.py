"""``resize_token_embeddings`` of a model that FSDP2 has sharded already."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from zerostart.distributed.world import current_world
from zerostart.errors import EngineError
from zerostart.loading.record import record_of
from zerostart.upstream.torch_fsdp2 import has_run, whole_for_a_while

__all__ = ["resize_token_embeddings"]

#: What a model, its configuration and its layers say of their size.
_SIZES = ("vocab_size", "num_embeddings", "in_features", "out_features")


def resize_token_embeddings(
    model: Any,
    new_num_tokens: int | None = None,
    pad_to_multiple_of: int | None = None,
    mean_resizing: bool = True,
) -> Any:
    """The method of transformers, of whose arguments these are, for a model in FSDP2 shards; collective.

    transformers copies rows from the old weight to the new one. So the embeddings, and the head, are whole on
    every rank while it does; then they are shards again, with the rows that rank 0 drew for new tokens.
    Raises EngineError once the model has run, and where tensor parallel has cut the embeddings. Whatever
    fails does so on every rank, and leaves the old rows.
    """
    original = type(model).resize_token_embeddings
    embeddings = model.get_input_embeddings()
    have = embeddings.weight.shape[0]
    if new_num_tokens in (None, have) and pad_to_multiple_of is None:
        return original(model, new_num_tokens, pad_to_multiple_of, mean_resizing)
    _check(model, have, new_num_tokens)
    head = model.get_output_embeddings()
    layers = [layer for layer in (embeddings, head) if layer is not None]
    told = [model, model.config.get_text_config(), *layers]
    sizes = [(one, name, getattr(one, name)) for one in told for name in _SIZES if hasattr(one, name)]
    with whole_for_a_while(model, layers):
        try:
            with current_world().phase("resizing the embeddings"):
                original(model, new_num_tokens, pad_to_multiple_of, mean_resizing)
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


def _check(model: Any, have: int, wanted: int | None) -> None:
    what = f"the embeddings of {type(model).__name__} cannot be resized from {have} to {wanted}"
    if has_run(model):
        raise EngineError(f"{what} once FSDP2 has run a forward; resize them right after from_pretrained")
    if record_of(model).parallelism.mesh.tensor_parallel > 1 or not isinstance(
        model.get_input_embeddings().weight, DTensor
    ):
        raise EngineError(
            f"{what}, since tensor parallel has cut them; use tensor_parallel=1, or resize them in the "
            "checkpoint first (load it outside zerostart.enabled(), resize, save_pretrained)"
        )


def _take_over(layer: nn.Module, new: nn.Module) -> None:
    """Give ``layer`` the parameters and sizes of ``new``."""
    layer._parameters.update(new._parameters)
    for name in _SIZES:
        if hasattr(new, name):
            setattr(layer, name, getattr(new, name))
