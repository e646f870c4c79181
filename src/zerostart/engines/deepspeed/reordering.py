"""Move the tensors of one buffer into an optimizer's order, in place."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence

import torch

from zerostart.transfer.rearrange import is_in_place, rearrange
from zerostart.upstream.torch.tensors import storage_users

logger = logging.getLogger("zerostart")


def reorder(
    storage: torch.UntypedStorage, targets: Sequence[tuple[torch.Tensor, int]], end: int
) -> torch.Tensor | None:
    """Move contiguous tensors to byte offsets of their ``storage``; return the whole as bytes.

    Scratch memory is bounded. None, and nothing moved, if the storage ends before ``end``, if tensors
    overlap, or if a tensor that is not listed shares the storage.
    """
    segments = [(int(t.storage_offset()) * t.itemsize, to, t.nbytes) for t, to in targets if t.nbytes]
    overlapping = any(a[0] + a[2] > b[0] for a, b in itertools.pairwise(sorted(segments)))
    if end > storage.nbytes() or overlapping:
        return None
    base = torch.empty(0, dtype=torch.uint8, device=storage.device)
    base.set_(storage, 0, (storage.nbytes(),), (1,))
    if not is_in_place(segments):
        # Expected users: the listed tensors, ``base`` and ``storage``.
        if storage_users(storage) > len(targets) + 2:
            logger.warning(
                "tensors other than the model's parameters share their memory (a state dict, or views of "
                "them): the parameters are copied instead of being reordered in place; delete such "
                "tensors before deepspeed.initialize"
            )
            return None
        rearrange(base, segments)
    for tensor, place in targets:
        tensor.data = base[place : place + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
    return base
