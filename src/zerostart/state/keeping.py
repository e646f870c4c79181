"""Leaving the weights of a live model in memory that outlives its processes: what all ranks do together.

The file is the one that a save of the model would write; each machine has the bytes that its ranks have.
So a load reads it as a checkpoint, on any number of ranks (``checkpoint/storage/by_peers.py``).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import secrets
import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from rich.filesize import decimal
from torch import nn

from zerostart.checkpoint.channel import PEERS, Address
from zerostart.checkpoint.digest import Digests
from zerostart.checkpoint.kept.folder import (
    DOCUMENT,
    FORMAT,
    LEASE,
    SHARED,
    SPANS,
    TERMS,
    WEIGHTS,
    begun,
    check_budget,
    claim,
    folder_of,
    is_owned,
    memory_name,
    remove,
    supersede,
    terms_of,
    versions,
    write_json,
)
from zerostart.checkpoint.kept.keeper import start
from zerostart.checkpoint.kept.spans import Spans
from zerostart.checkpoint.strict_json import JsonObject
from zerostart.checkpoint.write.shards import SaveLayout, parse_size
from zerostart.checkpoint.write.space import check_space
from zerostart.distributed.machine import available_memory
from zerostart.distributed.network import own_address
from zerostart.distributed.world import World, current_world
from zerostart.errors import ConfigError, PeerError, WriteError, ZerostartError
from zerostart.live.model import LiveModel
from zerostart.state.refitting.image import Image
from zerostart.state.saving.adapters import has_adapters
from zerostart.state.saving.save import SaveRequest, contents_to_save, save_settings
from zerostart.state.saving.writing import planned
from zerostart.transfer.planning.runs import Runs
from zerostart.transfer.writing import write_out

#: Bytes of a write, and threads, on one rank.
CHUNK, THREADS = 8 << 20, 2


@dataclass(frozen=True)
class KeepRequest:
    """The arguments of ``zerostart.keep``, which documents them."""

    name: str = "model"
    dtype: torch.dtype | None = None
    budget: int | str | None = None
    expires_after: float = 86400.0
    address: str | None = None
    secret: str | None = None

    def check(self) -> None:
        """Raise ConfigError for what cannot be served."""
        folder_of(self.name)
        if self.budget is not None:
            parse_size(self.budget)
        if not 0 < self.expires_after < math.inf:
            raise ConfigError(
                f"expires_after={self.expires_after} must be a finite number of seconds above 0"
            )
        if self.address is not None and isinstance(Address.of(self.address, PEERS).place, str):
            raise ConfigError(f"address={self.address!r} must be tcp://HOST:PORT; port 0 is any that is free")


@dataclass(frozen=True)
class Kept:
    """A version of a model in memory; the same on every rank but for what says otherwise."""

    name: str
    #: Counts the versions that were kept under the name.
    version: int
    #: What ``zerostart.load`` takes.
    source: str
    #: Where other machines read it, by machine; () where nobody listens.
    addresses: tuple[str, ...]
    #: Bytes of all tensors, and of those in the memory of this rank's machine.
    total_bytes: int
    kept_bytes: int
    seconds: float
    #: By tensor, as ``save`` writes them.
    digests: Mapping[str, str] = field(repr=False)
    _removes: bool = field(repr=False)

    def drop(self) -> None:
        """Remove all versions under the name from the memory of the job's machines; collective.

        Who reads one goes on to do so. What another job keeps under the name since stays. Raises PeerError
        where a rank has died.
        """
        with current_world().phase("dropping a kept model"):
            if self._removes and is_owned(folder := folder_of(self.name)):
                remove(folder)


def keep_model(model: nn.Module, request: KeepRequest) -> Kept:
    """See ``zerostart.keep``, which raises what this raises."""
    return _Keeping(model, request, current_world()).run()


class _Keeping:
    """One call, on one rank."""

    def __init__(self, model: nn.Module, request: KeepRequest, world: World) -> None:
        self._model, self._request, self._world = model, request, world
        self._path: Path | None = None
        #: On the first rank of a memory, once the folder is its own: the terms that were there.
        self._before: JsonObject | None = None

    def run(self) -> Kept:
        world, begin = self._world, time.perf_counter()
        with world.phase("keeping the model"):
            with world.phase("looking at the model"):
                self._look()
            image, plan = self._image, self._plan
            told = world.all_gather_object(
                (memory_name(), plan.nbytes, image.fingerprint), "keeping the model"
            )
            if len({fingerprint for *_, fingerprint in told}) > 1:
                raise ConfigError("the ranks keep models with other tensors: call keep with one model on all")
            memories = [memory for memory, *_ in told]
            #: One rank of each memory does what is done once there.
            self._first = memories.index(memories[world.rank]) == world.rank
            kept_bytes = sum(nbytes for memory, nbytes, _ in told if memory == memories[world.rank])
            kept_bytes += len(image.header)
            token, secret = world.broadcast_object(self._chosen, "keeping the model")
            served = self._address(len(set(memories)))
            folder = folder_of(self._request.name)
            try:
                number = self._room(kept_bytes, secret, world)
                self._write(folder / f"{number:010d}-{token}", number, token)
                # The reduction is also where the ranks meet: after it all bytes are there.
                digests = self._digests.summed(world)
                listening = self._complete(folder, served)
                nodes = [node for node in world.all_gather_object(listening, "keeping") if node is not None]
                with world.phase("making the version whole"), _memory_errors(folder):
                    self._publish(number, digests, nodes)
            except BaseException as error:
                self._discard(folder, error)
                raise
        # Whole everywhere: only now the versions before may go.
        if self._first:
            supersede(folder, number)
        hosts = ",".join(node.removeprefix("tcp://") for node in nodes) if len(nodes) > 1 else ""
        return Kept(
            self._request.name,
            number,
            f"peer://{hosts}/{self._request.name}",
            tuple(node for node in nodes if node),
            image.layout.total_size,
            kept_bytes,
            time.perf_counter() - begin,
            digests,
            self._first,
        )

    def _look(self) -> None:
        request, world = self._request, self._world
        request.check()
        live = LiveModel(self._model, world)
        if has_adapters(live.module):
            raise ConfigError(
                f"this {type(live.module).__name__} has adapters, which are not kept: save them with "
                "zerostart.save(..., adapters_only=True), or keep the model without them"
            )
        contents, _ = contents_to_save(self._model, live, SaveRequest(dtype=request.dtype))
        self._live = live
        self._image = Image.of((name, dtype, tuple(shape)) for name, dtype, shape in contents.entries)
        self._digests = Digests(self._image.entries)
        self._plan, self._storages = planned(self._image.layout, contents.outgoing, CHUNK)

    def _chosen(self) -> tuple[str, str]:
        """What the version is called by on all machines, and the secret; on rank 0."""
        secret = self._request.secret or os.environ.get(PEERS.variable, "")
        before = str(terms_of(folder_of(self._request.name)).get("secret", ""))
        return secrets.token_hex(16), secret or before or secrets.token_hex(32)

    def _address(self, machines: int) -> str:
        if self._request.address is not None:
            return str(Address.of(self._request.address, PEERS))
        return f"tcp://{own_address()}:0" if machines > 1 else ""

    def _room(self, kept_bytes: int, secret: str, world: World) -> int:
        """The number of the version, for which there is room on every machine."""
        request, number = self._request, 0
        folder = folder_of(request.name)
        with world.phase("finding memory for the model"), _memory_errors(folder):
            if self._first:
                claim(folder)
                self._before = terms_of(folder)
                budget = None if request.budget is None else parse_size(request.budget)
                check_budget(folder, kept_bytes, budget)
                check_space(SHARED, kept_bytes, "a model that is to be kept")
                if kept_bytes > (free := available_memory()):
                    raise WriteError(
                        f"a model that is to be kept takes {decimal(kept_bytes)} of memory here, and "
                        f"{decimal(free)} are available"
                    )
                write_json(
                    folder / TERMS,
                    {"format": FORMAT, "expires_at": time.time() + request.expires_after, "secret": secret},
                )
                number = max((version.number for version in versions(folder)), default=0)
        return 1 + max(world.all_gather_object(number, "keeping the model"))

    def _write(self, path: Path, number: int, token: str) -> None:
        world, image = self._world, self._image
        with world.phase("beginning a version in memory"):
            if self._first:
                self._path = begun(path.parent, number, token, image.nbytes, image.header)
        with world.phase("writing into memory"), _memory_errors(path):
            writer = _Writer(path / WEIGHTS, image.layout)
            try:
                write_out(self._plan, self._storages, writer, THREADS, self._digests.add_rows)
            finally:
                writer.close()
            runs = Runs.of_writes(self._plan, image.layout)
            (path / f"{SPANS}-{world.rank}").write_bytes(runs.to_bytes())

    def _complete(self, folder: Path, served: str) -> str | None:
        """What a machine's first rank adds; gives where its guard listens ("": nowhere), None on others."""
        listening = None
        with self._world.phase("completing the version"), _memory_errors(folder):
            if self._first:
                path = self._path
                assert path is not None, "begun before"
                parts = sorted(path.glob(f"{SPANS}-*"))
                rows = [[0, len(self._image.header), 0, 1]]
                found = Runs.of(np.array(rows, np.int64)).union(
                    *(Runs.from_bytes(p.read_bytes()) for p in parts)
                )
                (path / SPANS).write_bytes(Spans(found.spans.ravel().tolist()).to_bytes())
                for part in parts:
                    part.unlink()
                record = self._live.record
                root = record.catalog.root if record is not None else ""
                save_settings(self._live.module, path, root, self._request.dtype)
                listening = start(folder, served).replace("://0.0.0.0:", f"://{own_address()}:")
        return listening

    def _publish(self, number: int, digests: Mapping[str, str], nodes: list[str]) -> None:
        if not self._first:
            return
        path = self._path
        assert path is not None, "begun before"
        found = (file for file in path.rglob("*") if file.is_file())
        files = {file.relative_to(path).as_posix(): file.stat().st_size for file in found}
        for own in (LEASE, SPANS):
            del files[own]
        told = json.dumps([*digests.items()]).encode() + self._image.header
        document = {
            "format": FORMAT,
            "name": self._request.name,
            "number": number,
            "content": hashlib.blake2b(told, digest_size=16).hexdigest(),
            "memory": memory_name(),
            "kept_at": time.time(),
            "nodes": nodes,
            "files": files,
            "digests": dict(digests),
        }
        write_json(path / DOCUMENT, document)

    def _discard(self, folder: Path, error: BaseException) -> None:
        """Remove what was begun, unless it may be whole on all machines by now."""
        if self._before is None:
            return
        path = self._path
        # Agreed on by all ranks: nobody has given up the version before. After a death that is not known.
        agreed = isinstance(error, ZerostartError) and not isinstance(error, PeerError)
        if path is not None and (agreed or not (path / DOCUMENT).exists()):
            shutil.rmtree(path, ignore_errors=True)
        there = {version.path for version in versions(folder)}
        if not there:  # it was the first one, of which nothing is to stay
            remove(folder)
        elif path not in there and terms_of(folder) != self._before:
            # Of the version that stays the end and the secret are what they were.
            with contextlib.suppress(OSError):
                write_json(folder / TERMS, self._before)


