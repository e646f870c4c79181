"""Private parts of DeepSpeed's ZeRO stage 1 and 2: flat buffers that parameters are born in.

Two things are done otherwise for parameters that carry a mark of zerostart, and for no others:

- Flattening. ``DeepSpeedZeroOptimizer`` and ``BF16_Optimizer`` put each parameter group into a new flat
  buffer, by way of the CPU where the device has no room for both. Here a group whose parameters lie in a
  buffer of the load is brought into the optimizer's order in place, and that buffer is taken as its own.
- Masters. They are made from the partitions, without the copy between that the constructor makes; those of
  rounded parameters are then read from the checkpoint. Gradients that it makes to drop are left out.

The way in is the constructors of both optimizers (``optimizers.py``) and of the engine, replaced as long as
a marked parameter lives. A DeepSpeed that is not as declared here takes the stock route.
"""

from __future__ import annotations

import functools
import inspect
import logging
import weakref
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from zerostart.upstream.deepspeed.zero3.partitions import import_deepspeed
from zerostart.upstream.deepspeed.zero12.groups import TOUCHED as GROUPING
from zerostart.upstream.deepspeed.zero12.groups import grouping
from zerostart.upstream.deepspeed.zero12.marks import Keeper, Mark, RunReader, marked, remark
from zerostart.upstream.deepspeed.zero12.optimizers import TOUCHED as OPTIMIZERS
from zerostart.upstream.deepspeed.zero12.optimizers import enter_constructors
from zerostart.upstream.guard import Use, misfit
from zerostart.upstream.patches import RefCountedPatches, replaced

if TYPE_CHECKING:
    from deepspeed.runtime.engine import DeepSpeedEngine

logger = logging.getLogger("zerostart")

_ENGINE = "deepspeed.runtime.engine:DeepSpeedEngine"
_CONSTRUCTION = Use(
    _ENGINE, "__init__(*, model, optimizer)", "buffers that wait on the host are brought to the device first"
)
TOUCHED = (_CONSTRUCTION,)


@functools.cache
def is_known() -> bool:
    """Whether the installed DeepSpeed is as this module knows it; warns once if it is not."""
    import_deepspeed()
    wrong = misfit((*TOUCHED, *GROUPING, *OPTIMIZERS))
    if wrong:
        logger.warning("%s. deepspeed.initialize will flatten the parameters of stages 1 and 2 itself", wrong)
    return not wrong


def mark(parameter: torch.Tensor, name: str, keeper: Keeper) -> None:
    """Have the optimizer that gets ``parameter`` take the buffer in which it lies, while it lives."""
    if is_known():
        remark(parameter, Mark(name, keeper, None, _held.ticket()))


def offer(parameter: torch.Tensor, reader: RunReader) -> None:
    """Have the fp32 master of a marked parameter read by ``reader``."""
    found = marked(parameter)
    if found is not None:
        remark(parameter, replace(found, reader=reader))


def _enter(stack: ExitStack) -> None:
    from deepspeed.runtime.engine import DeepSpeedEngine

    enter_constructors(stack)
    grouping.open()
    stack.callback(grouping.close)
    construct = DeepSpeedEngine.__init__
    signature = inspect.signature(construct)

    @functools.wraps(construct)
    def construct_engine(self: DeepSpeedEngine, *args: object, **kwargs: object) -> None:
        # The model may come by position or by name.
        given = signature.bind(self, *args, **kwargs).arguments
        for keeper in _keepers(given.get("model")):
            # Before the constructor looks at devices: what waits on the host is where it has to be.
            # Collective.
            keeper.bring()
        construct(self, *args, **kwargs)
        if self.optimizer is not None:
            for keeper in _keepers(given.get("model")):
                # Weakly: a model may outlive its engine, which would be kept with all its buffers.
                keeper.optimizer = weakref.ref(self.optimizer)

    stack.enter_context(replaced(DeepSpeedEngine, "__init__", construct_engine))


_held = RefCountedPatches(_enter)


def _keepers(model: object) -> list[Keeper]:
    """The keepers of the model's parameters, each once."""
    parameters = model.parameters() if isinstance(model, torch.nn.Module) else ()
    return list({id(m.keeper): m.keeper for p in parameters if (m := marked(p)) is not None}.values())
