"""Add, merge and read adapters of PEFT or diffusers in a sharded model."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from zerostart.distributed.world import current_world
from zerostart.engines import Shard, engine_families
from zerostart.engines.exchange import shared_experts
from zerostart.errors import ConfigError
from zerostart.integrations.barrier import barrier, library_call
from zerostart.integrations.expert_adapters import adopt_factors
from zerostart.live.full_tensors import gather_tensor
from zerostart.live.model import (
    LiveModel,
    find_loaded_models,
    find_shards,
    find_surrounding_loads,
    get_record,
)
from zerostart.state.editing import master_of, put_elements

#: The loaded model that contains each layer with adapters.
_parts: weakref.WeakKeyDictionary[nn.Module, weakref.ref[nn.Module]] = weakref.WeakKeyDictionary()


def inject_adapter(
    original: Callable[[], object], model: nn.Module, of_values: bool, copied: Sequence[str]
) -> object:
    """Replace PEFT's ``inject_adapter``, and make added parameters equal on every rank.

    ``of_values`` is True if the adapter is known to be computed from weights. ``copied`` is the adapter's
    ``modules_to_save``, suffixes of module names. Raises ConfigError if FSDP2 shards weights that an adapter
    is computed from, or if a copied module has shared experts or FSDP2 units.
    """
    for name, module in model.named_modules() if copied else ():
        if name.endswith(tuple(copied)) and any(
            isinstance(part, FSDPModule) or shared_experts(part) for part in module.modules()
        ):
            raise ConfigError(
                f"modules_to_save would train a copy of {name}, which has shared experts or FSDP2 units; "
                "name a smaller module, or adapt it with target_modules or target_parameters"
            )
    # PEFT can read weights at ZeRO-3, which gathers them, but not FSDP2's DTensors.
    has_units = any(isinstance(module, FSDPModule) for module in model.modules())
    refusal = (
        f"this adapter is computed from weights of {type(model).__name__}, which FSDP2 shards; use "
        "init_lora_weights=True or 'gaussian' without use_dora, or DeepSpeed ZeRO-3"
    )
    if of_values and has_units:
        raise ConfigError(refusal)
    # `model` may be a part of a loaded model, such as a language model or a layer.
    loaded = list(find_loaded_models(model)) or list(find_surrounding_loads(model))
    # Identify parameters by id: PEFT wraps layers, which changes names.
    parts = [(part, {id(p) for p in part.parameters()}) for part in loaded]
    with library_call("adding an adapter") if loaded else contextlib.nullcontext():
        try:
            result = original()
        except RuntimeError as error:
            if has_units and "DTensor" in str(error):  # torch cannot mix DTensors with plain tensors
                raise ConfigError(refusal) from error
            raise
    for part, before in parts:
        factors = {id(p) for p in adopt_factors(part, before)}
        added = [p for p in part.parameters() if id(p) not in before and id(p) not in factors]
        if added:
            get_record(part).engine.synchronize_added(part, added)
            _parts.update(
                (module, weakref.ref(part)) for module in part.modules() if hasattr(module, "merge")
            )
    return result


def add_prompt_encoder(original: Callable[[], object], model: nn.Module) -> object:
    """Replace PEFT's ``_setup_prompt_encoder``, and make added parameters equal on every rank."""
    parts, before = list(find_loaded_models(model)), {id(p) for p in model.parameters()}
    result = original()
    added = [p for p in model.parameters() if id(p) not in before]
    if parts and added:
        get_record(parts[0]).engine.synchronize_added(model, added)
    return result


def merge_adapter(original: Callable[[], object], layer: Any, action: str) -> object:
    """Replace a layer's ``merge`` or ``unmerge``: run it on whole weights.

    Each rank keeps its shards of the result. Collective if the layer is sharded.
    """
    world = current_world()
    for unit in _home(layer).modules():
        if isinstance(unit, FSDPModule):
            unit.reshard()  # a forward may leave gathered copies: changes to these would be lost
    shards = find_shards(layer, world)
    parameters = [layer.get_parameter(name) for name in shards]
    if hasattr(layer, "num_experts") and shared_experts(layer.get_base_layer()) is not None:
        raise ConfigError(
            f"cannot {action} an adapter of experts that ranks share; use "
            "zerostart.save(model, path, merge_adapters=True)"
        )
    if not shards or any(e.is_gathered(p) for e in engine_families() for p in parameters):
        return original()  # GatheredParameters writes the changes back
    return _run_whole(original, layer, shards, action)


def unmerge_adapter(layer: Any) -> None:
    """Unmerge a layer before it is disabled; collective if the layer is sharded.

    PEFT would unmerge in the next forward, when the engine has already gathered the weights.
    """
    if layer.merged and (_home(layer) is not layer):
        layer.unmerge()


def _home(layer: nn.Module) -> nn.Module:
    """Return the loaded model that contains ``layer``, or ``layer`` itself."""
    part = _parts[layer]() if layer in _parts else None
    return layer if part is None else part


