"""Experts and tensors shared by ranks on DeepSpeed: modules cut to this rank's part.

Every stage shards the result. At stage 3 the owners of an expert partition it; at stage 2 it has flat buffers
over its owners.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn

from zerostart.distributed.world import World
from zerostart.engines.deepspeed.partitioning import current_shards
from zerostart.engines.deepspeed.settings import TENSOR_RULES, DeepSpeedSettings
from zerostart.engines.exchange import exchange_tokens, expert_modules
from zerostart.engines.flat_buffers import held_layouts
from zerostart.engines.parallelism import share_random_states
from zerostart.engines.shard import Shard, loaded_names
from zerostart.errors import ConfigError, EngineError
from zerostart.geometry.layout import (
    Layout,
    Parallelism,
    ParallelPlan,
    Ranges,
    expand,
    flat_partition,
    replicated,
    rules_without,
    shard_spec_of,
)
from zerostart.models import library_of
from zerostart.upstream.deepspeed import tensors as upstream
from zerostart.upstream.deepspeed.construction import TensorGroups, mark_sliced, note_shared
from zerostart.upstream.deepspeed.experts import (
    ExpertGroups,
    mark_expert,
    mark_flat_expert,
    require_groups,
)
from zerostart.upstream.deepspeed.tensors import Slice, slices_of
from zerostart.upstream.types import DeepSpeedConfig

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def make_expert_cutter(
    world: World, parallelism: Parallelism, partitioned: bool
) -> Callable[[nn.Module], None]:
    """Return a function that removes other ranks' experts from a model. Collective.

    ``partitioned``: experts are partitioned further, and not kept whole.
    """
    require_groups()
    size = parallelism.mesh.tensor_parallel
    with world.collectives("making the experts' groups"):
        groups = ExpertGroups(parallelism.mesh.expert_parallel)
        tensor_group = TensorGroups(size).tensors if size > 1 else None
    # Stage 3 asks a parameter for its group, stages 1 and 2 for its group's name.
    marked = mark_expert if partitioned else mark_flat_expert
    return lambda model: _cut_experts(
        model, parallelism, world.rank, groups, tensor_group, lambda p: marked(p, groups)
    )


def _cut_experts(
    model: nn.Module,
    parallelism: Parallelism,
    rank: int,
    groups: ExpertGroups,
    tensor_group: dist.ProcessGroup | None,
    mark: Callable[[nn.Parameter], None],
) -> None:
    for module, own in expert_modules(model, parallelism).items():
        counts: list[int] = []
        for leaf, name in own.items():
            sections = parallelism.expert_sections(name)
            counts = [section.shape[0] for section in sections]
            section = sections[parallelism.mesh.expert(rank)[0]]
            local = _local(module._parameters[leaf], section.shape)
            mark(local)
            note_shared(local, groups.size)
            module._parameters[leaf] = local
        exchange_tokens(module, groups.experts, counts, parallelism.mesh.tensor_parallel, tensor_group)


def _local(old: nn.Parameter | None, shape: tuple[int, ...]) -> nn.Parameter:
    assert old is not None, "a cut names a parameter that is there"
    data = torch.empty(shape, dtype=old.dtype, device="meta")
    new = nn.Parameter(data, requires_grad=old.requires_grad)
    new.__dict__.update(old.__dict__)
    return new


def expert_shards(model: nn.Module, parallelism: Parallelism, rank: int) -> dict[str, Shard]:
    """Return the current ZeRO-3 partitions, with layouts of the unsharded parameters."""
    names = loaded_names(model)
    partitions = current_shards(model)
    shards = dict(partitions)
    for alias, parameter in model.named_parameters(remove_duplicate=False):
        if alias not in shards and parallelism.is_expert(names[alias]):
            # An adapter that ``deepspeed.initialize`` has not partitioned yet.
            shards[alias] = _local_shard(parallelism, names[alias], parameter, rank)
    for alias, shard in partitions.items():
        name = names[alias]  # A tied parameter has the layout of its first name.
        if parallelism.is_expert(name) or parallelism.mesh.tensor_parallel > 1:
            at = functools.partial(_layout, parallelism, name)
            holders = parallelism.holders(name, rank)
            shards[alias] = Shard(name, at(rank), shard.storage, at, holders, optimizer_replica=holders)
    return shards


def _layout(parallelism: Parallelism, name: str, rank: int) -> Layout:
    section = parallelism.section(name, parallelism.shapes[name], rank)
    return section.expand(flat_partition(section.shape, *parallelism.owners(name, rank)))


def flat_expert_shards(model: nn.Module, parallelism: Parallelism, rank: int) -> dict[str, Shard]:
    """Return this rank's experts or slices, with layouts of the unsharded parameters."""
    found, mesh = {}, parallelism.mesh
    names = loaded_names(model)
    for alias, parameter in model.named_parameters(remove_duplicate=False):
        name = names[alias]
        if parallelism.cut(name) is not None:
            found[alias] = _local_shard(parallelism, name, parameter, rank)
        elif mesh.tensor_parallel > 1:
            # Whole on every rank, but ranks that share tensors update the same part of it.
            at = functools.partial(_whole, tuple(parameter.shape))
            holders = (rank, mesh.world_size)
            storage = parameter.detach().view(-1)
            found[alias] = Shard(name, at(rank), storage, at, holders, optimizer_replica=mesh.tensor(rank))
    return found


