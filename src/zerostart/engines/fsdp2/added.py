"""Parameters that were added to a model after it was sharded, such as adapters: made shards of the same mesh.

FSDP2 knows the parameters that a module had when it was wrapped. What comes later would be trained on each
rank by itself, without any reduction of gradients, and nobody would notice.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from zerostart.engines.base import EngineConfig
from zerostart.engines.fsdp2.units import check_frozen, scalars_of
from zerostart.engines.training import with_first_values
from zerostart.errors import EngineError
from zerostart.upstream.torch.fsdp2 import whole_tensor

#: Modules that hold parameters for others and are never called, so that nothing would gather them.
_CONTAINERS = (nn.ParameterList, nn.ParameterDict)
_AVERAGED = "_zerostart_averaged"


def shard_added(model: nn.Module, options: EngineConfig, fp32: bool) -> list[str]:
    """Shard the parameters of ``model`` that are no DTensors yet, each module that has some as a unit.

    ``options`` are keyword arguments of ``fully_shard``. With ``fp32`` trainable ones are put in fp32 before,
    as the masters of mixed precision. Returns the names of the modules. Raises EngineError, naming the
    parameter, where a module that is never called holds it, or it has no dimensions and is to be trained.
    """
    check_frozen(model)
    added: list[tuple[str, nn.Module]] = []
    for name, module in model.named_modules():
        # Parameters without dimensions stay whole beside a unit; they are refused elsewhere if they train.
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
    # Over all ranks, as the model's own: their gradients are the mean of all batches.
    mesh = _mesh_of(model)
    for _, module in added:
        hold_masters(module.parameters(recurse=False), fp32)
        # Small, and needed again in the backward: gathered once a step.
        kept = {"reshard_after_forward": False, "ignored_params": scalars_of(module)}
        fully_shard(module, mesh=mesh, **{**options, **kept})
    return [name for name, _ in added]


def shard_around(model: nn.Module, options: EngineConfig, fp32: bool) -> None:
    """Shard what is around the sharded parts of ``model``, which is their root from now on; see above."""
    if not isinstance(model, FSDPModule):
        hold_masters((p for p in model.parameters() if not isinstance(p, DTensor)), fp32)
        fully_shard(model, mesh=_mesh_of(model), ignored_params=scalars_of(model), **options)


def share_added(model: nn.Module, added: Sequence[nn.Parameter], shared: str = "") -> None:
    """Have ``added`` parameters with rank 0's values everywhere, and the mean of all ranks' gradients.

    So they are whole, and right in a loop that does no more than FSDP2 asks for, until they are sharded.
    ``shared`` names the axes over which the model is cut before; then they cannot be trained unless they are
    sharded, as the mean is not of all ranks: a forward that would raises EngineError.
    """
    values = added
    if not shared:
        # Copies of the model's own modules (``modules_to_save``) are of shards that no unit gathers.
        values = with_first_values(lambda: [_whole(p) if isinstance(p, DTensor) else p for p in added])
    whole = dict(zip(map(id, added), values, strict=True))
    modules = dict(model.named_modules())
    for name, module in modules.items():
        own = {leaf: whole[id(p)] for leaf, p in module._parameters.items() if id(p) in whole}
        if own:
            # Past the setter: names and hooks of the module stay.
            module._parameters.update(own)
            paths = ["", *itertools.accumulate(name.split("."), "{}.{}".format)]
            # From the module outwards, up to the first unit, which would gather and reduce what lies in it.
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
    """Has the parameters of a module averaged, until it or a module ``around`` it is a unit of FSDP2's.

    They are looked at in each call: a library may put others in their place (``assign=True``), or train them
    later.
    """

    def __init__(self, around: Iterable[nn.Module], alone: str) -> None:
        self._around = [weakref.ref(one) for one in around]
        self._alone = alone

    def __call__(self, module: nn.Module, args: object) -> None:
        """Be the hook before a forward, which a unit has gathered its parameters for, and reduces them."""
        if any(isinstance(one(), FSDPModule) for one in self._around):
            return
        for parameter in module._parameters.values():
            if parameter is None or isinstance(parameter, DTensor) or hasattr(parameter, _AVERAGED):
                continue
            if parameter.requires_grad and self._alone:
                if torch.is_grad_enabled():
                    raise EngineError(
                        f"{self._alone} was added after the load, and nothing averages its gradients "
                        "over the "
                        "ranks; use tensor_parallel=1, and expert_parallel=1 unless accelerate prepares the "
                        "model, which shards it"
                    )
            elif parameter.requires_grad:
                setattr(parameter, _AVERAGED, True)
                parameter.register_post_accumulate_grad_hook(_average)  # type: ignore[no-untyped-call]


def _average(parameter: torch.Tensor) -> None:
    """Make the gradient the mean of all ranks'; what was accumulated before is that already."""
    if dist.is_initialized() and parameter.grad is not None and not isinstance(parameter, DTensor):
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


def hold_masters(parameters: Iterable[nn.Parameter], fp32: bool) -> None:
    """With ``fp32`` put those of ``parameters`` that are trained in fp32."""
    for parameter in parameters:
        if fp32 and parameter.requires_grad and parameter.dtype != torch.float32:
            parameter.data = parameter.data.to(torch.float32)


def _mesh_of(model: nn.Module) -> DeviceMesh:
    """The mesh of all ranks, over which the model's own parameters are sharded."""
    meshes = [p.device_mesh for p in model.parameters() if isinstance(p, DTensor)]
    return max(meshes, key=lambda mesh: mesh.size())
