"""Weight decay of what no backward reaches: none, as torch's optimizers have it.

DeepSpeed steps flat tensors, in which the gradient of a parameter that has none is zero: it would decay.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist

from zerostart.distributed.world import default_device
from zerostart.upstream.deepspeed.state.steps import steps_of


def spare_unreached(engine: Any) -> None:
    """Have the optimizer of DeepSpeed's ``engine`` leave alone what no backward has reached yet, on any rank.

    What has been reached once is stepped from then on, as DeepSpeed does, also where it gets no gradient.
    """
    steps = steps_of(engine)
    decayed = [step for step in steps if step.optimizer.param_groups[step.group].get("weight_decay")]
    if decayed:
        spared = _Spared(engine, {id(m.parameter): m.parameter for step in decayed for m in step.members})
        for optimizer in {id(step.optimizer): step.optimizer for step in decayed}.values():
            optimizer.register_step_pre_hook(spared.before)
            optimizer.register_step_post_hook(spared.after)


class _Spared:
    """What no backward has reached, the same on every rank, and how it was before a step."""

    def __init__(self, engine: Any, parameters: dict[int, Any]) -> None:
        self._engine = engine
        self._reached: set[int] = set()  # on this rank, by ids
        self._hooks = {
            key: parameter.register_hook(functools.partial(self._reach, key))
            for key, parameter in parameters.items()
        }
        self._before: list[tuple[torch.Tensor, torch.Tensor]] = []

    def _reach(self, key: int, gradient: torch.Tensor | None) -> None:
        if gradient is not None:
            self._reached.add(key)

    def _agree(self) -> None:
        """Take out what any rank has reached: shares of it are stepped on all; collective."""
        flags = [key in self._reached for key in self._hooks]
        reached = torch.tensor(flags, dtype=torch.int32, device=default_device())
        dist.all_reduce(reached, dist.ReduceOp.MAX)
        for key, flag in zip(list(self._hooks), reached.tolist(), strict=True):
            if flag:
                self._hooks.pop(key).remove()

    @torch.no_grad()
    def before(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Before a step of one flat tensor, or of several."""
        if not self._hooks:
            return
        self._agree()
        now = {id(tensor) for group in optimizer.param_groups for tensor in group["params"]}
        for step in steps_of(self._engine) if self._hooks else ():
            for member in step.members if id(step.tensor) in now else ():
                if id(member.parameter) in self._hooks:
                    share = step.tensor.detach().view(-1)[member.at : member.at + member.count]
                    self._before.append((share, share.clone()))

    @torch.no_grad()
    def after(self, *_: Any) -> None:
        """After it."""
        for share, before in self._before:
            share.copy_(before)
        self._before.clear()
