"""The folder of a kept model in a machine's shared memory: its owner, its versions, what they take, its end.

/dev/shm/zerostart-kept-UID-NAME/     nobody but its user can enter it
    owner                             locked by the process that keeps, while it lives
    keeper                            locked by the process that guards the folder, while it lives
    terms.json                        when it ends, and the secret for readers on other machines
    keeper.json                       where the guard listens
    0000000007-TOKEN/                 a version: the same token on all machines of a job
        model.safetensors             of full length; of its bytes those alone that ranks here have
        spans                         which those are
        config.json, ...              what ``save`` writes beside weights
        kept.json                     written last: without it the version is not whole
        lease                         locked, shared, by whoever reads it
        superseded                    there once a later version is whole on all machines
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from rich.filesize import decimal

from zerostart.checkpoint.kept.spans import Spans
from zerostart.checkpoint.manifest import is_inside
from zerostart.checkpoint.strict_json import MAX_DOCUMENT_BYTES, JsonObject, read_json
from zerostart.distributed.machine import machine_name
from zerostart.errors import CheckpointError, ConfigError, WriteError, ZerostartError

#: Where memory is shared as files, and outlives processes.
SHARED = Path("/dev/shm")
PREFIX = "zerostart-kept-"
#: Changes with what the files of a folder mean.
FORMAT = 1
WEIGHTS, SPANS, DOCUMENT, LEASE, SUPERSEDED = "model.safetensors", "spans", "kept.json", "lease", "superseded"
TERMS, KEEPER, OWNER, GUARD = "terms.json", "keeper.json", "owner", "keeper"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_VERSION = re.compile(r"(\d{10})-([0-9a-f]{32})")
#: Seconds for which a lock that somebody looks at is waited for.
_MOMENT = 2.0
#: Locks on owners' files by folder: the inode, the open file, and the process that has it.
_owned: dict[Path, tuple[int, int, int]] = {}


def folder_of(name: str) -> Path:
    """The folder of this user's kept model ``name``. Raises ConfigError for what is no name."""
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"name={name!r} is no name of a kept model: letters, digits, '.', '_' and '-', 100 at most"
        )
    return SHARED / f"{PREFIX}{os.geteuid()}-{name}"


def memory_name() -> str:
    """What processes have in common that see the same shared memory: the machine, and what is mounted."""
    try:
        return f"{machine_name()} {SHARED.stat().st_dev}"
    except OSError:
        return machine_name()


def is_own(folder: Path) -> bool:
    """Whether it is a directory of this user's that nobody else can enter, and no link to one."""
    try:
        found = folder.lstat()
    except OSError:
        return False
    return (
        folder.is_dir()
        and not folder.is_symlink()
        and found.st_uid == os.geteuid()
        and not found.st_mode & 0o077
    )


@dataclass(frozen=True)
class Version:
    """A version that is whole on this machine."""

    path: Path
    document: JsonObject

    @property
    def number(self) -> int:
        """Counts the versions of a kept model."""
        return int(self.document["number"])

    @property
    def content(self) -> str:
        """The same for versions of the same tensors with the same bits alone."""
        return str(self.document["content"])

    @cached_property
    def spans(self) -> Spans:
        """The bytes of the weights that are here. Raises CheckpointError, OSError."""
        return Spans.from_bytes((self.path / SPANS).read_bytes())


def versions(folder: Path) -> list[Version]:
    """The whole versions in ``folder``, the newest first."""
    found = []
    for path in _version_folders(folder):
        with contextlib.suppress(ZerostartError, OSError):
            found.append(Version(path, checked(read_json(path / DOCUMENT, "document", MAX_DOCUMENT_BYTES))))
    return sorted(found, key=lambda version: version.number, reverse=True)


