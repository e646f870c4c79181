"""Adapters that PEFT or diffusers puts into a model in shards: loaded, merged, read out."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from zerostart.distributed.world import current_world
from zerostart.engines import Shard, engine_families
from zerostart.errors import ConfigError
from zerostart.integrations.barrier import barrier
from zerostart.live.full_tensors import gather_tensor
from zerostart.live.model import find_loaded_models, find_shards, find_surrounding_loads, get_record
from zerostart.state.editing import master_of, put_elements
from zerostart.upstream.peft.adapters import AdapterLayer

#: The loaded model that a layer with adapters is in.
_parts: weakref.WeakKeyDictionary[nn.Module, weakref.ref[nn.Module]] = weakref.WeakKeyDictionary()


def injected(original: Callable[[], object], model: nn.Module, of_values: bool) -> object:
    """``inject_adapter`` of PEFT: what it adds is the same on every rank, and trained alike.

    Raises ConfigError for an adapter that begins with values of a weight in FSDP2's shards, as is known
    before (``of_values``), or seen on the way.
    """
    # ZeRO-3 gathers a weight on demand, also for PEFT; FSDP2's are DTensors, of which PEFT takes no values.
    of_units = any(isinstance(module, FSDPModule) for module in model.modules())
    refusal = (
        f"this adapter is made of values of the weights of {type(model).__name__}, which FSDP2 has in "
        "shards; use init_lora_weights=True or 'gaussian' without use_dora, or DeepSpeed ZeRO-3"
    )
    if of_values and of_units:
        raise ConfigError(refusal)
    # A part of a loaded model may be given: the language model of one that sees, or a single layer.
    loaded = list(find_loaded_models(model)) or list(find_surrounding_loads(model))
    # Parameters by their objects, before PEFT adds its own: their names change when it puts layers around
    # others.
    parts = [(part, {id(p) for p in part.parameters()}) for part in loaded]
    try:
        found = original()
    except RuntimeError as error:
        if of_units and "DTensor" in str(error):  # which torch does not mix with a rank's own tensors
            raise ConfigError(refusal) from error
        raise
    for part, before in parts:
        _check_experts(part, before)
        added = [p for p in part.parameters() if id(p) not in before]
        if added:
            get_record(part).engine.synchronize_added(part, added)
            _parts.update(
                (module, weakref.ref(part)) for module in part.modules() if hasattr(module, "merge")
            )
    return found


def _check_experts(part: nn.Module, before: set[int]) -> None:
    """Raise ConfigError for adapters of experts that ranks share: each rank would train its own as all's."""
    cuts = get_record(part).parallelism.experts.cuts
    owners = {name.rpartition(".")[0] + "." for name in cuts}
    for name, parameter in part.named_parameters():
        if id(parameter) not in before and any(name.startswith(owner) for owner in owners):
            raise ConfigError(
                f"{name} is an adapter of experts of {type(part).__name__}, which the ranks share "
                f"(expert_parallel={get_record(part).engine.mesh.expert_parallel}), but an adapter is "
                "the same on every rank; use expert_parallel=1, or leave experts out of "
                "target_parameters"
            )


def surrounded(original: Callable[[], object], model: nn.Module) -> object:
    """``_setup_prompt_encoder`` of PEFT: what stands around a loaded model, as what is put into one."""
    parts, before = list(find_loaded_models(model)), {id(p) for p in model.parameters()}
    found = original()
    added = [p for p in model.parameters() if id(p) not in before]
    if parts and added:
        get_record(parts[0]).engine.synchronize_added(model, added)
    return found


def merged(original: Callable[[], object], layer: AdapterLayer, what: str) -> object:
    """``merge`` and ``unmerge`` of a layer: its parameters are whole for it, and each rank keeps its own.

    Collective where the layer is in shards.
    """
    world = current_world()
    for unit in _home(layer).modules():
        if isinstance(unit, FSDPModule):
            unit.reshard()  # what a forward has left gathered would be changed, and lost
    shards = find_shards(layer, world)
    parameters = [layer.get_parameter(name) for name in shards]
    if not shards or any(e.is_gathered(p) for e in engine_families() for p in parameters):
        return original()  # inside GatheredParameters, whose modifier's values are kept, or nobody's
    return _merged_whole(original, layer, shards, what)


def disabled(layer: AdapterLayer) -> None:
    """Take out what is merged before a layer is switched off: PEFT would in the next forward.

    There the engine has weights on their way to it. Collective where the layer is in shards.
    """
    if layer.merged and (_home(layer) is not layer):
        layer.unmerge()


def _home(layer: nn.Module) -> nn.Module:
    part = _parts[layer]() if layer in _parts else None
    return layer if part is None else part


