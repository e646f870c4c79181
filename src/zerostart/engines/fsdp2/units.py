"""Choose the modules that become FSDP2 units (arguments of ``fully_shard``).

FSDP2 requires one dtype for the trainable parameters of a unit, and its policy casts all of them. A module
whose parameters have another dtype (a router that is kept in fp32 in a bf16 model) therefore becomes a
separate unit.
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
from zerostart.engines.training import EngineConfig, broadcast_added
from zerostart.errors import EngineError
from zerostart.models import library_of
from zerostart.upstream.torch.fsdp2 import refuse_replaced_parameters, whole_tensor

_COMPUTE_DTYPE = "_zerostart_computes_in"

#: Storage dtype and compute dtype of parameters.
Dtypes = tuple[torch.dtype, torch.dtype]


@dataclass(frozen=True)
class Unit:
    """A module to be sharded as a unit."""

    module: nn.Module
    #: Dtypes of the trainable parameters; None if there are none.
    dtypes: Dtypes | None

    def options(self, arguments: EngineConfig) -> EngineConfig:
        """Return ``arguments`` for ``fully_shard``, without casts if the model keeps the unit's dtype.

        FSDP2 then casts neither the unit's parameters nor its inputs.
        """
        policy = arguments.get("mp_policy")
        cast_to = policy.param_dtype if policy is not None else None
        if policy is None or cast_to is None or self.dtypes is None or self.dtypes[1] == cast_to:
            return arguments
        uncast = replace(policy, param_dtype=None, output_dtype=None, cast_forward_inputs=False)
        return {**arguments, "mp_policy": uncast}


def set_compute_dtype(parameter: nn.Parameter, dtype: torch.dtype) -> None:
    """Let the engine's policy cast ``parameter`` to ``dtype``; by default it is not cast."""
    setattr(parameter, _COMPUTE_DTYPE, dtype)


def find_scalars(model: nn.Module) -> set[nn.Parameter]:
    """Return the parameters without dimensions, which ``fully_shard`` must ignore.

    Every rank holds them whole. They cannot be trained, since FSDP2 would not reduce their gradients.
    """
    return {parameter for parameter in model.parameters() if not parameter.dim()}


def refuse_trained_scalars(model: nn.Module) -> None:
    """Raise EngineError, with names, for trainable parameters without dimensions."""
    trained = [name for name, p in model.named_parameters() if not p.dim() and p.requires_grad]
    if trained:
        raise EngineError(
            f"FSDP2 cannot train parameters without dimensions ({', '.join(trained[:4])}): it does not "
            "shard them or reduce their gradients; freeze them (requires_grad_(False)), give them a "
            "dimension, or use engine='deepspeed'"
        )


def _dtypes_of(parameter: nn.Parameter) -> Dtypes:
    return parameter.dtype, getattr(parameter, _COMPUTE_DTYPE, parameter.dtype)


def list_units(model: nn.Module, blocks: Sequence[nn.Module]) -> list[Unit]:
    """List the units to wrap in order: blocks, modules with other dtypes, and the model.

    ``blocks`` are innermost first; sharded modules are skipped. Raises EngineError, naming the parameters,
    if one module directly holds parameters of several dtypes.
    """
    names = {id(module): name for name, module in model.named_modules()}
    finished = {id(module) for module in model.modules() if isinstance(module, FSDPModule)}
    units: list[Unit] = []
    # Innermost first, the model last: ``fully_shard`` takes the parameters that are in no unit yet.
    for block in dict.fromkeys((*blocks, model)):
        if id(block) in finished:
            continue
        inner, dtypes = _divide(block, finished, names)
        units += [*inner, Unit(block, dtypes)]
        finished.add(id(block))
    return units


def shard_units(
    model: nn.Module, wrap: Sequence[str | type[nn.Module]] | None, mesh: DeviceMesh, options: EngineConfig
) -> None:
    """Shard ``model`` over ``mesh``: its blocks, then the model around them."""
    for unit in list_units(model, find_blocks(model, wrap)):
        fully_shard(unit.module, mesh=mesh, **unit.options(options))


def _divide(module: nn.Module, finished: set[int], names: dict[int, str]) -> tuple[list[Unit], Dtypes | None]:
    """Return units to make inside ``module``, and the dtypes of the remaining parameters."""
    own: dict[Dtypes, str] = {}
    for name, parameter in module.named_parameters(recurse=False):
        if parameter.requires_grad and parameter.dim():
            own.setdefault(_dtypes_of(parameter), f"{names[id(module)]}.{name}".lstrip("."))
    if len(own) > 1:
        mixed = ", ".join(f"{name} is {_format_dtypes(dtypes)}" for dtypes, name in own.items())
        raise EngineError(
            f"FSDP2 shards a module's own parameters in one dtype, but {type(module).__name__} mixes "
            f"them: {mixed}. Freeze the smaller ones, or use engine='deepspeed'"
        )
    units: list[Unit] = []
    remaining: list[tuple[nn.Module, Dtypes]] = []
    for child in module.children():
        if id(child) not in finished:
            inner, dtypes = _divide(child, finished, names)
            units += inner
            if dtypes is not None:
                remaining.append((child, dtypes))
    choices = {dtypes for _, dtypes in remaining} | set(own)
    if len(choices) < 2:
        return units, next(iter(choices), None)
    # The module keeps the dtypes of its direct parameters, otherwise the dtypes with most elements.
    keep = next(iter(own)) if own else max(choices, key=lambda dtypes: _count_elements(remaining, dtypes))
    for child, dtypes in remaining:
        if dtypes != keep:
            parts = _callable_parts(child, finished)
            units += [Unit(part, dtypes) for part in parts]
            # Modules around them must not shard these parts again.
            finished.update(id(part) for part in parts)
    return units, keep


