"""One whole parameter out of shards, to look at or to change."""

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

#: Integers as wide as an element, in which two elements of one dtype are compared bit for bit.
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


@contextlib.contextmanager
def gathered(model: nn.Module, name: str, modifier_rank: int | None) -> Iterator[torch.Tensor]:
    """See ``zerostart.gathered``; raises ConfigError as it says there."""
    world = current_world()
    LiveModel(model, world).check_loaded()
    if modifier_rank is not None and not 0 <= modifier_rank < world.size:
        raise ConfigError(f"modifier_rank={modifier_rank} is not one of the {world.size} ranks")
    change = f"changing {name} with modifier_rank={modifier_rank}"
    with world.phase(change):
        # Before anything is looked up: this leaves no gathered copy in the place of a parameter.
        live = LiveModel(model, world)
        parameter = _parameter(live.module, model, name)
        shard = live.sharded.get(id(parameter))
        if modifier_rank is not None:
            for engine in engine_families():
                engine.check_editable(parameter, name)
            if shard is None and any(e.has_own_values(parameter) for e in engine_families()):
                raise ConfigError(
                    f"{name} belongs to an expert of DeepSpeed's MoE, and other ranks have other experts "
                    "of that name, so it is not one tensor; use deepspeed.utils.safe_set_full_fp32_param"
                )
        whole = _whole(shard, parameter)
        # The block may change the tensor in any way that torch knows not of; so the bytes are compared before
        # and after.
        form, before = _form(whole), _fingerprint(whole)
        yield whole
        now = _form(whole)
        # All ranks meet here whether they changed something or not, and judge by the same answers: an error
        # is raised on all or on none.
        seen = world.all_gather_object(
            (now, now == form and _fingerprint(whole) != before), f"{change}: the end"
        )
        _check_forms(name, form, [theirs for theirs, _ in seen])
        changed = [was for _, was in seen]
        others = [rank for rank, was in enumerate(changed) if was and rank != modifier_rank]
        if others:
            raise ConfigError(
                f"{name} was changed on {_ranks(others)}, and those changes would be lost; the shards "
                "were not changed. Pass modifier_rank= with the rank whose changes count, and change "
                "the tensor on that rank only"
            )
        if modifier_rank is not None and changed[modifier_rank]:
            with master_of(parameter) as master, _memory(shard, parameter) as (layout, storage):
                _write_back(layout, storage, master, whole, world, modifier_rank)


def _parameter(model: nn.Module, outer: nn.Module, name: str) -> nn.Parameter:
    """The parameter ``name`` of the unsharded ``model``, or of ``outer``, which is wrapped around it.

    Wrappers may have renamed it: PEFT's adapters put layers around others, and their models names before all.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    found = parameters.get(name)
    if found is None:
        found = next((one for given, one in parameters.items() if plain_name(given) == name), None)
    if found is None and outer is not model:
        found = dict(outer.named_parameters(remove_duplicate=False)).get(name)
    if found is None:
        close = get_close_matches(name, parameters, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise ConfigError(f"{type(model).__name__} has no parameter {name}{hint}")
    return found


def _whole(shard: Shard | None, parameter: nn.Parameter) -> torch.Tensor:
    """The whole of ``parameter`` on the CPU; collective where it is sharded."""
    if shard is None:
        return parameter.detach().to("cpu", copy=True)
    whole = gather_tensor(shard, None)
    assert whole is not None, "every rank asked for it"
    return whole


@contextlib.contextmanager
def _memory(shard: Shard | None, parameter: nn.Parameter) -> Iterator[tuple[Layout, torch.Tensor]]:
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
    with torch.no_grad(), world.collectives("sending what was changed"):
        for start in range(0, flat.numel(), MESSAGE):
            part = to_backend_device(flat[start : start + MESSAGE].contiguous())
            if world.size > 1:
                # As bytes: not every backend carries every dtype.
                dist.broadcast(part.view(torch.uint8), src=source)
            # The message has elements [start, start + numel) of the tensor, the run says which of them this
            # rank holds, and where.
            for first, length, place in runs:
                low, high = max(first, start), min(first + length, start + part.numel())
                if low < high:
                    put_elements(storage, master, part[low - start : high - start], place + low - first)


@contextlib.contextmanager
def master_of(parameter: torch.Tensor) -> Iterator[Master | None]:
    """The fp32 master of this rank's share of ``parameter``, to be changed in place; None without one.

    Not collective, but every rank that has a share must come through it.
    """
    with contextlib.ExitStack() as stack:
        masters = [stack.enter_context(engine.master_of(parameter)) for engine in engine_families()]
        yield next((master for master in masters if master is not None), None)


def put_elements(storage: torch.Tensor, master: Master | None, new: torch.Tensor, place: int) -> None:
    """Put ``new`` at ``place`` of ``storage``, and into the master what is not there already.

    A master has more bits than its parameter: where that stays as it is, so does the master.
    """
    held = storage[place : place + new.numel()]
    new = new.to(held.device)
    differs = differing_bits(held, new)
    if not bool(differs.any()):
        return
    with torch.no_grad():
        held.copy_(new)
        if master is None:
            return
        first, values = master
        low, high = max(place, first), min(place + new.numel(), first + values.numel())
        if low < high:
            high_bits = values[low - first : high - first]
            chosen = differs[low - place : high - place].to(values.device)
            given = new[low - place : high - place].to(values.device, values.dtype)
            high_bits.copy_(torch.where(chosen, given, high_bits))


def differing_bits(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Of two contiguous 1-D tensors of one dtype, where their bits differ: signs of zero and NaNs count."""
    word = _WORDS.get(a.itemsize, torch.int64)
    return (a.view(word) != b.view(word)).view(a.numel(), -1).any(dim=1)


def _form(tensor: torch.Tensor) -> str:
    place = "" if tensor.device.type == "cpu" else f" on {tensor.device}"
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}{place}"


def _check_forms(name: str, given: str, forms: Sequence[str]) -> None:
    """Raise ConfigError, alike on every rank, where a tensor came back in another form."""
    others = [rank for rank, form in enumerate(forms) if form != given]
    if others:
        raise ConfigError(
            f"{name} is {given}, but came back as {forms[others[0]]} on {_ranks(others)}; the "
            "shards were not changed. Change the values in place, and keep the shape and dtype"
        )


def _fingerprint(tensor: torch.Tensor) -> int:
    return zlib.crc32(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)


def _ranks(ranks: Sequence[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
