"""Private parts of DeepSpeed's ZeRO stage 1 and 2: flat buffers that parameters are born in.

Three things are done otherwise for parameters that carry a mark of zerostart, and for no others:

- Flattening. ``DeepSpeedZeroOptimizer`` and ``BF16_Optimizer`` put each parameter group into a new flat
  buffer, by way of the CPU where the device has no room for both. Here a group whose parameters lie in a
  buffer of the load is brought into the optimizer's order in place, and that buffer is taken as its own.
- The broadcast of the model. ``DeepSpeedEngine._broadcast_model`` sends every tensor from rank 0. Here the
  ranks compare hashes of what they loaded, and only what differs is sent.
- Masters. They are made from the partitions, without the copy between that the constructor makes; those of
  rounded parameters are then read from the checkpoint. Gradients that it makes to drop are left out.

The way in is the constructors of both optimizers (``optimizers.py``) and of the engine, and
that one method of it, replaced as long as a marked parameter lives. Where a construction fails, the hooks
that it left are removed, and the client's optimizer gets its parameters back. A DeepSpeed that is not as
declared here takes the stock route.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import weakref
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from zerostart.upstream.deepspeed.zero3.partitions import import_deepspeed
from zerostart.upstream.deepspeed.zero12.groups import TOUCHED as GROUPING
from zerostart.upstream.deepspeed.zero12.groups import grouping
from zerostart.upstream.deepspeed.zero12.marks import Keeper, Mark, RunReader, marked, remark
from zerostart.upstream.deepspeed.zero12.optimizers import TOUCHED as OPTIMIZERS
from zerostart.upstream.deepspeed.zero12.optimizers import enter_constructors
from zerostart.upstream.guard import Use, misfit
from zerostart.upstream.patches import RefCountedPatches, replaced
from zerostart.upstream.torch.byte_sums import lanes_of, signed

if TYPE_CHECKING:
    from deepspeed.runtime.engine import DeepSpeedEngine

logger = logging.getLogger("zerostart")

_ENGINE = "deepspeed.runtime.engine:DeepSpeedEngine"
_CONSTRUCTION = Use(
    _ENGINE,
    "__init__(*, model, optimizer), destroy, _cast_module_mixed_precision, .dist_backend, "
    ".module_forward_pre_hook, .module_forward_post_hook",
    "buffers that wait on the host are brought to the device first; it leaves no hooks where it fails",
)
_BROADCAST = Use(
    _ENGINE,
    "_broadcast_model",
    "parameters that hold the same bits on all ranks are not sent: marked so for the time of the call",
    source=("_broadcast_model: hasattr(p, 'ds_optim_param')",),
)
TOUCHED = (_CONSTRUCTION, _BROADCAST)


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
    broadcast, construct = DeepSpeedEngine._broadcast_model, DeepSpeedEngine.__init__
    signature = inspect.signature(construct)

    @functools.wraps(broadcast)
    def broadcast_model(self: DeepSpeedEngine) -> None:
        with _spared(self):
            broadcast(self)

    @functools.wraps(construct)
    def construct_engine(self: DeepSpeedEngine, *args: object, **kwargs: object) -> None:
        # The model may come by position or by name.
        given = signature.bind(self, *args, **kwargs).arguments
        for keeper in _keepers(given.get("model")):
            # Before the constructor looks at devices: what waits on the host is where it has to be.
            # Collective.
            keeper.bring()
        with _undone(self, given.get("model"), given.get("optimizer")):
            construct(self, *args, **kwargs)
        if self.optimizer is not None:
            for keeper in _keepers(given.get("model")):
                # Weakly: a model may outlive its engine, which would be kept with all its buffers.
                keeper.optimizer = weakref.ref(self.optimizer)

    stack.enter_context(replaced(DeepSpeedEngine, "_broadcast_model", broadcast_model))
    stack.enter_context(replaced(DeepSpeedEngine, "__init__", construct_engine))


_held = RefCountedPatches(_enter)


def _keepers(model: object) -> list[Keeper]:
    """The keepers of the model's parameters, each once."""
    parameters = model.parameters() if isinstance(model, torch.nn.Module) else ()
    return list({id(m.keeper): m.keeper for p in parameters if (m := marked(p)) is not None}.values())