def _local_shard(parallelism: Parallelism, name: str, parameter: nn.Parameter, rank: int) -> Shard:
    at = held_layouts(parallelism, name)
    return Shard(name, at(rank), parameter.detach().view(-1), at, parallelism.owners(name, rank))


def _whole(shape: tuple[int, ...], rank: int) -> Layout:
    return replicated(shape)


# This rank's part of shared parameters: slices of tensors, then experts.

#: A function that removes other ranks' parts from a model, None without shared parameters; and the ranks that
#: partition each parameter, None for all.
Cutter = tuple[Callable[[nn.Module], None] | None, dist.ProcessGroup | None]


def make_cutter(
    world: World, settings: DeepSpeedSettings, parallelism: Parallelism, partitioned: bool
) -> Cutter:
    """Return a function that removes other ranks' experts and slices, and the owners. Collective.

    ``partitioned``: they are partitioned further, and not kept whole.
    """
    cuts, owners = list[Callable[[nn.Module], None]](), None
    if parallelism.mesh.tensor_parallel > 1:
        cut, owners = make_tensor_cutter(world, parallelism, settings.tensors, settings.tp_plan)
        cuts.append(cut)
    if parallelism.mesh.expert_parallel > 1:
        # After the tensors, whose rules skip experts: these are still whole then.
        cuts.append(make_expert_cutter(world, parallelism, partitioned))
    return partial(_cut_all, cuts) if cuts else None, owners


def _cut_all(cuts: Sequence[Callable[[nn.Module], None]], model: nn.Module) -> None:
    for cut in cuts:
        cut(model)


# Tensors that ranks share on DeepSpeed: the rules are checked against the model's own plan.

REMEDY = "use engine='fsdp2', which runs it by its own plan, or tensor_parallel=1"
_GATHERED = ("colwise_gather_output", "colwise_rep")
_SUMMED = "_ds_grad_allreduce_registered"


def check_rules(
    model: nn.Module, tried: nn.Module, plan: Mapping[str, str], sliced: Collection[str], size: int
) -> None:
    """Raise ConfigError if ``tried``, as DeepSpeed cuts it, would train unlike ``plan``.

    ``sliced`` are names of parameters of ``model``, which is on meta in its true shapes.
    """
    wrong = next(_wrong(model, tried, plan, sliced), None)
    if wrong is not None:
        raise ConfigError(
            f"tensor_parallel={size}: {type(model).__name__} would be trained wrongly by the "
            f"tensor-parallel rules in engine_config, which {wrong}; {REMEDY}"
        )


