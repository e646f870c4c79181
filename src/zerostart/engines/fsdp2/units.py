"""Choose the modules that become FSDP2 units, also if dtypes differ inside a block.

FSDP2 wants the trainable parameters of a unit in one dtype, and its policy casts all of a unit alike. A
module whose parameters differ in dtype from those around it (a router that is kept in fp32 in a bf16 model)
therefore becomes a separate unit.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from zerostart.engines.module_names import matching_modules
from zerostart.engines.training import EngineConfig, with_first_values
from zerostart.errors import EngineError
from zerostart.models import library_of
from zerostart.upstream.torch.fsdp2 import check_kept, is_at_rest, whole_tensor

_ATTRIBUTE = "_zerostart_computes_in"

#: The dtype in which parameters are held, and the one in which they compute.
Kind = tuple[torch.dtype, torch.dtype]


@dataclass(frozen=True)
class Unit:
    """A module to be sharded as a unit."""

    module: nn.Module
    #: Kind of the module's parameters; None if none of them trains.
    kind: Kind | None

    def options(self, arguments: EngineConfig) -> EngineConfig:
        """Return arguments of ``fully_shard`` whose policy only casts units that allow it.

        Units that the model keeps in fp32 are neither cast nor fed casts.
        """
        policy = arguments.get("mp_policy")
        cast_to = policy.param_dtype if policy is not None else None
        if policy is None or cast_to is None or self.kind is None or self.kind[1] == cast_to:
            return arguments
        uncast = replace(policy, param_dtype=None, output_dtype=None, cast_forward_inputs=False)
        return {**arguments, "mp_policy": uncast}


def let_cast(parameter: nn.Parameter, dtype: torch.dtype) -> None:
    """Allow a policy to cast ``parameter`` to ``dtype``; others keep their dtype."""
    setattr(parameter, _ATTRIBUTE, dtype)


def scalars_of(model: nn.Module) -> set[nn.Parameter]:
    """Return the parameters without dimensions, which ``fully_shard`` must ignore.

    They are whole on every rank, and not trained: nothing would reduce their gradients.
    """
    return {parameter for parameter in model.parameters() if not parameter.dim()}


def check_frozen(model: nn.Module) -> None:
    """Raise EngineError, naming them, where parameters without dimensions are to be trained."""
    trained = [name for name, p in model.named_parameters() if not p.dim() and p.requires_grad]
    if trained:
        raise EngineError(
            f"FSDP2 cannot train parameters without dimensions ({', '.join(trained[:4])}): it does not "
            "shard them or reduce their gradients; freeze them (requires_grad_(False)), give them a "
            "dimension, or use engine='deepspeed'"
        )


def _kind(parameter: nn.Parameter) -> Kind:
    return parameter.dtype, getattr(parameter, _ATTRIBUTE, parameter.dtype)


def units_of(model: nn.Module, blocks: Sequence[nn.Module]) -> list[Unit]:
    """List the units to wrap in order: blocks, modules with other dtypes, and the model.

    ``blocks`` are innermost first; sharded modules are left out. Raises EngineError, naming the parameters,
    if one module directly holds parameters of several dtypes.
    """
    names = {id(module): name for name, module in model.named_modules()}
    finished = {id(module) for module in model.modules() if isinstance(module, FSDPModule)}
    units: list[Unit] = []
    # Innermost first, the model last: ``fully_shard`` takes the parameters that are in no unit yet.
    for block in dict.fromkeys((*blocks, model)):
        if id(block) in finished:
            continue
        inner, kind = _split(block, finished, names)
        units += [*inner, Unit(block, kind)]
        finished.add(id(block))
    return units


def shard_units(
    model: nn.Module, wrap: Sequence[str | type[nn.Module]] | None, mesh: DeviceMesh, options: EngineConfig
) -> None:
    """Shard ``model`` over ``mesh``: its blocks, then the model around them."""
    for unit in units_of(model, blocks_of(model, wrap)):
        fully_shard(unit.module, mesh=mesh, **unit.options(options))
    inside = {
        m
        for unit in model.modules()
        if unit is not model and isinstance(unit, FSDPModule)
        for m in unit.modules()
    }
    for name, module in model.named_modules():
        if module is not model and module not in inside and any(True for _ in module.parameters(False)):
            module.register_forward_pre_hook(_Gathering(model, name))


class _Gathering:
    """Gathers the parameters of a module called outside the forward of its model.

    FSDP2 gathers the parameters outside all blocks, such as an embedding, only in the model's forward, and
    reduces their gradients there. PEFT's prompt tuning and other wrappers call such modules directly.
    """

    def __init__(self, model: nn.Module, name: str) -> None:
        self._model = weakref.ref(model)
        self._name = name

    def __call__(self, module: nn.Module, args: object) -> None:
        model = self._model()
        if model is None or not is_at_rest(model):
            return
        if torch.is_grad_enabled() and any(p.requires_grad for p in module.parameters(False)):
            raise EngineError(
                f"{self._name} of {type(model).__name__.removeprefix('FSDP')} was called outside the model's "
                "forward, and only that gathers its parameters and reduces their gradients on FSDP2: call "
                f"model(...) itself, not model.forward(...), freeze {self._name}, or use DeepSpeed"
            )
        model.unshard()  # type: ignore[operator]


def _split(module: nn.Module, finished: set[int], names: dict[int, str]) -> tuple[list[Unit], Kind | None]:
    """Return units to make inside ``module``, and the one kind of the remaining parameters."""
    own: dict[Kind, str] = {}
    for name, parameter in module.named_parameters(recurse=False):
        if parameter.requires_grad and parameter.dim():
            own.setdefault(_kind(parameter), f"{names[id(module)]}.{name}".lstrip("."))
    if len(own) > 1:
        dtypes = ", ".join(f"{name} is {_spelled(kind)}" for kind, name in own.items())
        raise EngineError(
            f"FSDP2 shards a module's own parameters in one dtype, but {type(module).__name__} mixes "
            f"them: {dtypes}. Freeze the smaller ones, or use engine='deepspeed'"
        )
    units: list[Unit] = []
    remaining: list[tuple[nn.Module, Kind]] = []
    for child in module.children():
        if id(child) not in finished:
            inner, kind = _split(child, finished, names)
            units += inner
            if kind is not None:
                remaining.append((child, kind))
    kinds = {kind for _, kind in remaining} | set(own)
    if len(kinds) < 2:
        return units, next(iter(kinds), None)
    # The module keeps the kind of its direct parameters, otherwise the kind with most elements.
    keep = next(iter(own)) if own else max(kinds, key=lambda kind: _elements(remaining, kind))
    for child, kind in remaining:
        if kind != keep:
            parts = _callable_parts(child, finished)
            units += [Unit(part, kind) for part in parts]
            # The parent and its parents skip them.
            finished.update(id(part) for part in parts)
    return units, keep


def _spelled(kind: Kind) -> str:
    held, computing = (str(dtype).removeprefix("torch.") for dtype in kind)
    return held if held == computing else f"{held} (computing in {computing})"


def _elements(modules: Sequence[tuple[nn.Module, Kind]], kind: Kind) -> int:
    return sum(p.numel() for module, its in modules if its == kind for p in module.parameters())


def _callable_parts(module: nn.Module, finished: set[int]) -> list[nn.Module]:
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        parts = [c for c in module.children() if id(c) not in finished]
        return [p for child in parts for p in _callable_parts(child, finished)]
    return [module] if any(True for _ in module.parameters()) else []


# Choice of the modules that are sharded as units.


def blocks_of(model: nn.Module, wrap: Sequence[str | type[nn.Module]] | None) -> list[nn.Module]:
    """The modules to be sharded as units, innermost first.

    Those that ``wrap`` names (class names, classes, or names of modules, ``*`` for any part), else those
    whose class is in the model's ``_no_split_modules``; a plain module's are the entries of its outermost
    ``ModuleList``s. A module that shares a parameter with the rest of the model is none. Raises ConfigError
    for an entry of ``wrap`` that matches nothing. Of a model that is called by parts, all else that holds
    parameters is a unit as well: the root's forward, which would gather them, never runs.
    """
    if wrap:
        candidates = list(matching_modules(model, wrap, "engine_config['wrap'] has").values())
    elif kinds := set(getattr(model, "_no_split_modules", None) or ()):
        candidates = [m for m in model.modules() if type(m).__name__ in kinds]
    else:
        candidates = [child for part in _outermost_lists(model) for child in part]
    if library_of(model).by_parts(model):
        candidates = _with_the_rest(model, candidates)
    holders = _holders(model)
    blocks = [m for m in candidates if m is not model and any(True for _ in m.parameters())]
    # FSDP2 wants all holders of a tied parameter in one unit: the root. Modules are listed outer before
    # inner, and are wrapped in reverse.
    return [m for m in reversed(blocks) if _holds_all_uses(m, holders)]


def _holds_all_uses(module: nn.Module, holders: Mapping[int, set[nn.Module]]) -> bool:
    inside = set(module.modules())
    return all(holders[id(parameter)] <= inside for parameter in module.parameters())


def _with_the_rest(model: nn.Module, blocks: Sequence[nn.Module]) -> list[nn.Module]:
    """The ``blocks``, and the modules outside of them that hold parameters; outer ones first."""
    inside = {id(module) for block in blocks for module in block.modules()}
    own = [m for m in model.modules() if id(m) not in inside and any(True for _ in m.parameters(False))]
    included = {id(module) for module in (*blocks, *own)}
    return [module for module in model.modules() if id(module) in included]


def _holders(model: nn.Module) -> dict[int, set[nn.Module]]:
    """The modules that hold each parameter, by its ``id``."""
    holders: dict[int, set[nn.Module]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            holders.setdefault(id(parameter), set()).add(module)
    return holders


def _outermost_lists(module: nn.Module) -> list[nn.ModuleList]:
    lists: list[nn.ModuleList] = []
    for child in module.children():
        lists += [child] if isinstance(child, nn.ModuleList) else _outermost_lists(child)
    return lists


# Parameters added to a sharded model, such as adapters, become shards of the same mesh.

#: Modules that hold parameters for others and are never called, so that nothing would gather them.
_CONTAINERS = (nn.ParameterList, nn.ParameterDict)
_AVERAGED = "_zerostart_averaged"


def shard_added(model: nn.Module, options: EngineConfig, fp32: bool) -> list[str]:
    """Shard the added parameters of ``model``, each module with some as a unit.

    ``options`` are keyword arguments of ``fully_shard``. With ``fp32`` trainable parameters first become
    fp32, as the masters of mixed precision. Returns the names of the modules. Raises EngineError, naming the
    parameter, if its module is never called, or if it has no dimensions and is to be trained.
    """
    check_frozen(model)
    check_kept(model)
    added: list[tuple[str, nn.Module]] = []
    for name, module in model.named_modules():
        # Parameters without dimensions remain whole; they are refused elsewhere if they train.
        own = [(leaf, p) for leaf, p in module._parameters.items() if p is not None and p.dim()]
        plain = [leaf for leaf, p in own if not isinstance(p, DTensor)]
        if not plain:
            continue
        where = f"{name}.{plain[0]}".lstrip(".")
        if isinstance(module, (*_CONTAINERS, FSDPModule)) or len(plain) != len(own):
            raise EngineError(
                f"{where} was added to a model that FSDP2 has sharded, in a {type(module).__name__} that "
                "FSDP2 cannot shard by itself. Adapters of linear layers can be added; for others, use "
                "DeepSpeed ZeRO-3, or load without zerostart"
            )
        added.append((name, module))
    # Over all ranks, like the model's parameters: their gradients are the mean of all batches.
    mesh = _mesh_of(model)
    tied: dict[frozenset[nn.Module], list[nn.Module]] = {}
    holders = _holders(model)
    for _, module in added:
        hold_masters(module.parameters(recurse=False), fp32)
        sharing = frozenset().union(*(holders[id(p)] for p in module.parameters(recurse=False)))
        tied.setdefault(sharing, []).append(module)
    for modules in tied.values():
        ignored = set().union(*map(scalars_of, modules))
        # Small, and needed again in the backward: gathered once a step.
        unit_options = {"reshard_after_forward": False, "ignored_params": ignored}
        fully_shard(modules, mesh=mesh, **{**options, **unit_options})
    return [name for name, _ in added]


def shard_around(model: nn.Module, options: EngineConfig, fp32: bool) -> None:
    """Make ``model`` the root unit of its sharded parts; see ``shard_added``."""
    if not isinstance(model, FSDPModule):
        hold_masters((p for p in model.parameters() if not isinstance(p, DTensor)), fp32)
        fully_shard(model, mesh=_mesh_of(model), ignored_params=scalars_of(model), **options)


def share_added(model: nn.Module, added: Sequence[nn.Parameter], shared: str = "") -> None:
    """Give ``added`` parameters rank 0's values, and average their gradients over all ranks.

    They are whole until they are sharded, and right in a loop that does no more than FSDP2 asks for.
    ``shared`` names the axes over which the model is cut. With such axes the mean is not over all ranks, so
    the parameters cannot be trained unless they are sharded: a training forward raises EngineError.
    """
    values = added
    if not shared:
        # Copies of the model's modules (``modules_to_save``) consist of shards that no unit gathers.
        values = with_first_values(lambda: [_whole(p) if isinstance(p, DTensor) else p for p in added])
    whole = dict(zip(map(id, added), values, strict=True))
    modules = dict(model.named_modules())
    for name, module in modules.items():
        own = {leaf: whole[id(p)] for leaf, p in module._parameters.items() if id(p) in whole}
        if own:
            # Not by the setter: names and hooks of the module remain.
            module._parameters.update(own)
            paths = ["", *itertools.accumulate(name.split("."), "{}.{}".format)]
            # From the module outwards, up to the first unit, which would gather and reduce these parameters.
            around = itertools.takewhile(_is_no_unit, map(modules.__getitem__, reversed(paths)))
            sharing = _Sharing(around, f"{name} of a {type(model).__name__} {shared}" if shared else "")
            module.register_forward_pre_hook(sharing)
            if not shared:
                sharing(module, ())


def _is_no_unit(module: nn.Module) -> bool:
    return not isinstance(module, FSDPModule)


def _whole(parameter: DTensor) -> nn.Parameter:
    return nn.Parameter(whole_tensor(parameter), parameter.requires_grad)


class _Sharing:
    """Averages the gradients of a module's parameters until a unit of FSDP2 does.

    The unit is the module or one of the modules ``around`` it. The parameters are read in each call: a
    library may replace them (``assign=True``), or train them later.
    """

    def __init__(self, around: Iterable[nn.Module], module: str) -> None:
        self._around = [weakref.ref(one) for one in around]
        self._module = module

    def __call__(self, module: nn.Module, args: object) -> None:
        if any(isinstance(one(), FSDPModule) for one in self._around):
            return
        for parameter in module._parameters.values():
            if parameter is None or isinstance(parameter, DTensor) or hasattr(parameter, _AVERAGED):
                continue
            if parameter.requires_grad and self._module:
                if torch.is_grad_enabled():
                    raise EngineError(
                        f"{self._module} was added after the load, and nothing averages its gradients over "
                        "the ranks; use tensor_parallel=1, and expert_parallel=1 unless accelerate prepares "
                        "the model, which shards it"
                    )
            elif parameter.requires_grad:
                setattr(parameter, _AVERAGED, True)
                parameter.register_post_accumulate_grad_hook(_average)  # type: ignore[no-untyped-call]


def _average(parameter: torch.Tensor) -> None:
    if dist.is_initialized() and parameter.grad is not None and not isinstance(parameter, DTensor):
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


def hold_masters(parameters: Iterable[nn.Parameter], fp32: bool) -> None:
    """Convert trained ``parameters`` to fp32 if ``fp32``."""
    for parameter in parameters:
        if fp32 and parameter.requires_grad and parameter.dtype != torch.float32:
            parameter.data = parameter.data.to(torch.float32)


def _mesh_of(model: nn.Module) -> DeviceMesh:
    """The mesh of all ranks, over which the model's own parameters are sharded."""
    meshes = [p.device_mesh for p in model.parameters() if isinstance(p, DTensor)]
    return max(meshes, key=lambda mesh: mesh.size())
