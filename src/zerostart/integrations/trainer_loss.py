"""The HF Trainer's loss of sequences that ranks share on DeepSpeed: told where one process has another.

transformers takes the mean over the tokens of each micro-batch by itself, whatever the others have, and sums
what the ranks of a sequence give; below stage 3 DeepSpeed divides that by the ranks with batches of their
own.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from zerostart.loading.record import loaded_models, record_of
from zerostart.upstream.deepspeed.parallel.ulysses import sequence_group

logger = logging.getLogger("zerostart")
_IGNORED = -100
_told: set[str] = set()
#: Of this process, how many tokens each of the first micro-batches has had that are predicted.
_counts: list[int] = []
#: So many are looked at, by one small collective each, and no more: rows that differ do so soon.
_LOOKED = 16


def shared_loss(original: Callable[[], Any], **call: Any) -> Any:
    """``deepspeed_sp_compute_loss``, after a warning on rank 0, once each, of what it does otherwise."""
    part = next(loaded_models(call["model"]), None)
    if part is not None:
        _tell(part, call["accelerator"], call["inputs"])
    return original()


def _tell(part: torch.nn.Module, accelerator: Any, inputs: Any) -> None:
    engine = record_of(part).engine
    size = engine.mesh.sequence_parallel
    if size > 1 and engine.replicates_parameters:
        _once(
            f"transformers' Trainer sums the gradients of the {size} ranks that share a sequence, and "
            f"{engine.title} does not divide them by these: gradients and the logged norm are {size} times "
            f"those of one process. Set max_grad_norm to {size} times what is meant, or use ZeRO stage 3"
        )
    batches = engine.mesh.world_size // max(size, 1) * accelerator.gradient_accumulation_steps
    labels = inputs.get("shift_labels")
    if size > 1 and batches > 1 and isinstance(labels, torch.Tensor) and _looks():
        count = (labels != _IGNORED).sum()
        dist.all_reduce(count, group=sequence_group())
        _counts.append(int(count))
        if len(set(_counts)) > 1:
            _once(
                "rows differ in how many tokens are predicted, and transformers' Trainer takes the mean of "
                f"the means of {batches} micro-batches where ranks share sequences: tokens of short rows "
                "count more than in one process. Use rows of one length (packing), or zerostart train"
            )


def _looks() -> bool:
    return len(_counts) < _LOOKED and len(set(_counts)) < 2


def _once(text: str) -> None:
    if text not in _told and dist.get_rank() == 0:
        logger.warning("%s", text)
    _told.add(text)