def _wrong(
    model: nn.Module, tried: nn.Module, plan: Mapping[str, str], sliced: Collection[str]
) -> Iterator[str]:
    cut_modules = {name.rpartition(".")[0] for name in sliced}
    # A module that gathers its result does not affect its neighbours.
    partial = {name for name in cut_modules if not getattr(tried.get_submodule(name), "gather_output", False)}
    # Modules whose children run on a part of the activations: "whole" may be wrong there.
    parents = {name.rpartition(".")[0] for name in partial} - {""}
    for name, module in model.named_modules():
        style = expand(plan, name, parameter=False)
        if style is None or name.rpartition(".")[0] not in parents:
            continue
        became = tried.get_submodule(name)
        if style == "replicated_with_grad_allreduce":
            if not all(hasattr(p, _SUMMED) for p in became.parameters() if p.requires_grad):
                yield f"sum no gradients of {name}, which each rank runs on its own heads"
        elif style == "mla_kv_a_proj":
            yield f"sum no gradients behind {name}, of whose result each rank uses a part"
        elif style in _GATHERED and name in partial and not _complete(model, became, name):
            yield f"cut {name}, and do not gather its result, which is used whole"
        elif (
            isinstance(module, nn.Linear)
            and name not in cut_modules
            and shard_spec_of(style, name, 2) is not None
        ):
            yield f"leave {name} whole, and cut what is beside it"
    for name, parameter in model.named_parameters():
        style, owner = plan.get(name) or expand(plan, name, parameter=True), name.rpartition(".")[0]
        whole = style is not None and owner in parents and name not in sliced
        if whole and shard_spec_of(str(style), name, parameter.dim()) is not None:
            yield f"leave {name} whole, and cut what is beside it"


def _complete(model: nn.Module, became: nn.Module, name: str) -> bool:
    if not type(became).__name__.startswith("SubParam"):
        return False
    heads, keys = _heads(model)
    return "qkv" not in name or heads == keys


def check_structure(model: nn.Module, size: int) -> None:
    """Raise ConfigError for attention that depends on head numbers, which change on each rank."""
    if any(hasattr(module, "build_alibi_tensor") for module in model.modules()):
        raise ConfigError(
            f"tensor_parallel={size}: {type(model).__name__} has a position bias for each head "
            "(ALiBi), and every rank would use that of the first heads; use tensor_parallel=1"
        )


def check_dropout(model: nn.Module, size: int) -> None:
    """Raise ConfigError for heads shared unevenly with dropout: ranks would draw differently."""
    heads, keys = _heads(model)
    names = ("attention_dropout", "attention_probs_dropout_prob", "attn_pdrop")
    config = _text(model)
    dropped = next((name for name in names if getattr(config, name, 0)), None)
    if dropped and any(isinstance(n, int) and n % size for n in (heads, keys)):
        raise ConfigError(
            f"tensor_parallel={size} does not divide the heads of {type(model).__name__}, and its "
            f"{dropped} draws random numbers for each head: ranks would drop different parts of heads "
            "that they share; set it to 0, or use tensor_parallel=1"
        )


def _heads(model: nn.Module) -> tuple[object, object]:
    config = _text(model)
    heads = getattr(config, "num_attention_heads", None)
    return heads, getattr(config, "num_key_value_heads", None) or heads


def _text(model: nn.Module) -> PreTrainedConfig:
    config: PreTrainedConfig = getattr(model, "config", None)
    return config.get_text_config() if hasattr(config, "get_text_config") else config


# Layers that AutoTP makes, created in slices. DeepSpeed describes its slices
# (``upstream/deepspeed/tensors.py``) before anything is read. The description becomes a plan and the cut of a
# model on meta. Every stage then shards the slices over the ranks that hold the same ones.


def tensor_cuts(
    model: nn.Module,
    size: int,
    section: DeepSpeedConfig,
    plan_rules: Mapping[str, str] | None,
    experts: ParallelPlan,
) -> ParallelPlan:
    """Return DeepSpeed's cuts of ``model`` for ``size`` ranks that share tensors.

    ``model`` is on meta, in its true shapes. ``section`` is the configuration's, ``plan_rules`` a plan in
    transformers' styles that replaces it, ``experts`` the plan of shared experts. Raises ConfigError for a
    model that DeepSpeed does not cut, or cuts so that a rank has no part. Raises EngineError if it assumes
    another shape.
    """
    kind = type(model).__name__
    configured = plan_rules is not None or any(section.get(key) for key in TENSOR_RULES)
    check_structure(model, size)
    check_dropout(model, size)
    plan = library_of(model).parallel_rules(model, "tp")
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    # DeepSpeed cuts in place. A copy is cut now, the model itself later with the groups.
    tried, library = copy.deepcopy(model), library_of(model)
    # Ties first: they decide whether an embedding and a head are cut alike.
    library.tie(tried, set(library.ties(tried)))
    try:
        slices = upstream.described(tried, size, _ruled(model, section, plan_rules, experts))
    except ConfigError as error:
        if not plan:
            raise
        raise ConfigError(f"{error}; or {REMEDY}") from error
    if not slices:
        raise ConfigError(
            f"tensor_parallel={size}, but DeepSpeed shards no layer of {kind} with this configuration; "
            "say which layers in engine_config['tensor_parallel'], or use tensor_parallel=1"
        )
    cuts = {name: _make_ranges(name, piece, size) for name, piece in slices.items()}
    for name, piece in slices.items():
        if name in shapes and piece.shape != shapes[name]:
            raise EngineError(
                f"DeepSpeed assumes that {name} has the shape {list(piece.shape)}, but it has "
                f"{list(shapes[name])}; use tensor_parallel=1"
            )
    if configured:
        check_rules(model, tried, rules_without(plan, experts), slices, size)
    return ParallelPlan(cuts)


