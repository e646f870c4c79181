"""Expert and tensor parallel plans: how a mesh axis cuts each parameter.

Every declaration (transformers' styles, the caller's mapping) becomes a ``ParallelPlan``: parameter names
with a ``ShardSpec``, and module names with the style in which they run.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from zerostart.errors import ConfigError
from zerostart.geometry.layout.layout import Section, packed_section, ranged_section, whole_section

# The ranks of a world as a mesh, in integers.


@dataclass(frozen=True, slots=True)
class Mesh:
    """``world_size`` ranks; ``expert_parallel`` of them share experts, ``tensor_parallel`` share tensors.

    ``sequence_parallel`` of them share each sequence.
    """

    world_size: int
    expert_parallel: int = 1
    tensor_parallel: int = 1
    sequence_parallel: int = 1

    def __post_init__(self) -> None:
        for name in ("expert_parallel", "tensor_parallel", "sequence_parallel"):
            size = getattr(self, name)
            if size < 1:
                raise ConfigError(f"{name}={size} must be at least 1")
            if self.world_size % size:
                fitting = [n for n in range(1, self.world_size + 1) if self.world_size % n == 0]
                raise ConfigError(
                    f"{name}={size} does not divide the {self.world_size} ranks; use one of "
                    f"{', '.join(map(str, fitting[-8:]))}, or another number of ranks"
                )
        shared = self.tensor_parallel * self.sequence_parallel
        if self.world_size % shared:
            raise ConfigError(
                f"tensor_parallel={self.tensor_parallel} with sequence_parallel={self.sequence_parallel} "
                f"needs {shared} ranks for each batch, which does not divide the {self.world_size} ranks; "
                "use fewer for one of them"
            )

    @property
    def parallel(self) -> bool:
        """True if a mesh axis cuts parameters before the engine shards them."""
        return self.expert_parallel > 1 or self.tensor_parallel > 1

    def tensor(self, rank: int) -> tuple[int, int]:
        """Rank and size in the tensor-parallel group."""
        return rank % self.tensor_parallel, self.tensor_parallel

    def data(self, rank: int) -> tuple[int, int]:
        """Rank and size among the owners of one section of a dense parameter.

        Each owner has its own batch.
        """
        return rank // self.tensor_parallel, self.world_size // self.tensor_parallel

    def batch(self, rank: int) -> tuple[int, int]:
        """Which batch a rank sees, and how many there are at a time."""
        shared = self.sequence_parallel * self.tensor_parallel
        return rank // shared, self.world_size // shared

    def expert(self, rank: int) -> tuple[int, int]:
        """Rank and size in the expert-parallel group."""
        return rank % self.expert_parallel, self.expert_parallel

    def expert_data(self, rank: int) -> tuple[int, int]:
        """Rank and size among those that hold the same experts."""
        return rank // self.expert_parallel, self.world_size // self.expert_parallel


@dataclass(frozen=True, slots=True)
class ShardSpec:
    """A cut along ``dim``, which may be negative, of ``parts`` equal fused parts."""

    dim: int
    parts: int = 1

    def section(self, shape: Sequence[int], rank: int, size: int) -> Section:
        """Return the section of ``rank`` of ``size``. Raises ValueError if the shape does not fit."""
        dim = self.dim % len(shape)
        each, rest = divmod(shape[dim], self.parts)
        if rest:
            raise ValueError(
                f"dimension {dim} of {tuple(shape)} cannot be divided into {self.parts} equal parts"
            )
        return packed_section(shape, dim, (each,) * self.parts, rank, size)


@dataclass(frozen=True, slots=True)
class Ranges:
    """A cut along ``dim`` into index ranges ``(first, stop)`` for each rank, in order.

    An engine may decide these by its own rules: heads shared unevenly, parts of several sizes, blocks in
    turn.
    """

    dim: int
    ranks: tuple[tuple[tuple[int, int], ...], ...]

    def section(self, shape: Sequence[int], rank: int, size: int) -> Section:
        """Return the section of ``rank``. Raises ValueError for another number of ranks."""
        if size != len(self.ranks):
            raise ValueError(f"a shard specification for {len(self.ranks)} ranks was applied to {size} ranks")
        return ranged_section(shape, self.dim, self.ranks[rank])


@dataclass(frozen=True)
class ParallelPlan:
    """A plan for one mesh axis: cuts by parameter name, forward styles by module name."""

    cuts: Mapping[str, ShardSpec | Ranges] = field(default_factory=dict)
    modules: Mapping[str, str] = field(default_factory=dict)


#: transformers' styles that cut parameters: (cut of a weight, cut of a bias); None: every rank has it whole.
#: Source: ``transformers/distributed/tensor_parallel.py``, ``shard_param`` of each style.
TENSOR_STYLES: Mapping[str, tuple[ShardSpec | None, ShardSpec | None]] = {
    "colwise": (ShardSpec(-2), ShardSpec(-1)),
    "colwise_gather_output": (ShardSpec(-2), ShardSpec(-1)),
    "colwise_rep": (ShardSpec(-2), ShardSpec(-1)),
    "rowwise": (ShardSpec(-1), None),
    "rowwise_split_input": (ShardSpec(-1), None),
    "rowwise_rep": (ShardSpec(-1), None),
    "embedding_rowwise": (ShardSpec(0), None),
    "embedding_colwise": (ShardSpec(1), None),
    "packed_colwise": (ShardSpec(-2, 2), ShardSpec(-1)),
    "packed_rowwise": (ShardSpec(-1, 2), None),
    **dict.fromkeys(
        (
            *("sequence_parallel", "replicated_with_grad_allreduce", "mla_kv_a_proj", "all_reduce"),
            *("moe_tp_experts", "moe_identity_expert", "local_params", "replicate"),
        ),
        (None, None),
    ),
}
#: Styles of an expert plan: those that cut a parameter by experts, and those that run a module.
EXPERT_STYLES: Mapping[str, bool] = {"grouped_gemm": True, "ep_dispatch_experts": False}
#: Styles of older releases' expert plans: experts run there on all tokens, with a router that masks. The
#: parameters are cut alike, and zerostart runs the experts by its own exchange.
_FORMER_STYLES = ("ep_router", "moe_tp_experts")


def shard_spec_of(style: str, name: str, dimensions: int) -> ShardSpec | None:
    """Return the cut of the parameter ``name`` under a tensor-parallel style.

    None if every rank has it whole. Raises ConfigError for an unknown style.
    """
    if style not in TENSOR_STYLES:
        raise ConfigError(
            f"the tensor-parallel plan gives {name} the style {style!r}; known are {', '.join(TENSOR_STYLES)}"
        )
    weight, bias = TENSOR_STYLES[style]
    return bias if dimensions == 1 or name.endswith(".bias") else weight


def expand(rules: Mapping[str, str], name: str, parameter: bool) -> str | None:
    """Return the rule for a module or parameter.

    It is found by the name with ``*`` for layer numbers, for a parameter also by its module's name. Source:
    ``transformers/distributed/parallel_utils.py``, ``_get_parameter_plan``.
    """
    for exact in _spellings(name):
        if exact in rules:
            return rules[exact]
        if parameter and "." in exact and exact.rpartition(".")[0] in rules:
            return rules[exact.rpartition(".")[0]]
    return None


def _spellings(name: str) -> tuple[str, str]:
    return name, re.sub(r"\.\d+(?=\.|$)", ".*", name)


def rules_without(rules: Mapping[str, str], plan: ParallelPlan) -> dict[str, str]:
    """The rules of other parameters and modules than those that ``plan`` names."""
    named = {spelling for name in (*plan.cuts, *plan.modules) for spelling in _spellings(name)}
    return {name: style for name, style in rules.items() if name not in named}


def tensor_plan(
    rules: Mapping[str, str], parameters: Mapping[str, int], modules: Sequence[str]
) -> ParallelPlan:
    """A plan out of transformers' tensor-parallel styles; ``parameters`` gives names and dimensions.

    Raises ConfigError for a style that is not known.
    """
    cuts: dict[str, ShardSpec | Ranges] = {}
    for name, dimensions in parameters.items():
        style = expand(rules, name, parameter=True)
        if style is not None and (cut := shard_spec_of(style, name, dimensions)) is not None:
            cuts[name] = cut
    styles = {name: style for name in modules if (style := expand(rules, name, parameter=False)) is not None}
    return ParallelPlan(cuts, styles)


def expert_plan(
    rules: Mapping[str, str], parameters: Mapping[str, int], modules: Sequence[str]
) -> ParallelPlan:
    """Make a plan out of transformers' expert-parallel styles. Raises ConfigError for others.

    Styles of tensors in it would cut the dense part over the same ranks. The dense part is therefore whole,
    and each rank has its own batch.
    """
    unknown = sorted(set(rules.values()) - set(EXPERT_STYLES) - set(TENSOR_STYLES) - set(_FORMER_STYLES))
    if unknown:
        raise ConfigError(
            f"the expert-parallel plan has the styles {', '.join(unknown)}; "
            f"known are {', '.join(EXPERT_STYLES)}"
        )
    cuts = {
        name: ShardSpec(0)
        for name in parameters
        if EXPERT_STYLES.get(expand(rules, name, parameter=True) or "", False)
    }
    owners = {name.rpartition(".")[0] for name in cuts}
    return ParallelPlan(cuts, {name: "ep_dispatch_experts" for name in modules if name in owners})


@dataclass(frozen=True)
class Parallelism:
    """A mesh, and the cuts that it makes in a model's parameters.

    ``shapes`` are the unsharded shapes of the parameters.
    """

    mesh: Mesh
    experts: ParallelPlan = field(default_factory=ParallelPlan)
    tensors: ParallelPlan = field(default_factory=ParallelPlan)
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    def add_experts(self, cuts: Mapping[str, Ranges], shapes: Mapping[str, tuple[int, ...]]) -> Parallelism:
        """Return the same with more parameters that are cut by experts."""
        experts = replace(self.experts, cuts={**self.experts.cuts, **cuts})
        return replace(self, experts=experts, shapes={**self.shapes, **shapes})

    def is_expert(self, name: str) -> bool:
        """True if ``name`` is cut by experts."""
        return name in self.experts.cuts

    def cut(self, name: str) -> ShardSpec | Ranges | None:
        """Return the cut of ``name``, None without one.

        Parameters with equal cuts and shapes have equal layouts on every rank.
        """
        return self.experts.cuts.get(name) or self.tensors.cuts.get(name)

    def section(self, name: str, shape: Sequence[int], rank: int) -> Section:
        """The local tensor of ``rank``, which its owners share."""
        if name in self.experts.cuts:
            return self.experts.cuts[name].section(shape, *self.mesh.expert(rank))
        cut = self.tensors.cuts.get(name)
        return cut.section(shape, *self.mesh.tensor(rank)) if cut is not None else whole_section(shape)

    def expert_sections(self, name: str) -> list[Section]:
        """List the sections of an experts' parameter on the ranks of an expert-parallel group."""
        return [self.section(name, self.shapes[name], r) for r in range(self.mesh.expert_parallel)]

    def owners(self, name: str, rank: int) -> tuple[int, int]:
        """Rank and size of ``rank`` among those that hold the same section of ``name``."""
        return self.mesh.expert_data(rank) if name in self.experts.cuts else self.mesh.data(rank)

    def holders(self, name: str, rank: int) -> tuple[int, int]:
        """Place and number of ``rank`` among the holders of its share of ``name``.

        Sections that no axis cuts are equal on all ranks that share tensors.
        """
        return self.mesh.tensor(rank) if self.cut(name) is None else (0, 1)
