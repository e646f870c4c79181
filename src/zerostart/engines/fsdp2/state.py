"""The training state of a model in FSDP2 shards: torch's optimizer steps the shards themselves."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch
import torch.distributed as dist
from torch import nn

from zerostart.distributed.world import World
from zerostart.engines.shard import Shard
from zerostart.engines.state import OptimizerState, StateEngine, TrainingState
from zerostart.errors import ConfigError, EngineError


class FSDP2State(OptimizerState):
    """An optimizer's state, and units that may hold gradients which are not reduced yet."""

    def check_reduced(self) -> None:
        from zerostart.upstream.torch.fsdp2 import has_unreduced

        if has_unreduced(self._model):
            raise ConfigError(
                "FSDP2 holds gradients that are not reduced yet (set_requires_gradient_sync(False)): save "
                "after an optimizer step"
            )


def current_shards(model: nn.Module) -> dict[str, Shard]:
    """The FSDP2 shards of ``model`` as they are now, resharded where a forward left them gathered."""
    from torch.distributed.tensor import DTensor

    from zerostart.engines.fsdp2.storage import holders, sharded_layout

    FSDP2StateEngine.put_to_rest(model)
    shards = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if isinstance(parameter, DTensor):
            at = functools.partial(sharded_layout, parameter)
            local = parameter.to_local().detach().view(-1)
            shards[name] = Shard(name, at(dist.get_rank()), local, at, holders(parameter))
    return shards


class FSDP2StateEngine(StateEngine):
    """The state side of FSDP2 as an engine."""

    @classmethod
    def find_shards(cls, model: nn.Module, world: World) -> dict[str, Shard]:
        """DTensors. Raises EngineError for a mesh that is not of all ranks."""
        shards = current_shards(model)
        for name, parameter in model.named_parameters(remove_duplicate=False):
            mesh = getattr(parameter, "device_mesh", None)
            if name in shards and mesh is not None and mesh.size() != world.size:
                raise EngineError(
                    f"{name} lies on {mesh.size()} of the {world.size} ranks, so what the other ranks "
                    "hold is "
                    "unknown; load the model with zerostart, or shard it over a mesh of all ranks"
                )
        return shards

    @classmethod
    def put_to_rest(cls, model: nn.Module) -> None:
        """A root, or every unit below stage 3, keeps what its forward has gathered.

        Those are other objects, in the compute dtype, than the parameters that are trained.
        """
        from torch.distributed.fsdp import FSDPModule

        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    @classmethod
    def training_state(cls, model: nn.Module, optimizer: object) -> TrainingState | None:
        from torch.distributed.fsdp import FSDPModule

        sharded = any(isinstance(module, FSDPModule) for module in model.modules())
        return FSDP2State(model, optimizer) if sharded else None

    @classmethod
    def check_replaceable(cls, model: nn.Module, parameter: torch.Tensor, action: str) -> None:
        from zerostart.upstream.torch.fsdp2 import has_run

        if has_run(model):
            raise EngineError(
                f"{action} after FSDP2 has run a forward; resize them right after from_pretrained"
            )

    @classmethod
    def whole_for_a_while(
        cls, model: nn.Module, modules: Sequence[nn.Module]
    ) -> AbstractContextManager[None]:
        from zerostart.upstream.torch.fsdp2 import whole_for_a_while

        return whole_for_a_while(model, modules)
