"""Private parts of DeepSpeed's ZeRO stage 1 and 2: flat buffers that parameters are born in.

Three things are done otherwise for parameters that carry a mark of zerostart, and for no others:

- Flattening. ``DeepSpeedZeroOptimizer`` and ``BF16_Optimizer`` put each parameter group into a new flat
  buffer, by way of the CPU where the device has no room for both. Here a group whose parameters lie in a
  buffer of the load is brought into the optimizer's order in place, and that buffer is taken as its own.
- The broadcast of the model. ``DeepSpeedEngine._broadcast_model`` sends every tensor from rank 0. Here the
  ranks compare hashes of what they loaded, and only what differs is sent.
- Masters. They are made from the partitions, without the copy between that the constructor makes; those of
  rounded parameters are then read from the checkpoint. Gradients that it makes to drop are left out.

The way in is the constructors of both optimizers (``deepspeed_stage12_optimizers``) and of the engine, and
that one method of it, replaced at the first load for these stages. Where a construction fails, the hooks that
it left are removed, and the client's optimizer gets its parameters back.
Known for the versions in ``zerostart.upstream.deepspeed.SUPPORTED``; others take the stock route.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from zerostart.upstream.deepspeed import SUPPORTED, import_deepspeed
from zerostart.upstream.deepspeed_stage12_alike import alike
from zerostart.upstream.versions import misfit

__all__ = ["Keeper", "Mark", "RunReader", "known", "mark", "marked", "offer", "remark"]

logger = logging.getLogger("zerostart")

#: Fills 1-D tensors with runs of the row-major order of parameters: ``(name, first element, tensor)``.
#: Collective, with the same parameters in the same order; the runs are each rank's own.
RunReader = Callable[[Sequence[tuple[str, int, torch.Tensor]]], None]

_ATTRIBUTE = "_zerostart_flat"
_OPTIMIZER = (
    "flatten_dense_tensors_aligned",
    "_update_model_bit16_weights",
    "get_data_parallel_partitions",
    "initialize_optimizer_states",
)
_BF16_OPTIMIZER = ("_flatten_dense_tensors_aligned", "_update_storage_to_flattened_tensor")


class Keeper(Protocol):
    """What holds the flat buffers of one loaded model.

    ``optimizer`` refers to DeepSpeed's optimizer of the model, once an engine has been made.
    """

    optimizer: weakref.ref[Any] | None

    def bring(self) -> None:
        """Move buffers that wait in host memory to the device; collective."""
        ...

    def adopt(
        self,
        groups: Sequence[Sequence[torch.Tensor]],
        partitions: Sequence[int],
        round_robin: bool,
        aligned: bool,
    ) -> list[torch.Tensor | None]:
        """Of each group its flat buffer, with the parameters in it as the optimizer wants them; else None.

        ``partitions`` is the number of ranks that share each group.
        """
        ...


@dataclass(frozen=True)
class Mark:
    """What a parameter tells the engine: its name, its keeper, and how its master is read, None if it is not.

    ``first`` is the element of the row-major order of the unsharded parameter with which this rank's begins.
    Pickles as None: it means nothing without the buffer.
    """

    name: str
    keeper: Keeper
    reader: RunReader | None
    first: int = 0

    def __reduce__(self) -> Any:
        return _nothing, ()


def _nothing() -> None:
    return None


@functools.cache
def known() -> bool:
    """Whether the installed DeepSpeed is as this module knows it; warns once if it is not."""
    deepspeed = import_deepspeed()
    from deepspeed.runtime import bf16_optimizer, engine
    from deepspeed.runtime.zero import stage_1_and_2

    wrong = misfit(
        deepspeed,
        SUPPORTED,
        (
            (stage_1_and_2.DeepSpeedZeroOptimizer, _OPTIMIZER),
            (bf16_optimizer.BF16_Optimizer, _BF16_OPTIMIZER),
            (engine.DeepSpeedEngine, ("_broadcast_model", "destroy")),
        ),
    )
    if wrong:
        logger.warning("%s. deepspeed.initialize will flatten the parameters of stages 1 and 2 itself", wrong)
    return not wrong


def mark(parameter: torch.Tensor, name: str, keeper: Keeper, first: int = 0) -> None:
    """Have the optimizer that gets ``parameter`` take the buffer in which it lies."""
    if known():
        _enter()
        remark(parameter, Mark(name, keeper, None, first))


def offer(parameter: torch.Tensor, reader: RunReader) -> None:
    """Have the fp32 master of a marked parameter read by ``reader``."""
    found = marked(parameter)
    if found is not None:
        remark(parameter, replace(found, reader=reader))


def remark(parameter: torch.Tensor, new: Mark) -> None:
    """Change the mark of a parameter."""
    setattr(parameter, _ATTRIBUTE, new)


def marked(parameter: torch.Tensor) -> Mark | None:
    """The mark of a parameter, if it has one."""
    return getattr(parameter, _ATTRIBUTE, None)


@functools.cache
def _enter() -> None:
    from deepspeed.runtime import bf16_optimizer
    from deepspeed.runtime.engine import DeepSpeedEngine
    from deepspeed.runtime.zero import stage_1_and_2

    from zerostart.upstream.deepspeed_stage12_optimizers import over_bf16, over_zero

    zero, bf16 = stage_1_and_2.DeepSpeedZeroOptimizer, bf16_optimizer.BF16_Optimizer
    zero.__init__ = over_zero(zero.__init__)
    bf16.__init__ = over_bf16(bf16.__init__)
    broadcast, construct = DeepSpeedEngine._broadcast_model, DeepSpeedEngine.__init__
    signature = inspect.signature(construct)

    @functools.wraps(broadcast)
    def broadcast_model(self: Any) -> None:
        with _spared(self):
            broadcast(self)

    @functools.wraps(construct)
    def construct_engine(self: Any, *args: Any, **kwargs: Any) -> None:
        given = signature.bind(self, *args, **kwargs).arguments
        for keeper in _keepers(given.get("model")):
            keeper.bring()
        with _undone(self, given.get("model"), given.get("optimizer")):
            construct(self, *args, **kwargs)
        if self.optimizer is not None:
            for keeper in _keepers(given.get("model")):
                keeper.optimizer = weakref.ref(self.optimizer)

    DeepSpeedEngine._broadcast_model = broadcast_model
    DeepSpeedEngine.__init__ = construct_engine


def _keepers(model: object) -> list[Keeper]:
    """The keepers of the model's parameters, each once."""
    parameters = model.parameters() if isinstance(model, torch.nn.Module) else ()
    return list({id(m.keeper): m.keeper for p in parameters if (m := marked(p)) is not None}.values())