def _format_dtypes(dtypes: Dtypes) -> str:
    held, computing = (str(dtype).removeprefix("torch.") for dtype in dtypes)
    return held if held == computing else f"{held} (computing in {computing})"


def _count_elements(modules: Sequence[tuple[nn.Module, Dtypes]], dtypes: Dtypes) -> int:
    return sum(p.numel() for module, its in modules if its == dtypes for p in module.parameters())


def _callable_parts(module: nn.Module, finished: set[int]) -> list[nn.Module]:
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        parts = [c for c in module.children() if id(c) not in finished]
        return [p for child in parts for p in _callable_parts(child, finished)]
    return [module] if any(True for _ in module.parameters()) else []


# Choice of the modules that are sharded as units.


def find_blocks(model: nn.Module, wrap: Sequence[str | type[nn.Module]] | None) -> list[nn.Module]:
    """Return the modules to shard as units, innermost first.

    ``wrap`` has class names, classes, or module names (``*``: any part). By default the model's
    ``_no_split_modules`` name the classes, or the entries of the outermost ``ModuleList``s are the units. A
    module that shares a parameter with the rest of the model is skipped. If users call modules and not the
    model's forward, all other modules with parameters are units too, since the root never gathers. Raises
    ConfigError for an entry of ``wrap`` that matches nothing.
    """
    if wrap:
        candidates = list(matching_modules(model, wrap, "engine_config['wrap'] has").values())
    elif class_names := set(getattr(model, "_no_split_modules", None) or ()):
        candidates = [m for m in model.modules() if type(m).__name__ in class_names]
    else:
        candidates = [child for part in _find_outermost_lists(model) for child in part]
    if library_of(model).is_called_by_parts(model):
        candidates = _add_remaining_modules(model, candidates)
    holders = _find_holders(model)
    blocks = [m for m in candidates if m is not model and any(True for _ in m.parameters())]
    # FSDP2 requires that one unit, the root, has all modules with a tied parameter. ``modules()`` lists outer
    # modules first, so reverse it.
    return [m for m in reversed(blocks) if _holds_all_users(m, holders)]


def _holds_all_users(module: nn.Module, holders: Mapping[int, set[nn.Module]]) -> bool:
    inside = set(module.modules())
    return all(holders[id(parameter)] <= inside for parameter in module.parameters())


def _add_remaining_modules(model: nn.Module, blocks: Sequence[nn.Module]) -> list[nn.Module]:
    """Return ``blocks`` and other modules that directly hold parameters, outer ones first."""
    inside = {id(module) for block in blocks for module in block.modules()}
    own = [m for m in model.modules() if id(m) not in inside and any(True for _ in m.parameters(False))]
    included = {id(module) for module in (*blocks, *own)}
    return [module for module in model.modules() if id(module) in included]


