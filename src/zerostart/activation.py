"""Activation checkpointing: ``checkpoint`` for a call, ``checkpoint_blocks`` for a model's blocks.

``zerostart`` has them as ``gradient_checkpoint`` and ``checkpoint_blocks``. Nothing heavy is imported before
one is called.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from torch import nn

__all__ = ["checkpoint", "checkpoint_blocks", "gradient_checkpoint"]

Result = TypeVar("Result")


def gradient_checkpoint(
    function: Callable[..., Result], *args: object, offload: bool = False, **kwargs: object
) -> Result:
    """Call ``function(*args, **kwargs)`` without keeping its activations; the backward runs it again.

    Values and gradients are those without it, to the bit, on every engine, random numbers included. Keywords
    stay keywords; tensors may stand anywhere in tuples, lists and dictionaries, need no gradient, and be
    None; the function may give several. A list or dictionary that it changes (a feature cache) is changed
    once, as without. Calls may be nested. See ``docs/pipelines.md``.

    Args:
        offload: let what has to be kept, the tensors among the arguments that need a gradient, wait in pinned
            host memory, copied there and back while the device computes (run on one H200, and on
            the pretend accelerator of the tests). Nothing moves where there is none.

    Raises:
        ConfigError: for a transformers cache with tokens in it, or a list or dictionary of a class of its
            own that the function changes.

    Example:
        >>> import torch, zerostart
        >>> x = torch.ones(3, requires_grad=True)
        >>> zerostart.gradient_checkpoint(torch.mul, x, other=2 * x).sum().backward()
        >>> x.grad.tolist()
        [4.0, 4.0, 4.0]
    """
    from zerostart.engines.gradient_checkpoint import checkpointed

    made: Result = checkpointed(function, args, kwargs, offload)
    return made


def checkpoint_blocks(
    model: nn.Module,
    blocks: Sequence[str | type[nn.Module]] | None = None,
    offload: bool = False,
    every: int = 1,
) -> tuple[str, ...]:
    """Apply ``gradient_checkpoint`` to the blocks of ``model`` from now on, whatever their code is.

    Before or after the engine has the model. Nothing of it changes but the ``forward`` of its blocks; names
    and state dict stay.

    Args:
        blocks: classes, their names, or names of modules (``transformer.blocks.*``); None: the classes that
            the model declares as not to be split, else the entries of its outermost ``ModuleList`` modules.
        offload: as in ``gradient_checkpoint``.
        every: 1 for each block, 2 for each second, and so on.

    Returns:
        The names of the modules.

    Raises:
        ConfigError: where there are no blocks, or ``blocks`` is no list or has an entry that nothing matches.

    Example:
        >>> import torch, zerostart
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU(), torch.nn.Linear(2, 2))
        >>> zerostart.checkpoint_blocks(model, blocks=["Linear"])
        ('0', '2')
    """
    from zerostart.engines.gradient_checkpoint import checkpoint_blocks as checkpoint

    return checkpoint(model, blocks, offload, every)


checkpoint = gradient_checkpoint
