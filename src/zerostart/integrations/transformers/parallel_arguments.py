"""Parallel axes that a call of ``from_pretrained`` asks for, in transformers' words, as those of a load."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from zerostart.errors import ConfigError
from zerostart.loading.arguments import EnabledArguments
from zerostart.upstream.transformers.distributed import AxesAsked, axes_asked
from zerostart.upstream.transformers.models import override_plans, show_experts

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from transformers import PreTrainedModel

#: transformers' arguments for it.
ARGUMENTS = ("distributed_config", "tp_plan", "tp_size", "device_mesh")


@dataclass(frozen=True)
class ParallelArguments:
    """Ranks that share experts and tensors, and rules of the call over the model's own plans."""

    expert_parallel: int = 1
    tensor_parallel: int = 1
    expert_plan: Mapping[str, str] | None = None
    tensor_plan: Mapping[str, str] | None = None

    def over(self, settings: EnabledArguments) -> EnabledArguments:
        """``settings`` with what is asked for here; raises ConfigError where they say otherwise."""
        sizes: dict[str, Any] = {}
        for name in ("expert_parallel", "tensor_parallel"):
            asked, set_ = getattr(self, name), getattr(settings, name)
            if asked > 1 and set_ not in (1, asked):
                raise ConfigError(
                    f"from_pretrained asks for {name}={asked}, and zerostart is enabled with {name}={set_}; "
                    "leave one of them out"
                )
            sizes[name] = max(asked, set_)
        return dataclasses.replace(settings, **sizes)

    def plan(self, model: PreTrainedModel) -> None:
        """Put the rules into ``model``, on meta. Raises ConfigError for one that names nothing there."""
        override_plans(model, self.expert_plan, self.tensor_plan)

    @staticmethod
    def show(model: PreTrainedModel, expert_parallel: int) -> None:
        """Leave on the loaded ``model`` what transformers' own loading would."""
        if expert_parallel > 1:
            show_experts(model)


def take_parallel_arguments(arguments: dict[str, Any], world_size: int) -> ParallelArguments:
    """What ``arguments`` of ``from_pretrained`` ask for, taken out of them.

    Raises ConfigError for an axis that no load has, and sizes that do not fit ``world_size``.
    """
    given = {name: value for name in ARGUMENTS if (value := arguments.get(name)) is not None}
    config, alone = given.get("distributed_config"), given.keys() & {"tp_plan", "tp_size"}
    if config is not None and alone:
        return ParallelArguments()  # Which transformers itself refuses, in its own words.
    for name in ARGUMENTS:
        arguments.pop(name, None)
    mesh = given.get("device_mesh")
    # Tensor parallel in transformers' older words, without a configuration.
    if alone:
        size = given.get("tp_size") or _size_of(mesh, ("tp",)) or world_size
        config = {"tp_plan": given.get("tp_plan"), "tp_size": size}
    if config is None:
        return ParallelArguments()
    axes = axes_asked(config)
    _refuse(axes, world_size)
    experts = axes.experts
    if experts is None:
        experts = _size_of(mesh, ("ep", "tp")) or world_size
    return ParallelArguments(experts, axes.tensors, axes.expert_plan, axes.tensor_plan)


def _refuse(axes: AxesAsked, world_size: int) -> None:
    """Raise ConfigError for what no load has."""
    if axes.stages > 1:
        raise ConfigError(
            f"distributed_config asks for pp_size={axes.stages}: no load makes pipeline stages; leave it out"
        )
    if axes.unserved:
        raise ConfigError(
            f"distributed_config has {axes.unserved[0]}, which the engine's own configuration decides here; "
            "leave it out"
        )
    if axes.replicas > 1:
        raise ConfigError(
            f"distributed_config has dp_replicate_size={axes.replicas}; leave it out, and ask for replicas "
            "with zerostart.enabled(engine='fsdp2', engine_config={'replicate': ...})"
        )
    shared = world_size // max(axes.tensors, 1)
    if axes.data not in (1, shared):
        raise ConfigError(
            f"distributed_config has fsdp_size={axes.data}, and {world_size} ranks with "
            f"tensor_parallel={axes.tensors} see {shared} batches; leave fsdp_size out"
        )
    if axes.nothing and world_size > 1:
        raise ConfigError(
            "distributed_config asks for no axis of more than one rank; give it ep_size= or tp_size=, leave "
            "it out, or, where it was made with enable_expert_parallel=True, make it after zerostart.enable()"
        )


def _size_of(mesh: DeviceMesh | None, names: tuple[str, ...]) -> int | None:
    """The ranks of the dimension of a ``DeviceMesh`` that is called one of ``names``, or of its only one.

    None without a mesh. Raises ConfigError where there is no such dimension, or its ranks are no neighbours.
    """
    if mesh is None:
        return None
    called = tuple(mesh.mesh_dim_names or ())
    found = 0 if mesh.ndim == 1 else next((called.index(name) for name in names if name in called), None)
    if found is None:
        raise ConfigError(
            f"device_mesh has the dimensions {', '.join(called) or mesh.ndim}, and none of them is called "
            f"{' or '.join(names)}; name one so, or leave device_mesh out"
        )
    # One row for each group of ranks along that dimension. A load puts neighbours together, so each row has
    # to be of such.
    rows = mesh.mesh.movedim(found, -1).flatten(0, -2) if mesh.ndim > 1 else mesh.mesh.unsqueeze(0)
    size: int = rows.shape[-1]
    for row in rows.tolist():
        if row[0] % size or row != list(range(row[0], row[0] + size)):
            raise ConfigError(
                f"device_mesh puts the ranks {row} together, and ranks that share experts or tensors are "
                f"neighbours; make its last dimension the one of {size} ranks"
            )
    return size