def _merged_whole(
    original: Callable[[], object], layer: nn.Module, shards: Mapping[str, Shard], what: str
) -> object:
    with current_world().phase(f"{what} of an adapter"):
        # Three steps, each collective: whole weights in the place of shards; PEFT's own arithmetic, the same
        # on every rank; of what came out each rank writes its elements, into the masters too.
        kept = {name: layer.get_parameter(name) for name in shards}
        try:
            for name, shard in shards.items():
                _put(layer, name, nn.Parameter(_whole(shard), requires_grad=False))
            found = original()
            now = {name: layer.get_parameter(name).detach() for name in shards}
        finally:
            # The engine's own parameters come back also after an error: its hooks and its optimizer know
            # these objects.
            for name, parameter in kept.items():
                _put(layer, name, parameter)
        for name, shard in shards.items():
            _write(shard, kept[name], now[name])
    return found


def _whole(shard: Shard) -> torch.Tensor:
    whole = gather_tensor(shard, None)
    assert whole is not None, "every rank asked for it"
    return whole.to(shard.storage.device)


def _put(layer: nn.Module, name: str, parameter: nn.Parameter) -> None:
    owner, _, leaf = name.rpartition(".")
    layer.get_submodule(owner)._parameters[leaf] = parameter


def _write(shard: Shard, parameter: nn.Parameter, whole: torch.Tensor) -> None:
    """Keep of ``whole``, which every rank has alike, this rank's elements."""
    flat = whole.reshape(-1)
    with torch.no_grad(), master_of(parameter) as master:
        for first, length, place in shard.layout.runs():
            put_elements(shard.storage, master, flat[first : first + length], place)


def read(original: Callable[..., Any], model: nn.Module, *args: Any, **kwargs: Any) -> object:
    """``get_peft_model_state_dict``: of a model in shards, whole tensors, on every rank.

    Raises ConfigError where not every rank calls it, and where PEFT computes what it saves.
    """
    given = dict(zip(("state_dict", "adapter_name"), args, strict=False)) | kwargs
    world = current_world()
    if given.get("state_dict") is not None:
        return original(model, *args, **kwargs)
    shards = find_shards(model, world)
    # PEFT chooses and renames. It is given tensors without values, which are told apart by identity after.
    twins: dict[str, torch.Tensor] = {}
    by_twin: dict[int, Shard] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        shard = shards.get(name)
        if shard is None:
            twins[name] = tensor.detach()
        else:
            twins[name] = torch.empty(shard.layout.shape, dtype=shard.storage.dtype, device="meta")
            by_twin[id(twins[name])] = shard
    chosen = original(model, **{**given, "state_dict": twins})
    wanted = {name: by_twin[id(twin)] for name, twin in chosen.items() if id(twin) in by_twin}
    if not wanted:
        return original(model, *args, **kwargs)
    computed = next((name for name, t in chosen.items() if t.is_meta and name not in wanted), None)
    if computed is not None:
        raise ConfigError(
            f"PEFT computes {computed} of an adapter that is in shards here; pass it state_dict= with whole "
            "tensors under the names of model.state_dict() (zerostart.full_tensors has them)"
        )
    # Only here is it known that shards are to be gathered; a rank that called this alone would wait in the
    # first gathering for ever.
    barrier(f"get_peft_model_state_dict of a {type(model).__name__} in shards")
    with world.phase("putting an adapter together"):
        return {name: _whole(wanted[name]) if name in wanted else chosen[name] for name in chosen}


@contextlib.contextmanager
def shown(transformer: nn.Module, given: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Inside, ``transformer`` shows the shapes of its whole weights, without their values.

    Raises ConfigError where what is ``given`` would change these weights, and not stand beside them.
    """
    shards = find_shards(transformer, current_world())
    if not shards:
        yield
        return
    _check_beside(transformer, shards, given)
    hidden = {name: transformer.get_parameter(name) for name in shards}
    empty = {name: p.data for name, p in hidden.items() if p.numel() == 0}
    for name, data in empty.items():
        # One element with strides of 0: the whole shape, and no memory for it. ZeRO-3's parameters are empty
        # between uses.
        hidden[name].data = data.new_zeros(1).expand(shards[name].layout.shape)
    try:
        yield
    finally:
        for name, data in empty.items():
            hidden[name].data = data


def _check_beside(model: nn.Module, shards: Mapping[str, Shard], given: Mapping[str, torch.Tensor]) -> None:
    for name, tensor in given.items():
        own = name.partition(".")[2]
        stem = own.removesuffix(".lora_A.weight")
        if "lora" not in own:
            raise ConfigError(_refusal(model, f"sets {own}"))
        if stem == own:
            continue
        shard = shards.get(f"{stem}.weight") or shards.get(f"{stem}.base_layer.weight")
        # diffusers widens a layer for a LoRA with more inputs (of control pictures), and so makes its weight
        # anew.
        if shard is not None and tensor.shape[1] > shard.layout.shape[1]:
            more = f"has {tensor.shape[1]} inputs for {stem}, which has {shard.layout.shape[1]}"
            raise ConfigError(_refusal(model, more))


def _refusal(model: nn.Module, what: str) -> str:
    return (
        f"this LoRA {what}: it changes weights of {type(model).__name__}, which are in shards, and is not "
        "loaded; load the pipeline whole (placement='replicate'), or a LoRA that stands beside the weights"
    )