def _make_ranges(name: str, piece: Slice, size: int) -> Ranges:
    remedy = "say otherwise with engine_config['tensor_parallel'], or use tensor_parallel=1"
    if piece.reason:
        raise ConfigError(
            f"tensor_parallel={size}: {name} cannot be loaded in slices, because {piece.reason}; {remedy}"
        )
    if not all(piece.ranks):
        raise ConfigError(
            f"tensor_parallel={size} leaves some ranks without a slice of {name} {list(piece.shape)}, "
            f"which DeepSpeed slices by whole heads; use fewer ranks, or {remedy}"
        )
    return Ranges(piece.dim, piece.ranks)


def make_tensor_cutter(
    world: World, parallelism: Parallelism, section: DeepSpeedConfig, plan_rules: Mapping[str, str] | None
) -> tuple[Callable[[nn.Module], None], dist.ProcessGroup]:
    """Return a function that slices a model, and the owners of equal slices. Collective.

    Arguments are as in ``tensor_cuts``; the section's rules are completed by the model.
    """
    upstream.require_layers()
    with world.collectives("making the groups that share tensors"):
        groups = TensorGroups(parallelism.mesh.tensor_parallel)

    def slice_model(model: nn.Module) -> None:
        _sliced(model, parallelism, _ruled(model, section, plan_rules, parallelism.experts), groups)
        share_random_states(model, groups.tensors)

    return slice_model, groups.owners


def _ruled(
    model: nn.Module, section: DeepSpeedConfig, plan_rules: Mapping[str, str] | None, experts: ParallelPlan
) -> DeepSpeedConfig:
    """Return the section with the ``plan_rules`` plan, or else with the model's own plan.

    DeepSpeed refuses a plan with styles of experts, so parameters that ``experts`` cuts are left out.
    """
    if plan_rules is None and experts.cuts and not any(section.get(key) for key in TENSOR_RULES):
        plan_rules = library_of(model).parallel_rules(model, "tp")
    if not plan_rules:
        return section
    return {**section, **upstream.rules_of_plan(rules_without(plan_rules, experts))}


def _sliced(
    model: nn.Module, parallelism: Parallelism, section: DeepSpeedConfig, groups: TensorGroups
) -> None:
    # DeepSpeed makes new layers in the default dtype.
    kinds = {name: parameter.dtype for name, parameter in model.named_parameters()}
    size = parallelism.mesh.tensor_parallel
    upstream.sliced(model, size, section)
    mark_sliced(model, size, section, groups)
    cuts = parallelism.tensors.cuts
    # Compare the plan, made from the copy, with the model: reading follows the plan.
    actual = {name: Ranges(s.dim, s.ranks) for name, s in slices_of(model).items()}
    wrong = next((name for name in {**actual, **cuts} if actual.get(name) != cuts.get(name)), None)
    if wrong is not None:
        raise EngineError(
            f"DeepSpeed would slice {wrong} differently with this checkpoint, which has two tensors "
            "where the model ties two names to one; tie them in the checkpoint, or use "
            "tensor_parallel=1"
        )
    for name, parameter in model.named_parameters():
        if parameter.dtype != kinds.get(name, parameter.dtype):
            parameter.data = parameter.data.to(kinds[name])
