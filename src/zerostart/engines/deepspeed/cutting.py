"""Experts modules cut to this rank's experts, before DeepSpeed shards their parameters further."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from zerostart.engines.exchange import exchange_tokens, expert_modules
from zerostart.layout import Parallelism
from zerostart.upstream.deepspeed_experts import ExpertGroups

__all__ = ["cut_experts"]


def cut_experts(
    model: nn.Module,
    parallelism: Parallelism,
    rank: int,
    groups: ExpertGroups,
    mark: Callable[[nn.Parameter], None],
) -> None:
    """Leave this rank's experts in ``model`` (on meta), marked, and make them serve all ranks' tokens."""
    for module, own in expert_modules(model, parallelism).items():
        counts: list[int] = []
        for leaf, name in own.items():
            sections = parallelism.expert_sections(name)
            counts = [section.shape[0] for section in sections]
            here = sections[parallelism.mesh.expert(rank)[0]]
            local = _local(module._parameters[leaf], here.shape)
            mark(local)
            module._parameters[leaf] = local
        exchange_tokens(module, groups.experts, counts)


def _local(old: nn.Parameter | None, shape: tuple[int, ...]) -> nn.Parameter:
    assert old is not None, "a cut names a parameter that is there"
    data = torch.empty(shape, dtype=old.dtype, device="meta")
    new = nn.Parameter(data, requires_grad=old.requires_grad)
    new.__dict__.update(old.__dict__)
    return new