@contextlib.contextmanager
def _undone(engine: DeepSpeedEngine, model: Any, client: Any) -> Iterator[None]:
    """If the engine's construction fails, leave neither hooks nor an optimizer behind.

    Otherwise a hook of the engine on the model, or what it noted on a parameter, keeps it alive, with all
    that it made, and calls into it.
    """
    ours = isinstance(model, torch.nn.Module) and any(map(marked, model.parameters()))
    groups = list(getattr(client, "param_groups", [])) if ours else []
    before = [{**group, "params": list(group["params"])} for group in groups]
    # Attributes as they are before: an engine hangs its own on parameters of any model.
    noted = [(p, dict(p.__dict__)) for p in model.parameters()] if ours else []
    try:
        yield
    except BaseException:
        if ours:
            for name in ("module_forward_pre_hook", "module_forward_post_hook", "first_dataloader_check"):
                hook = engine.__dict__.get(name)
                if hook is not None:
                    hook.remove()
            with contextlib.suppress(Exception):  # It may lack anything: the first error is the one to tell.
                engine.destroy()
            engine.__dict__ |= {"optimizer": None, "basic_optimizer": None}
            if groups:
                client.param_groups[:] = groups  # Empty ones were dropped.
            for group, settings in zip(groups, before, strict=True):
                group.clear()
                group.update(settings)
            for parameter, attributes in noted:
                parameter.__dict__.clear()
                parameter.__dict__.update(attributes)
        raise


@contextlib.contextmanager
def _spared(engine: DeepSpeedEngine) -> Iterator[None]:
    """Have DeepSpeed not broadcast the parameters that are the same on all ranks that it would send them to.

    ``_broadcast_model`` passes over parameters with an attribute ``ds_optim_param``. Experts are sent to the
    ranks that hold the same ones.
    """
    sharing: dict[str | None, list[Any]] = {}
    if engine.dist_backend is not None:
        for parameter in engine.module.parameters():
            if marked(parameter) is not None and not hasattr(parameter, "ds_optim_param"):
                # By the group that each would be sent in: the comparison is collective in just that group.
                sharing.setdefault(_experts_of(parameter), []).append(parameter)
    spared = []
    for name, parameters in sharing.items():
        ranks = engine.seq_data_parallel_group if name is None else engine.expert_data_parallel_group[name]
        spared += alike(parameters, ranks)
    for parameter in spared:
        parameter.ds_optim_param = True
    try:
        yield
    finally:
        for parameter in spared:
            # For the call alone: other code of DeepSpeed's reads the same attribute.
            del parameter.ds_optim_param


def _experts_of(parameter: Any) -> str | None:
    """The name of the expert group of a parameter of experts (``moe.utils.is_moe_param``), else None."""
    return None if getattr(parameter, "allreduce", True) else parameter.group_name


# Which parameters are the same on all ranks, found without sending them. What each rank did to a model since
# the load cannot be known from outside. So each sums up the words of its parameters, at the speed of memory,
# and the sums are compared in one small message.


def alike(parameters: Sequence[torch.Tensor], group: dist.ProcessGroup) -> list[Any]:
    """Those that hold the same bits on all ranks of ``group``; collective, with one small message."""
    if not parameters or dist.get_world_size(group=group) == 1:
        return list(parameters)
    own = torch.tensor([fingerprint(parameter) for parameter in parameters], device=parameters[0].device)
    extremes = torch.stack([own, ~own])  # ~ reverses the order: the least of it is the greatest.
    dist.all_reduce(extremes, op=dist.ReduceOp.MIN, group=group)
    same = (extremes[0] == ~extremes[1]).all(1).tolist()
    return [parameter for parameter, one in zip(parameters, same, strict=True) if one]


def fingerprint(tensor: torch.Tensor) -> list[int]:
    """The sums over a tensor's bits in row-major order, wherever in memory they lie: two of 64 bits."""
    octets = tensor.detach().contiguous().view(-1).view(torch.uint8)
    return [signed(lane) for lane in lanes_of(octets)]