def _run_whole(
    original: Callable[[], object], layer: nn.Module, shards: Mapping[str, Shard], action: str
) -> object:
    with current_world().phase(f"{action} of an adapter"):
        # Replace shards by whole weights, run PEFT's arithmetic on every rank, then write the rank's elements
        # into its shards and fp32 masters. Each step is collective.
        originals = {name: layer.get_parameter(name) for name in shards}
        try:
            for name, shard in shards.items():
                _replace(layer, name, nn.Parameter(_whole(shard), requires_grad=False))
            result = original()
            now = {name: layer.get_parameter(name).detach() for name in shards}
        finally:
            # Always restore the engine's parameters: its hooks and optimizer refer to them.
            for name, parameter in originals.items():
                _replace(layer, name, parameter)
        for name, shard in shards.items():
            _write(shard, originals[name], now[name])
    return result


def _whole(shard: Shard) -> torch.Tensor:
    whole = gather_tensor(shard, None)
    assert whole is not None, "every rank asked for it"
    return whole.to(shard.storage.device)


def _replace(layer: nn.Module, name: str, parameter: nn.Parameter) -> None:
    owner, _, leaf = name.rpartition(".")
    layer.get_submodule(owner)._parameters[leaf] = parameter


def _write(shard: Shard, parameter: nn.Parameter, whole: torch.Tensor) -> None:
    """Write this rank's elements of ``whole`` into the shard and its fp32 master."""
    flat = whole.reshape(-1)
    with torch.no_grad(), master_of(parameter) as master:
        for first, length, place in shard.layout.runs():
            put_elements(shard.storage, master, flat[first : first + length], place)


def read_adapter_state(original: Callable[..., Any], model: nn.Module, *args: Any, **kwargs: Any) -> object:
    """Replace ``get_peft_model_state_dict``; return whole tensors on every rank.

    Raises ConfigError if a rank does not call it, or if PEFT computes tensors.
    """
    arguments = dict(zip(("state_dict", "adapter_name"), args, strict=False)) | kwargs
    world = current_world()
    if arguments.get("state_dict") is not None:
        return original(model, *args, **kwargs)
    shards = LiveModel(model, world).sharded
    # PEFT selects and renames tensors. Give it meta tensors, and recognise them in its result by their ids.
    twins: dict[str, torch.Tensor] = {}
    by_twin: dict[int, Shard] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        shard = shards.get(id(tensor))
        if shard is None:
            twins[name] = tensor.detach()
        else:
            twins[name] = torch.empty(shard.layout.shape, dtype=shard.storage.dtype, device="meta")
            by_twin[id(twins[name])] = shard
    chosen = original(model, **{**arguments, "state_dict": twins})
    selected = {name: by_twin[id(twin)] for name, twin in chosen.items() if id(twin) in by_twin}
    if not selected:
        return original(model, *args, **kwargs)
    computed = next((name for name, t in chosen.items() if t.is_meta and name not in selected), None)
    if computed is not None:
        raise ConfigError(
            f"PEFT computes {computed} from tensors that are sharded here; pass it state_dict= with whole "
            "tensors under the names of model.state_dict() (zerostart.full_tensors has them)"
        )
    # A rank that calls this without the others would hang in the first gather.
    barrier(f"get_peft_model_state_dict of a sharded {type(model).__name__}")
    with world.phase("gathering an adapter"):
        return {name: _whole(selected[name]) if name in selected else chosen[name] for name in chosen}


@contextlib.contextmanager
def show_whole_shapes(transformer: nn.Module, lora: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Let sharded weights of ``transformer`` show their whole shapes inside the block.

    They have no values there. Raises ConfigError if ``lora`` would change them.
    """
    shards = find_shards(transformer, current_world())
    if not shards:
        yield
        return
    _check_lora(transformer, shards, lora)
    hidden = {name: transformer.get_parameter(name) for name in shards}
    empty = {name: p.data for name, p in hidden.items() if p.numel() == 0}
    for name, data in empty.items():
        # ZeRO-3's parameters are empty between uses: show one element with strides of 0.
        hidden[name].data = data.new_zeros(1).expand(shards[name].layout.shape)
    try:
        yield
    finally:
        for name, data in empty.items():
            hidden[name].data = data


def _check_lora(model: nn.Module, shards: Mapping[str, Shard], lora: Mapping[str, torch.Tensor]) -> None:
    for name, tensor in lora.items():
        own = name.partition(".")[2]
        stem = own.removesuffix(".lora_A.weight")
        if "lora" not in own:
            raise ConfigError(_refusal(model, f"sets {own}"))
        if stem == own:
            continue
        shard = shards.get(f"{stem}.weight") or shards.get(f"{stem}.base_layer.weight")
        # For a LoRA with more inputs, such as control images, diffusers replaces the weight by a wider one.
        if shard is not None and tensor.shape[1] > shard.layout.shape[1]:
            more = f"has {tensor.shape[1]} inputs for {stem}, which has {shard.layout.shape[1]}"
            raise ConfigError(_refusal(model, more))


def _refusal(model: nn.Module, change: str) -> str:
    return (
        f"this LoRA {change}; it is not loaded, since weights of {type(model).__name__} are sharded and "
        "cannot be replaced. Load the pipeline whole (placement='replicate'), or a LoRA that only adds layers"
    )