@contextlib.contextmanager
def _undone(engine: Any, model: Any, client: Any) -> Iterator[None]:
    """If the engine's construction fails, leave neither hooks nor an optimizer behind.

    Otherwise a hook of the engine on the model, or what it noted on a parameter, keeps it alive, with all
    that it made, and calls into it.
    """
    ours = isinstance(model, torch.nn.Module) and any(map(marked, model.parameters()))
    groups = list(getattr(client, "param_groups", [])) if ours else []
    before = [{**group, "params": list(group["params"])} for group in groups]
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
def _spared(engine: Any) -> Iterator[None]:
    """Have DeepSpeed not broadcast the parameters that are the same on all ranks that it would send them to.

    ``_broadcast_model`` passes over parameters with an attribute ``ds_optim_param``. Experts are sent to the
    ranks that hold the same ones.
    """
    sharing: dict[str | None, list[Any]] = {}
    if engine.dist_backend is not None:
        for parameter in engine.module.parameters():
            if marked(parameter) is not None and not hasattr(parameter, "ds_optim_param"):
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
            del parameter.ds_optim_param


def _experts_of(parameter: Any) -> str | None:
    """The name of the expert group of a parameter of experts (``moe.utils.is_moe_param``), else None."""
    return None if getattr(parameter, "allreduce", True) else parameter.group_name
