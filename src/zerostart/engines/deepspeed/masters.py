"""What the ZeRO-3 optimizer has to know of parameters: where dtypes mix, and who reads their masters."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Collection, Mapping, Sequence

import torch
from torch import nn

from zerostart.engines.deepspeed.settings import DeepSpeedSettings
from zerostart.errors import EngineError
from zerostart.transfer.buffers import ALIGNMENT
from zerostart.transfer.rearrange import Segment, in_place, rearrange
from zerostart.upstream.deepspeed.zero3.optimizer import Reader, mark, require_stage3
from zerostart.upstream.torch.tensors import storage_users


def mixed_dtypes(parameters: Mapping[str, nn.Parameter]) -> dict[torch.dtype, str]:
    """The dtypes of the trainable parameters, each with the first name that has it."""
    dtypes: dict[torch.dtype, str] = {}
    for name, parameter in parameters.items():
        if parameter.requires_grad:
            dtypes.setdefault(parameter.dtype, name)
    return dtypes


def check_mixture(parameters: Mapping[str, nn.Parameter], settings: DeepSpeedSettings) -> None:
    """Raise EngineError where a setting of DeepSpeed handles trainable parameters of one dtype only."""
    dtypes = mixed_dtypes(parameters)
    if len(dtypes) < 2:
        return
    require_stage3()
    for setting in settings.one_dtype:
        found = ", ".join(f"{name} is {str(d).removeprefix('torch.')}" for d, name in dtypes.items())
        raise EngineError(
            f"DeepSpeed's {setting} needs parameters of one dtype, but this model mixes them: {found}. "
            f"Leave {setting} out of engine_config['zero_optimization'], or use engine='fsdp2'"
        )


def mark_parameters(model: nn.Module, rounded: Collection[str], reader: Reader | None) -> None:
    """Mark all parameters, those named ``rounded`` with what reads their masters."""
    # Nothing but an identity: parameters with the same one lie in the same buffers.
    load = object()
    for name, parameter in model.named_parameters():
        mark(parameter, name, reader if name in rounded else None, arrange, load)


# Bringing the partitions of a load next to each other, in the buffer in which they were made.

logger = logging.getLogger("zerostart")


def arrange(groups: Sequence[Sequence[torch.Tensor]], others: Sequence[torch.Tensor]) -> None:
    """Make the 1-D tensors of ``groups`` lie one after another, groups of one dtype first to last.

    That is done within the storage that most of them share, with a bounded amount of memory beside it; those
    that lie elsewhere are copied into it. ``others`` are the tensors that may lie there as well: they go to
    the end. Does nothing where there is no room, and where a tensor that nobody has named shares the storage.
    """
    wanted = [tensor for group in groups for tensor in group]
    storage = _home(wanted)
    if storage is None:
        return
    here = {id(t): t for t in (*wanted, *others) if _address(t) == storage.data_ptr()}
    targets: dict[int, int] = {}
    end, dtype = 0, None
    for tensor in wanted:
        # Groups of one dtype without a gap, as DeepSpeed wants a sub-group; another dtype begins aligned.
        start = end if tensor.dtype == dtype else end + -end % ALIGNMENT
        targets[id(tensor)] = start
        end, dtype = start + tensor.nbytes, tensor.dtype
    for tensor in here.values():
        if id(tensor) not in targets:
            targets[id(tensor)] = end + -end % ALIGNMENT
            end = targets[id(tensor)] + tensor.nbytes
    segments = [(int(t.storage_offset()) * t.itemsize, targets[id(t)], t.nbytes) for t in here.values()]
    # In bytes: the storage may have several dtypes.
    segments = [segment for segment in segments if segment[2]]
    if end > storage.nbytes() or _overlapping(segments):
        return
    base = torch.empty(0, dtype=torch.uint8, device=storage.device)
    base.set_(storage, 0, (storage.nbytes(),), (1,))
    if not in_place(segments):
        # The tensors, the buffer as a whole, and the handle of the storage.
        if storage_users(storage) > len(here) + 2:
            logger.warning(
                "tensors other than the model's partitions share their memory (views of them): the "
                "partitions are copied instead of being reordered in place; delete such tensors before "
                "deepspeed.initialize"
            )
            return
        rearrange(base, segments)
    for tensor in [*here.values(), *(t for t in wanted if id(t) not in here)]:
        place = targets[id(tensor)]
        new = base[place : place + tensor.nbytes].view(tensor.dtype)
        if id(tensor) not in here:
            # From elsewhere: after the move, when its place is free.
            new.copy_(tensor)
        tensor.data = new


def _home(tensors: Sequence[torch.Tensor]) -> torch.UntypedStorage | None:
    """The storage that holds most of the tensors, by bytes; None where there is nothing to hold."""
    held: dict[int, int] = {}
    storages = {}
    for tensor in tensors:
        storages[_address(tensor)] = tensor
        held[_address(tensor)] = held.get(_address(tensor), 0) + tensor.nbytes
    held.pop(0, None)  # Tensors without data.
    return storages[max(held, key=lambda at: held[at])].untyped_storage() if held else None


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _overlapping(segments: Sequence[Segment]) -> bool:
    ordered = sorted(segments)
    return any(a[0] + a[2] > b[0] for a, b in itertools.pairwise(ordered))