def checked(document: JsonObject) -> JsonObject:
    """``document`` if it describes a version; raises CheckpointError for anything else."""
    files, digests, nodes = (document.get(key) for key in ("files", "digests", "nodes"))
    number, content = document.get("number"), document.get("content")
    if (
        document.get("format") != FORMAT
        or not isinstance(number, int)
        or not isinstance(content, str)
        or not isinstance(files, dict)
        or not all(is_inside(name) and type(size) is int and size >= 0 for name, size in files.items())
        or WEIGHTS not in files
        or not isinstance(digests, dict)
        or not all(isinstance(value, str) for value in digests.values())
        or not isinstance(nodes, list)
        or not all(isinstance(address, str) for address in nodes)
    ):
        raise CheckpointError(
            f"a kept model of another form (format {document.get('format')!r:.40}, and this is {FORMAT}): "
            "read it with the zerostart that kept it"
        )
    return document


def terms_of(folder: Path) -> JsonObject:
    """When the kept model ends (``expires_at``), and its ``secret``; {} where it says nothing."""
    with contextlib.suppress(ZerostartError, OSError):
        return read_json(folder / TERMS, "terms", 1 << 20)
    return {}


def write_json(path: Path, document: JsonObject) -> None:
    """Whole or not at all, and readable by this user alone. Raises OSError."""
    part = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
    handle = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(handle, "w") as file:
            json.dump(document, file)
        part.rename(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


# The owner.


def claim(folder: Path) -> None:
    """Make ``folder`` if it is not there, and be its owner as long as this process lives.

    What an owner before has left half written is removed. Raises WriteError where another process owns it,
    or somebody else has the name.
    """
    remove_expired()
    until = time.monotonic() + _MOMENT
    while True:
        try:
            if is_own(folder) and is_over(folder):
                remove(folder)
            folder.mkdir(mode=0o700, exist_ok=True)
            if not is_own(folder):
                raise WriteError(
                    f"{folder} belongs to somebody else, or others can enter it: keep the model under "
                    "another name"
                )
            if is_owned(folder):
                return
            handle = os.open(folder / OWNER, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except FileNotFoundError:  # removed between the two
            continue
        except OSError as error:
            raise WriteError(f"{folder} cannot be made: {error.strerror or error}") from error
        try:
            # Of the process, not of the file: what is forked from it does not keep the lock.
            fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            owner = os.read(handle, 40).decode(errors="replace")
            os.close(handle)
            if time.monotonic() < until:
                time.sleep(0.05)
                continue
            raise WriteError(
                f"{folder}: process {owner or '(unknown)'} of another job keeps a model under this name: "
                "keep this one under another, or end that job"
            ) from None
        os.ftruncate(handle, 0)
        os.pwrite(handle, str(os.getpid()).encode(), 0)
        _owned[folder] = (os.fstat(handle).st_ino, handle, os.getpid())
        if is_owned(folder):
            remove_unfinished(folder)
            return


def is_owned(folder: Path) -> bool:
    """Whether this process owns ``folder``."""
    inode, handle, process = _owned.get(folder, (0, -1, 0))
    if process != os.getpid():
        return False
    with contextlib.suppress(OSError):
        if (folder / OWNER).stat().st_ino == inode:
            return True
    # The folder came to its end, and another one may have its name.
    del _owned[folder]
    os.close(handle)
    return False


def remove_unfinished(folder: Path) -> None:
    """Remove versions that were never whole; for the owner, or where there is none. Raises nothing."""
    for path in _version_folders(folder):
        if not (path / DOCUMENT).exists():
            shutil.rmtree(path, ignore_errors=True)


def without_owner(folder: Path) -> bool:
    """Whether no process owns ``folder``; asked by its guard, which never owns one."""
    try:
        handle = os.open(folder / OWNER, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        remove_unfinished(folder)  # while nobody can begin another one
        return True
    except OSError:
        return False
    finally:
        os.close(handle)


# Versions.


def begun(folder: Path, number: int, token: str, size: int, header: bytes) -> Path:
    """A new version, with a file of weights of ``size`` bytes of which ``header`` alone is there yet.

    Raises WriteError.
    """
    path = folder / f"{number:010d}-{token}"
    try:
        path.mkdir(mode=0o700)
        (path / LEASE).touch(mode=0o600)
        handle = os.open(path / WEIGHTS, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            # With a hole for what other machines have, which takes no memory.
            os.ftruncate(handle, size)
            os.pwrite(handle, header, 0)
        finally:
            os.close(handle)
    except OSError as error:
        raise WriteError(f"{path}: a version cannot be begun there: {error.strerror or error}") from error
    return path


def used_bytes(folder: Path) -> int:
    """Bytes of memory that all versions in ``folder`` take."""
    total = 0
    for path in _version_folders(folder):
        with contextlib.suppress(OSError):
            total += sum(file.stat().st_blocks * 512 for file in path.iterdir())
    return total


def check_budget(folder: Path, nbytes: int, budget: int | None) -> None:
    """Raise WriteError where a further version of ``nbytes`` would take more than ``budget`` bytes."""
    used = used_bytes(folder)
    if budget is not None and used + nbytes > budget:
        raise WriteError(
            f"{folder}: a version takes {decimal(nbytes)} on this machine, beside {decimal(used)} of what is "
            f"kept already, and budget={budget} allows {decimal(budget)}: the version before stays until the "
            "new one is whole; allow more, or drop the kept model first"
        )


def supersede(folder: Path, number: int) -> None:
    """Give up the versions before ``number``, which is whole everywhere; raises nothing."""
    for version in versions(folder):
        if version.number < number:
            with contextlib.suppress(OSError):
                (version.path / SUPERSEDED).touch(mode=0o600)
    remove_superseded(folder)


def remove_superseded(folder: Path) -> None:
    """Remove what was given up and is read by nobody any more; raises nothing."""
    for path in _version_folders(folder):
        if (path / SUPERSEDED).exists() and (handle := _locked(path / LEASE, fcntl.LOCK_EX)) is not None:
            shutil.rmtree(path, ignore_errors=True)
            os.close(handle)


class Lease:
    """Keeps a version of this machine from being removed, until it is closed or forgotten."""

    def __init__(self, path: Path) -> None:
        """Raises FileNotFoundError where the version is gone."""
        handle = _locked(path / LEASE, fcntl.LOCK_SH)
        if handle is None or not (path / DOCUMENT).exists():
            if handle is not None:
                os.close(handle)
            raise FileNotFoundError(f"{path}: this version is gone")
        self._handle: int | None = handle

    def close(self) -> None:
        """Give it up; raises nothing."""
        handle, self._handle = self._handle, None
        if handle is not None:
            with contextlib.suppress(OSError):
                os.close(handle)

    __del__ = close


def _locked(path: Path, kind: int) -> int | None:
    try:
        handle = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return None
    with contextlib.suppress(OSError):
        fcntl.flock(handle, kind | fcntl.LOCK_NB)
        return handle
    os.close(handle)
    return None


def guarded(folder: Path) -> bool:
    """Whether a process guards ``folder``."""
    if not (folder / GUARD).exists():
        return False
    handle = _locked(folder / GUARD, fcntl.LOCK_EX)
    if handle is not None:
        os.close(handle)
    return handle is None


# The end.


def remove(folder: Path) -> None:
    """Remove a kept model from this machine; who reads it goes on to do so. Raises nothing."""
    gone = folder.with_name(f".{folder.name}.{uuid.uuid4().hex[:12]}")
    with contextlib.suppress(OSError):
        folder.rename(gone)  # at once for whoever looks for it
        shutil.rmtree(gone, ignore_errors=True)


def kept_folders() -> Iterator[Path]:
    """The folders of this user's kept models on this machine."""
    with contextlib.suppress(OSError):
        yield from filter(is_own, sorted(SHARED.glob(f"{PREFIX}{os.geteuid()}-*")))


def remove_expired() -> None:
    """Remove this user's kept models whose end has come and whose guard has died; raises nothing."""
    for folder in [*kept_folders()]:
        if is_over(folder) and not guarded(folder):
            remove(folder)
    with contextlib.suppress(OSError):
        # What a process has left that died while it removed.
        for gone in SHARED.glob(f".{PREFIX}{os.geteuid()}-*"):
            if is_own(gone):
                shutil.rmtree(gone, ignore_errors=True)


def is_over(folder: Path) -> bool:
    """Whether a kept model's end has come."""
    expires = terms_of(folder).get("expires_at")
    return isinstance(expires, int | float) and time.time() > expires


def _version_folders(folder: Path) -> list[Path]:
    try:
        return [path for path in folder.iterdir() if _VERSION.fullmatch(path.name)]
    except OSError:
        return []