def _find_holders(model: nn.Module) -> dict[int, set[nn.Module]]:
    """Map the ``id`` of each parameter to the modules that hold it."""
    holders: dict[int, set[nn.Module]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            holders.setdefault(id(parameter), set()).add(module)
    return holders


def _find_outermost_lists(module: nn.Module) -> list[nn.ModuleList]:
    lists: list[nn.ModuleList] = []
    for child in module.children():
        lists += [child] if isinstance(child, nn.ModuleList) else _find_outermost_lists(child)
    return lists


# Parameters added to a sharded model, such as adapters, become shards of the same mesh.

#: Modules whose forward is never called, so FSDP2 would not gather their parameters.
_CONTAINERS = (nn.ParameterList, nn.ParameterDict)
_HAS_HOOK = "_zerostart_averaged"


def shard_added(model: nn.Module, options: EngineConfig, fp32: bool) -> list[str]:
    """Shard parameters added to ``model``; each module that holds some becomes a unit.

    ``options`` are keyword arguments of ``fully_shard``. With ``fp32``, trainable parameters first become
    fp32, as the masters of mixed precision. Returns the names of the modules. Raises EngineError, naming the
    parameter, if its module is never called, or if it is trainable and has no dimensions.
    """
    refuse_trained_scalars(model)
    refuse_replaced_parameters(model)
    added: list[tuple[str, nn.Module]] = []
    for name, module in model.named_modules():
        # Parameters without dimensions are not sharded.
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
    # Shard over all ranks, like the model's parameters, since gradients are averaged over all batches.
    mesh = _find_mesh(model)
    tied: dict[frozenset[nn.Module], list[nn.Module]] = {}
    holders = _find_holders(model)
    for _, module in added:
        convert_to_masters(module.parameters(recurse=False), fp32)
        sharing = frozenset().union(*(holders[id(p)] for p in module.parameters(recurse=False)))
        tied.setdefault(sharing, []).append(module)
    for modules in tied.values():
        ignored = set().union(*map(find_scalars, modules))
        # They are small, so keep them gathered from forward to backward.
        unit_options = {"reshard_after_forward": False, "ignored_params": ignored}
        fully_shard(modules, mesh=mesh, **{**options, **unit_options})
    return [name for name, _ in added]


def shard_around(model: nn.Module, options: EngineConfig, fp32: bool) -> None:
    """Make ``model`` the root unit of its sharded parts; see ``shard_added``."""
    if not isinstance(model, FSDPModule):
        convert_to_masters((p for p in model.parameters() if not isinstance(p, DTensor)), fp32)
        fully_shard(model, mesh=_find_mesh(model), ignored_params=find_scalars(model), **options)


def share_added(model: nn.Module, added: Sequence[nn.Parameter], split: str = "") -> None:
    """Give ``added`` parameters rank 0's values, and average their gradients over all ranks.

    Ranks hold them whole until they are sharded; a training loop for FSDP2 needs no change. ``split``
    describes other axes over which the model is split. Gradients are then not averaged over all ranks, so a
    training forward with unsharded parameters raises EngineError.
    """
    values = added
    if not split:
        # PEFT's copies of modules (``modules_to_save``) are shards that no unit gathers.
        values = broadcast_added(lambda: [_gather_whole(p) if isinstance(p, DTensor) else p for p in added])
    whole = dict(zip(map(id, added), values, strict=True))
    modules = dict(model.named_modules())
    for name, module in modules.items():
        own = {leaf: whole[id(p)] for leaf, p in module._parameters.items() if id(p) in whole}
        if own:
            # Bypass the setter, to keep the module's names and hooks.
            module._parameters.update(own)
            paths = ["", *itertools.accumulate(name.split("."), "{}.{}".format)]
            # The module and its parents, up to the first unit, which gathers and reduces the parameters.
            around = itertools.takewhile(_is_no_unit, map(modules.__getitem__, reversed(paths)))
            sharing = _AverageHook(around, f"{name} of a {type(model).__name__} {split}" if split else "")
            module.register_forward_pre_hook(sharing)
            if not split:
                sharing(module, ())


def _is_no_unit(module: nn.Module) -> bool:
    return not isinstance(module, FSDPModule)


def _gather_whole(parameter: DTensor) -> nn.Parameter:
    return nn.Parameter(whole_tensor(parameter), parameter.requires_grad)


class _AverageHook:
    """Forward hook that averages gradients of a module's parameters that FSDP2 does not reduce.

    It does nothing once one of ``around``, the module and its parents, is a unit. Each call lists the
    parameters again: a library may replace them (``assign=True``), or make them trainable later.
    """

    def __init__(self, around: Iterable[nn.Module], module: str) -> None:
        self._around = [weakref.ref(one) for one in around]
        self._module = module

    def __call__(self, module: nn.Module, args: object) -> None:
        if any(isinstance(one(), FSDPModule) for one in self._around):
            return
        for parameter in module._parameters.values():
            if parameter is None or isinstance(parameter, DTensor) or hasattr(parameter, _HAS_HOOK):
                continue
            if parameter.requires_grad and self._module:
                if torch.is_grad_enabled():
                    raise EngineError(
                        f"{self._module} was added after the load, and nothing averages its gradients over "
                        "the ranks; use tensor_parallel=1"
                    )
            elif parameter.requires_grad:
                setattr(parameter, _HAS_HOOK, True)
                parameter.register_post_accumulate_grad_hook(_average)  # type: ignore[no-untyped-call]


def _average(parameter: torch.Tensor) -> None:
    if dist.is_initialized() and parameter.grad is not None and not isinstance(parameter, DTensor):
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


def convert_to_masters(parameters: Iterable[nn.Parameter], fp32: bool) -> None:
    """Convert trained ``parameters`` to fp32 if ``fp32``."""
    for parameter in parameters:
        if fp32 and parameter.requires_grad and parameter.dtype != torch.float32:
            parameter.data = parameter.data.to(torch.float32)


def _find_mesh(model: nn.Module) -> DeviceMesh:
    """Return the mesh of all ranks, over which the model's own parameters are sharded."""
    meshes = [p.device_mesh for p in model.parameters() if isinstance(p, DTensor)]
    return max(meshes, key=lambda mesh: mesh.size())
