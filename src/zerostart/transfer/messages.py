"""Messages of checkpoint bytes between two ranks, and what is in them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from zerostart.checkpoint.storage import Reader, Rows
from zerostart.distributed.world import World
from zerostart.errors import PeerError
from zerostart.transfer.planning import Table


def send_or_receive(call: Callable[..., Any], tensor: torch.Tensor, peer: int, world: World) -> None:
    """One message to or from a peer: ``call`` is ``dist.send`` or ``dist.recv``. Raises PeerError."""
    try:
        call(tensor, peer, group=world.group)
    except (RuntimeError, dist.DistBackendError) as error:
        raise PeerError(
            f"rank {peer} died or stopped answering while rank {world.rank} exchanged the checkpoint's bytes "
            "with it; nothing was loaded: start all ranks again"
        ) from error


def pack(view: memoryview, requests: Table, reader: Reader, begin: int | None = None) -> None:
    """Put the bytes of ``requests``, one after the other, into ``view``.

    With ``begin`` the reader's only source is the part of the file that begins there.
    """
    at = 0
    for file, offset, nbytes, count, stride in requests.tolist():
        place = view[at : at + nbytes]
        if begin is not None:
            file, offset = 0, offset - begin
        if count == 1:
            reader.read(file, offset, [place])
        else:
            width = nbytes // count
            reader.gather(file, offset, Rows(count, width, stride), place, width)
        at += nbytes


def place_rows(data: memoryview, rows: Rows, target: memoryview, step: int) -> memoryview:
    """Put the rows that ``data`` begins with into ``target``, ``step`` bytes apart; the rest of ``data``."""
    nbytes = rows.count * rows.width
    source = torch.frombuffer(data, dtype=torch.uint8)[:nbytes].view(rows.count, rows.width)
    torch.frombuffer(target, dtype=torch.uint8).as_strided((rows.count, rows.width), (step, 1)).copy_(source)
    return data[nbytes:]
