"""Gather one whole parameter from its shards, and write its changes back."""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Iterator, Sequence
from difflib import get_close_matches

import torch
import torch.distributed as dist
from torch import nn

from zerostart.distributed.world import World, current_world
from zerostart.engines import Master, Shard, engine_families, plain_name
from zerostart.errors import ConfigError
from zerostart.geometry.layout import Layout, replicated
from zerostart.live.full_tensors import MESSAGE, gather_tensor, to_backend_device
from zerostart.live.model import LiveModel
from zerostart.upstream.torch.tensors import row_major

#: Integers by element size in bytes, to compare bits.
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


@contextlib.contextmanager
def gathered(model: nn.Module, name: str, modifier_rank: int | None) -> Iterator[torch.Tensor]:
    """Gather a parameter as ``zerostart.gathered`` documents it."""
    world = current_world()
    LiveModel(model, world).check_loaded()
    if modifier_rank is not None and not 0 <= modifier_rank < world.size:
        raise ConfigError(f"modifier_rank={modifier_rank} is not one of the {world.size} ranks")
    change = f"changing {name} with modifier_rank={modifier_rank}"
    with world.phase(change):
        # First, because creating it releases gathered copies of parameters.
        live = LiveModel(model, world)
        parameter = _find_parameter(live.module, model, name)
        shard = live.sharded.get(id(parameter))
        if modifier_rank is not None:
            for engine in engine_families():
                engine.check_editable(parameter, name)
            if shard is None and any(e.has_own_values(parameter) for e in engine_families()):
                raise ConfigError(
                    f"{name} belongs to an expert of DeepSpeed's MoE, and other ranks have other experts "
                    "of that name, so it is not one tensor; use deepspeed.utils.safe_set_full_fp32_param"
                )
        whole = _gather(shard, parameter)
        # The block may change the tensor without torch's knowledge, so compare its bytes.
        form, before = _describe_form(whole), _fingerprint(whole)
        yield whole
        now = _describe_form(whole)
        # All ranks gather the same answers, so an error is raised on all or on none.
        answers = world.all_gather_object(
            (now, now == form and _fingerprint(whole) != before), f"{change}: the end"
        )
        if reshaped := [rank for rank, (theirs, _) in enumerate(answers) if theirs != form]:
            raise ConfigError(
                f"{name} is {form}, but came back as {answers[reshaped[0]][0]} on {_name_ranks(reshaped)}; "
                "the shards were not changed. Change the values in place, and keep the shape and dtype"
            )
        changed = [has_changed for _, has_changed in answers]
        offenders = [rank for rank, is_changed in enumerate(changed) if is_changed and rank != modifier_rank]
        if offenders:
            raise ConfigError(
                f"{name} was changed on {_name_ranks(offenders)}, and those changes would be lost; the "
                "shards were not changed. Pass modifier_rank= with the rank whose changes count, and change "
                "the tensor on that rank only"
            )
        if modifier_rank is not None and changed[modifier_rank]:
            with master_of(parameter) as master, _open_memory(shard, parameter) as (layout, storage):
                _write_back(layout, storage, master, whole, world, modifier_rank)


def _find_parameter(model: nn.Module, outer: nn.Module, name: str) -> nn.Parameter:
    """Find a parameter by the name in ``model``, or in its wrapper ``outer``.

    Wrappers may have renamed it: PEFT's adapters wrap layers, and their models add a prefix.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    parameter = parameters.get(name)
    if parameter is None:
        plain = (item for current, item in parameters.items() if plain_name(current) == name)
        parameter = next(plain, None)
    if parameter is None and outer is not model:
        parameter = dict(outer.named_parameters(remove_duplicate=False)).get(name)
    if parameter is None:
        close = get_close_matches(name, parameters, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise ConfigError(f"{type(model).__name__} has no parameter {name}{hint}")
    return parameter


def _gather(shard: Shard | None, parameter: nn.Parameter) -> torch.Tensor:
    """Return the whole parameter on the CPU; collective if it is sharded."""
    if shard is None:
        return parameter.detach().to("cpu", copy=True)
    whole = gather_tensor(shard, None)
    assert whole is not None, "every rank asked for it"
    return whole


@contextlib.contextmanager
def _open_memory(shard: Shard | None, parameter: nn.Parameter) -> Iterator[tuple[Layout, torch.Tensor]]:
    if shard is not None:
        yield shard.layout, shard.storage
    else:
        with row_major(parameter.detach()) as storage:
            yield replicated(tuple(parameter.shape)), storage


def _write_back(
    layout: Layout,
    storage: torch.Tensor,
    master: Master | None,
    whole: torch.Tensor,
    world: World,
    source: int,
) -> None:
    flat = whole.detach().reshape(-1)
    runs = layout.runs()
    with torch.no_grad(), world.collectives("sending the changes"):
        for start in range(0, flat.numel(), MESSAGE):
            part = to_backend_device(flat[start : start + MESSAGE].contiguous())
            if world.size > 1:
                # As bytes, since not every backend supports every dtype.
                dist.broadcast(part.view(torch.uint8), src=source)
            # The message has elements [start, start + numel) of the tensor; copy those of this rank's runs.
            for first, length, place in runs:
                low, high = max(first, start), min(first + length, start + part.numel())
                if low < high:
                    put_elements(storage, master, part[low - start : high - start], place + low - first)


@contextlib.contextmanager
def master_of(parameter: torch.Tensor) -> Iterator[Master | None]:
    """Yield the fp32 master of this rank's share of ``parameter``, or None.

    The master may be changed in place. Every rank that has a share must enter, though it is not collective.
    """
    with contextlib.ExitStack() as stack:
        masters = [stack.enter_context(engine.master_of(parameter)) for engine in engine_families()]
        yield next((master for master in masters if master is not None), None)


def put_elements(storage: torch.Tensor, master: Master | None, new: torch.Tensor, place: int) -> None:
    """Write ``new`` at ``place`` of ``storage``, and changed elements to the master.

    A master has more bits than its parameter, so unchanged elements keep their master.
    """
    current = storage[place : place + new.numel()]
    new = new.to(current.device)
    differs = differing_bits(current, new)
    if not bool(differs.any()):
        return
    with torch.no_grad():
        current.copy_(new)
        if master is None:
            return
        first, values = master
        low, high = max(place, first), min(place + new.numel(), first + values.numel())
        if low < high:
            high_bits = values[low - first : high - first]
            chosen = differs[low - place : high - place].to(values.device)
            update = new[low - place : high - place].to(values.device, values.dtype)
            high_bits.copy_(torch.where(chosen, update, high_bits))


def differing_bits(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return a mask of the elements whose bits differ, of two contiguous 1-D tensors."""
    word = _WORDS.get(a.itemsize, torch.int64)
    return (a.view(word) != b.view(word)).view(a.numel(), -1).any(dim=1)


def _describe_form(tensor: torch.Tensor) -> str:
    place = "" if tensor.device.type == "cpu" else f" on {tensor.device}"
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}{place}"


def _fingerprint(tensor: torch.Tensor) -> int:
    return zlib.crc32(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)


def _name_ranks(ranks: Sequence[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