@contextlib.contextmanager
def _memory_errors(path: Path) -> Iterator[None]:
    """What the system answers, such as that memory has run out, as a WriteError."""
    try:
        yield
    except ZerostartError:
        raise
    except OSError as error:
        raise WriteError(
            f"{path}: the model cannot be kept: {error.strerror or error}; what was kept before stays"
        ) from error


class _Writer:
    """A rank's elements to their places in the file; see ``transfer.writing.Writer``.

    By ``pwrite``: where memory ends that is an error, and with a mapping it would be the process's end.
    """

    def __init__(self, path: Path, layout: SaveLayout) -> None:
        self._tensors = layout.tensors
        self._handle = os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)

    def lead(self, name: str, offset: int) -> int:
        """Where in a page it begins means nothing here."""
        return 0

    def goes_round(self, nbytes: int) -> bool:
        """There is no page cache to go round."""
        return False

    def write_rows(self, name: str, data: memoryview, offset: int, length: int, step: int, rows: int) -> None:
        """See ``transfer.writing.Writer``."""
        place = self._tensors[name].offset + offset
        if rows == 1 or step == length:
            self._put(data, place)
            return
        for row in range(rows):
            self._put(data[row * step : row * step + length], place + row * step)

    def _put(self, data: memoryview, place: int) -> None:
        while len(data):
            done = os.pwrite(self._handle, data, place)
            data, place = data[done:], place + done

    def close(self) -> None:
        """Close the file."""
        os.close(self._handle)
