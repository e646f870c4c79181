"""The ``engine_config`` of FSDP2, checked: mesh, units, precision and offload.

Needs no process group, so that a plan can be made without one.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor import Shard

from zerostart.engines.training import EngineConfig
from zerostart.errors import ConfigError, EngineError
from zerostart.geometry.layout import Layout, Mesh, Parallelism, Section, dimension_shard

Placer = Callable[[nn.Parameter], object]


@dataclass(frozen=True)
class FSDP2Settings:
    """The keys of ``engine_config`` for FSDP2.

    ``reshard_after_forward``, ``shard_placement_fn``, ``mp_policy`` and ``offload_policy`` are arguments of
    ``fully_shard``, for every unit.
    """

    #: A device mesh over all ranks; of two dimensions, the first has replicas (HSDP). None: a mesh with
    #: ``replicate`` replicas is made.
    mesh: DeviceMesh | None = None
    replicate: int = 1
    #: The units: class names, classes, or names of modules with ``*`` for any part, as ``model.layers.*``.
    #: None: the blocks that are found.
    wrap: Sequence[str | type[nn.Module]] | None = None
    reshard_after_forward: bool | int | None = None
    #: Returns ``Shard(dim)`` or None for a parameter.
    shard_placement_fn: Placer | None = None
    mp_policy: MixedPrecisionPolicy | None = None
    offload_policy: OffloadPolicy | None = None
    #: Comes before the model's own expert-parallel plan.
    ep_plan: Mapping[str, str] | None = None
    #: Comes before the model's own tensor-parallel plan.
    tp_plan: Mapping[str, str] | None = None
    #: DeepSpeed's section of that name; FSDP2 only uses ``autotp_size``.
    tensor_parallel: EngineConfig | None = None

    @classmethod
    def of(cls, config: EngineConfig | None) -> FSDP2Settings:
        """Read a configuration. Raises ConfigError for an unknown key or a wrong kind of value."""
        if config is not None and not isinstance(config, Mapping):
            raise ConfigError(f"engine_config is a {type(config).__name__}; FSDP2 takes a dict")
        names = [field.name for field in fields(cls)]
        for key in config or {}:
            if key not in names:
                near = difflib.get_close_matches(str(key), names, 1, 0.5)
                meant = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(names)}"
                raise ConfigError(f"engine_config for FSDP2 has the unknown key {key!r}; {meant}")
        settings = cls(**(config or {}))
        settings._check()
        return settings

    def _check(self) -> None:
        expected: dict[str, tuple[type, ...]] = {
            "mesh": (DeviceMesh, type(None)),
            "reshard_after_forward": (bool, int, type(None)),
            "mp_policy": (MixedPrecisionPolicy, type(None)),
            "offload_policy": (OffloadPolicy, type(None)),
        }
        for key, kinds in expected.items():
            value = getattr(self, key)
            if not isinstance(value, kinds):
                raise ConfigError(
                    f"engine_config[{key!r}] is a {type(value).__name__}; it must be a {kinds[0].__name__}"
                )
        if self.shard_placement_fn is not None and not callable(self.shard_placement_fn):
            raise ConfigError("engine_config['shard_placement_fn'] is not callable")
        if isinstance(self.replicate, bool) or not isinstance(self.replicate, int) or self.replicate < 1:
            raise ConfigError(
                f"engine_config['replicate']={self.replicate!r} must be a number of replicas, at least 1"
            )
        if self.mesh is not None and self.replicate != 1:
            raise ConfigError(
                "engine_config has both mesh and replicate; a mesh says how many replicas it has"
            )
        if other := [key for key in self.tensor_parallel or {} if key != "autotp_size"]:
            raise ConfigError(
                f"engine_config['tensor_parallel'] has {other[0]}, which only DeepSpeed obeys; give the "
                "rules as engine_config={'tp_plan': {'model.layers.*.self_attn.q_proj': 'colwise', ...}}, "
                "or use engine='deepspeed'"
            )
        if isinstance(self.wrap, (str, type)):
            raise ConfigError(f"engine_config['wrap']={self.wrap!r} is not a list")
        if self.pinned and not torch.accelerator.is_available():
            raise ConfigError(
                "offload_policy pins host memory, but there is no accelerator to pin it for; pass "
                "CPUOffloadPolicy(pin_memory=False)"
            )

    def at_stage(self, zero_stage: int, parallel: bool = False) -> FSDP2Settings:
        """The settings with which ``fully_shard`` makes units of ZeRO stage 1, 2 or 3.

        Raises ConfigError for settings that contradict the stage; at stage 0, which shards nothing, for any.
        """
        if zero_stage == 0:
            keys = [field.name for field in fields(self) if getattr(self, field.name) != field.default]
            if keys or parallel:
                reason = f"engine_config has {keys[0]}" if keys else "experts or tensors are to be shared"
                raise ConfigError(
                    f"zero_stage=0 shards nothing (DistributedDataParallel), but {reason}; use another "
                    "stage, or "
                    "leave it out"
                )
            return self
        # Stage 3 is the default of ``fully_shard``; 1 and 2 keep parameters gathered from forward to
        # backward.
        if zero_stage == 3:
            return self
        if self.reshard_after_forward not in (None, False):
            raise ConfigError(
                f"zero_stage={zero_stage} keeps parameters gathered from forward to backward, but "
                f"engine_config has reshard_after_forward={self.reshard_after_forward!r}; leave it out, or "
                "use zero_stage=3"
            )
        return replace(self, reshard_after_forward=False)

    @property
    def offloaded(self) -> bool:
        """True if the shards are in host memory."""
        return isinstance(self.offload_policy, CPUOffloadPolicy)

    @property
    def pinned(self) -> bool:
        """True if that host memory is page-locked."""
        return isinstance(self.offload_policy, CPUOffloadPolicy) and self.offload_policy.pin_memory

    @property
    def autotp_size(self) -> int:
        """Number of ranks that share tensors by the section ``tensor_parallel``, or 1."""
        return int((self.tensor_parallel or {}).get("autotp_size") or 1)

    def check_mesh(self, mesh: Mesh) -> None:
        """Raise ConfigError for a mesh that cannot be trained with these settings."""
        if self.autotp_size not in (1, mesh.tensor_parallel):
            raise ConfigError(
                f"tensor_parallel={mesh.tensor_parallel}, but engine_config['tensor_parallel'] has "
                f"autotp_size={self.autotp_size}; use one number for both, or leave one out"
            )
        if not mesh.parallel:
            self.shape(mesh.world_size)
            return
        axis = "expert_parallel" if mesh.expert_parallel > 1 else "tensor_parallel"
        # The number of ranks to reshard to; True and False are also numbers in Python.
        size = self.reshard_after_forward
        if self.mesh is not None:
            raise ConfigError(
                f"{axis}={getattr(mesh, axis)} with engine_config['mesh'] is not available, because the "
                f"load makes a mesh of its own; use replicate= for replicas, or {axis}=1"
            )
        if isinstance(size, int) and not isinstance(size, bool):
            raise ConfigError(
                f"{axis}={getattr(mesh, axis)} with engine_config['reshard_after_forward']={size} is not "
                "available: torch's fully_shard cannot reshard a parameter to some of the ranks when "
                f"another mesh shards it too; set reshard_after_forward to True or False, or use {axis}=1"
            )
        for axis in ("expert_parallel", "tensor_parallel"):
            if mesh.world_size % (self.replicate * getattr(mesh, axis)):
                raise ConfigError(
                    f"replicate={self.replicate} with {axis}={getattr(mesh, axis)} does not divide the "
                    f"{mesh.world_size} ranks; use fewer replicas: each of them needs all {axis} ranks"
                )

    def shape(self, world_size: int) -> tuple[int, int]:
        """Return ``(replicas, ranks that share a parameter)``.

        Raises ConfigError if they do not fit the world.
        """
        if self.mesh is None:
            if world_size % self.replicate:
                raise ConfigError(
                    f"replicate={self.replicate} does not divide the {world_size} ranks; choose a divisor"
                )
            sizes = (self.replicate, world_size // self.replicate)
        else:
            if self.mesh.ndim not in (1, 2) or self.mesh.size() != world_size:
                raise ConfigError(
                    f"the mesh has shape {tuple(self.mesh.shape)}; it must have one dimension, or two with "
                    f"replicas first, and all {world_size} ranks"
                )
            if self.mesh.ndim == 2 and self.mesh.mesh_dim_names is None:
                raise ConfigError("FSDP2 needs mesh_dim_names for a mesh of two dimensions")
            sizes = (1 if self.mesh.ndim == 1 else self.mesh.shape[0], self.mesh.shape[-1])
        self._check_resharding(sizes[1])
        return sizes

    def _check_resharding(self, shares: int) -> None:
        size = self.reshard_after_forward
        if isinstance(size, bool) or size is None:
            return
        if not 1 <= size <= shares or shares % size:
            raise ConfigError(
                f"reshard_after_forward={size} must be True, False, or a divisor of the {shares} ranks that "
                "share a parameter"
            )

    def ranks(self, world_size: int) -> Sequence[int]:
        """List the ranks in the order of the mesh: one replica after the other."""
        return range(world_size) if self.mesh is None else self.mesh.mesh.flatten().tolist()

    def dimension(self, parameter: nn.Parameter, name: str) -> int:
        """Return the dimension along which ``parameter`` is sharded.

        Raises EngineError if the placement function returns another kind or a missing dimension.
        """
        placement = self.shard_placement_fn(parameter) if self.shard_placement_fn is not None else None
        if placement is None:
            placement = Shard(0)
        if not isinstance(placement, Shard):
            raise EngineError(
                f"shard_placement_fn returned a {type(placement).__name__} for {name}; it must return "
                "Shard(dim) or None"
            )
        dim: int = placement.dim + parameter.dim() if placement.dim < 0 else placement.dim
        if not 0 <= dim < parameter.dim():
            raise EngineError(
                f"shard_placement_fn returned {placement} for {name}, which has {parameter.dim()} "
                "dimensions; use Shard(dim) of one of them, or None"
            )
        return dim

    def check_even(self, name: str, shape: Sequence[int], dim: int, shares: int) -> None:
        """Raise EngineError unless FSDP2 can shard a tensor of that shape along ``dim``."""
        if dim and shape[dim] % shares:
            raise EngineError(
                f"FSDP2 shards evenly along dimensions other than 0, but {name} has {shape[dim]} elements "
                f"along dimension {dim} for {shares} ranks; return Shard(0) or None for it"
            )

    def options(self) -> dict[str, object]:
        """Return the arguments of ``fully_shard`` that are set, without the mesh."""
        names = ("reshard_after_forward", "shard_placement_fn", "mp_policy", "offload_policy")
        return {name: value for name in names if (value := getattr(self, name)) is not None}


# FSDP2's layouts, without a device mesh.


@dataclass(frozen=True)
class MeshShares:
    """The shares of parameters that the ranks of a mesh hold."""

    #: Number of replicas of the model.
    replicas: int
    #: Parallelism of one replica.
    parallelism: Parallelism
    #: Dimension that the owners of each section share; None without a ``shard_placement_fn``.
    dims: Mapping[str, int] | None
    #: All ranks, one replica after the other.
    order: Sequence[int]

    @classmethod
    def of(
        cls, settings: FSDP2Settings, parallelism: Parallelism, dims: Mapping[str, int] | None
    ) -> MeshShares:
        """Divide a mesh that passes ``settings.check_mesh`` into replicas."""
        size = parallelism.mesh.world_size
        replicas, _ = settings.shape(size)
        # Ranks that share sequences share no parameter for it: they may be of several replicas.
        mesh = replace(parallelism.mesh, world_size=size // replicas, sequence_parallel=1)
        return cls(replicas, replace(parallelism, mesh=mesh), dims, settings.ranks(size))

    @classmethod
    def of_parameters(
        cls, settings: FSDP2Settings, parallelism: Parallelism, parameters: Mapping[str, nn.Parameter]
    ) -> MeshShares:
        """Ask for the dimensions of whole ``parameters``, and check that they divide evenly.

        Raises EngineError if FSDP2 cannot shard a parameter.
        """
        has_placements = settings.shard_placement_fn is not None
        dims = (
            {n: settings.dimension(p, n) for n, p in parameters.items() if p.dim()}
            if has_placements
            else None
        )
        shares = cls.of(settings, parallelism, dims)
        for name in dims or ():
            for rank in range(max(parallelism.mesh.tensor_parallel, parallelism.mesh.expert_parallel)):
                section, owners = shares.section(name, tuple(parameters[name].shape), rank)
                settings.check_even(name, section.shape, shares.dimension(name, section, owners), owners)
        return shares

    @cached_property
    def _places(self) -> dict[int, int]:
        return {rank: place for place, rank in enumerate(self.order)}

    def place(self, rank: int) -> int:
        """Return the place of ``rank`` within its replica."""
        return self._places[rank] % self.parallelism.mesh.world_size

    def twin(self, rank: int) -> int:
        """Return the first rank that holds the same shares as ``rank``."""
        return min(self.order[self.place(rank) :: self.parallelism.mesh.world_size])

    def section(self, name: str, shape: Sequence[int], rank: int) -> tuple[Section, int]:
        """Return the section of a parameter on ``rank``, and the number of its owners."""
        place = self.place(rank)
        return self.parallelism.section(name, shape, place), self.parallelism.owners(name, place)[1]

    def dimension(self, name: str, section: Section, owners: int) -> int:
        """The dimension along which the ``owners`` of a section share it."""
        if self.dims is not None:
            return self.dims.get(name, 0)
        return _expert_dimension(section.shape, owners) if self.parallelism.is_expert(name) else 0

    def layout(self, name: str, shape: Sequence[int], rank: int) -> Layout:
        """Return the layout on ``rank`` of the parameter ``name``, which is whole in ``shape``."""
        section, owners = self.section(name, shape, rank)
        place = self.parallelism.owners(name, self.place(rank))[0]
        return section.expand(
            dimension_shard(section.shape, self.dimension(name, section, owners), place, owners)
        )

    def chunk(self, name: str, shape: Sequence[int], rank: int) -> tuple[int, ...]:
        """The shape of a full chunk of the parameter."""
        section, owners = self.section(name, shape, rank)
        if not section.shape:
            return ()
        chunk, dim = list(section.shape), self.dimension(name, section, owners)
        chunk[dim] = -(-chunk[dim] // owners)
        return tuple(chunk)

    def holders(self, name: str, rank: int) -> tuple[int, int]:
        """Place and number of ``rank`` among those with the same share of ``name``."""
        place, count = self.parallelism.holders(name, self.place(rank))
        return self._places[rank] // self.parallelism.mesh.world_size * count + place, self.replicas * count


def _expert_dimension(shape: Sequence[int], owners: int) -> int:
    """The dimension along which the ``owners`` of local experts share them.

    The experts' own, unless that would leave owners without any: then the next that divides evenly, since
    FSDP2 shards no other dimension unevenly.
    """
    if owners <= shape[0]:
        return 0
    return next((dim for dim in range(1, len(shape)) if shape[dim] % owners == 0), 0)
