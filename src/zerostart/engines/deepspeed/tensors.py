"""Tensors shared out by ranks on DeepSpeed: the layers that AutoTP makes, born in slices.

DeepSpeed itself says what it slices (``upstream/deepspeed/parallel/tensors.py``), before anything is read;
here that becomes a plan, and the cut of a model on meta by which each rank is left with its slices. Every
stage then shards these over the ranks that hold the same ones.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist
from torch import nn

from zerostart.distributed.world import World
from zerostart.engines.deepspeed.settings import TENSOR_RULES
from zerostart.engines.deepspeed.tensor_checks import REMEDY, check_dropout, check_rules, check_structure
from zerostart.engines.same_draws import share_draws
from zerostart.errors import ConfigError, EngineError
from zerostart.geometry.layout import Parallelism, ParallelPlan, Ranges, rules_without
from zerostart.models import library_of
from zerostart.upstream.deepspeed.construction import TensorGroups, mark_sliced
from zerostart.upstream.deepspeed.parallel import tensors as upstream
from zerostart.upstream.deepspeed.parallel.tensors import Slice, slices_of


def tensor_cuts(
    model: nn.Module,
    size: int,
    section: Mapping[str, Any],
    given: Mapping[str, str] | None,
    experts: ParallelPlan,
) -> ParallelPlan:
    """What DeepSpeed cuts of ``model`` (on meta, in its true shapes) for ``size`` ranks that share tensors.

    ``section`` is the configuration's, ``given`` a plan in transformers' styles in its place, ``experts``
    what is shared otherwise. Raises ConfigError for a model that DeepSpeed does not cut, or in a way that
    leaves a rank without a part, and EngineError where it takes a parameter for one of another shape.
    """
    kind = type(model).__name__
    configured = given is not None or any(section.get(key) for key in TENSOR_RULES)
    check_structure(model, size)
    check_dropout(model, size)
    plan = library_of(model).parallel_rules(model, "tp")
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    tried, library = copy.deepcopy(model), library_of(model)
    library.tie(tried, set(library.ties(tried)))
    try:
        slices = upstream.described(tried, size, _ruled(model, section, given, experts))
    except ConfigError as error:
        if not plan:
            raise
        raise ConfigError(f"{error}; or {REMEDY}") from error
    if not slices:
        raise ConfigError(
            f"tensor_parallel={size}, but DeepSpeed cuts no layer of {kind} with what is configured; say "
            "which with engine_config['tensor_parallel'], or use tensor_parallel=1"
        )
    cuts = {name: _cut(name, piece, size) for name, piece in slices.items()}
    for name, piece in slices.items():
        if name in shapes and piece.shape != shapes[name]:
            raise EngineError(
                f"DeepSpeed takes {name} for {list(piece.shape)}, and it is {list(shapes[name])}"
            )
    if configured:
        check_rules(model, tried, rules_without(plan, experts), slices, size)
    return ParallelPlan(cuts)


def _cut(name: str, piece: Slice, size: int) -> Ranges:
    remedy = "say otherwise with engine_config['tensor_parallel'], or use tensor_parallel=1"
    if piece.reason:
        raise ConfigError(
            f"tensor_parallel={size}: {name} cannot be loaded in slices, for {piece.reason}; {remedy}"
        )
    if not all(piece.ranks):
        raise ConfigError(
            f"tensor_parallel={size} leaves ranks without a part of {name} {list(piece.shape)}, which "
            f"DeepSpeed cuts by whole heads; use fewer ranks, or {remedy}"
        )
    return Ranges(piece.dim, piece.ranks)


def tensor_cutter(
    world: World, parallelism: Parallelism, section: Mapping[str, Any], given: Mapping[str, str] | None
) -> tuple[Callable[[nn.Module], None], dist.ProcessGroup]:
    """What leaves this rank's slices in a model, and the ranks that have the same ones. Collective.

    Arguments are as in ``tensor_cuts``; the section's rules are settled with the model.
    """
    upstream.require_layers()
    with world.collectives("making the groups that share tensors"):
        groups = TensorGroups(parallelism.mesh.tensor_parallel)

    def cut(model: nn.Module) -> None:
        _sliced(model, parallelism, _ruled(model, section, given, parallelism.experts), groups)
        share_draws(model, groups.tensors)

    return cut, groups.owners


def _ruled(
    model: nn.Module, section: Mapping[str, Any], given: Mapping[str, str] | None, experts: ParallelPlan
) -> Mapping[str, Any]:
    """The section with the plan that is ``given``, or where neither says more with the model's own.

    DeepSpeed knows no style of experts, and refuses a plan that has one: what ranks share by ``experts`` is
    left out.
    """
    if given is None and experts.cuts and not any(section.get(key) for key in TENSOR_RULES):
        given = library_of(model).parallel_rules(model, "tp")
    if not given:
        return section
    return {**section, **upstream.rules_of_plan(rules_without(given, experts))}


def _sliced(
    model: nn.Module, parallelism: Parallelism, section: Mapping[str, Any], groups: TensorGroups
) -> None:
    """Replace the layers of ``model`` (on meta) by DeepSpeed's, in the slices that were planned."""
    kinds = {name: parameter.dtype for name, parameter in model.named_parameters()}
    size = parallelism.mesh.tensor_parallel
    upstream.sliced(model, size, section)
    mark_sliced(model, size, section, groups)
    cuts = parallelism.tensors.cuts
    found = {name: Ranges(s.dim, s.ranks) for name, s in slices_of(model).items()}
    wrong = next((name for name in {**found, **cuts} if found.get(name) != cuts.get(name)), None)
    if wrong is not None:
        raise EngineError(
            f"DeepSpeed slices {wrong} otherwise than it would without the checkpoint, which has two tensors "
            "for names that the model ties; tie them in the checkpoint, or use tensor_parallel=1"
        )
    for name, parameter in model.named_parameters():
        if parameter.dtype != kinds.get(name, parameter.dtype):
            parameter.data = parameter.data.to(kinds[name])
