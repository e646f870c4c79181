"""Activation checkpointing: ``checkpoint`` for a call, ``checkpoint_blocks`` for a model's blocks.

``zerostart`` has them as ``gradient_checkpoint`` and ``checkpoint_blocks``. Heavy imports wait for the first
call.
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

    Values and gradients have the same bits as without it on every engine, random numbers included. Arguments
    may be tuples, lists and dictionaries of tensors or None, also without gradients, and the function may
    return several values. A list or dictionary that the function changes (a feature cache) is changed once.
    Calls may be nested. See ``docs/pipelines.md``.

    Args:
        offload: keep arguments that need a gradient in pinned host memory until the backward. Without an
            accelerator nothing is copied. Tested on one H200 and on the simulated accelerator of the tests.

    Raises:
        ConfigError: for a transformers cache with tokens, or a changed list or dictionary of a subclass.

    Example:
        >>> import torch, zerostart
        >>> x = torch.ones(3, requires_grad=True)
        >>> zerostart.gradient_checkpoint(torch.mul, x, other=2 * x).sum().backward()
        >>> x.grad.tolist()
        [4.0, 4.0, 4.0]
    """
    from zerostart.engines.gradient_checkpoint import run_checkpointed

    result: Result = run_checkpointed(function, args, kwargs, offload)
    return result


def checkpoint_blocks(
    model: nn.Module,
    blocks: Sequence[str | type[nn.Module]] | None = None,
    offload: bool = False,
    every: int = 1,
) -> tuple[str, ...]:
    """Apply ``gradient_checkpoint`` to the blocks of ``model``.

    Call it before or after the engine takes the model. Only the ``forward`` of the blocks changes.

    Args:
        blocks: classes, class names, or module names (``transformer.blocks.*``). None: the classes in the
            model's ``_no_split_modules``, otherwise the entries of its outermost ``ModuleList`` modules.
        offload: as in ``gradient_checkpoint``.
        every: 1 for each block, 2 for each second block, and so on.

    Returns:
        The names of the modules.

    Raises:
        ConfigError: if there are no blocks, or ``blocks`` is not a list or has an entry without a match.

    Example:
        >>> import torch, zerostart
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU(), torch.nn.Linear(2, 2))
        >>> zerostart.checkpoint_blocks(model, blocks=["Linear"])
        ('0', '2')
    """
    from zerostart.engines.gradient_checkpoint import checkpoint_blocks as checkpoint

    return checkpoint(model, blocks, offload, every)


checkpoint = gradient_checkpoint
