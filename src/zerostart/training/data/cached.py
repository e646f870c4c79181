"""Read the items of a cache one by one, without encoders.

A cache is a directory with one safetensors file for each item and each text, and an index of them,
``zerostart.json``: the facts that the cache was made from, and the length and SHA-256 of each file.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from safetensors.torch import load

from zerostart.checkpoint.manifest import documents
from zerostart.errors import CheckpointError, CheckpointNotFoundError, ConfigError, ReadError, WriteError

#: Version of the index. Older versions had several items in a file.
VERSION = 3
#: Tensors that may differ in length between the examples of one batch.
_TEXT = frozenset({"prompt_embeds", "prompt_embeds_mask"})
#: Name of the cache in the output directory of a run.
FOLDER = "cache"
#: Seconds to wait for the workers of a killed run, which may hold its lock.
_WORKERS_END_S = 5.0


def text_file(text: str) -> str:
    """Return the file name of a text's embeddings."""
    key = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
    return f"text-{key}.safetensors"


def read_index(directory: Path) -> dict[str, Any] | None:
    """Read the index of a cache; None if the directory has none.

    Raises ConfigError for a directory with a saved model, CheckpointError for another version.
    """
    contents = documents(directory) if directory.is_dir() else []
    caches = [document for document in contents if isinstance(document.get("cache"), dict)]
    if not caches:
        if contents:
            raise ConfigError(
                f"cache.directory {directory} holds a saved model, not a cache; name another directory"
            )
        return None
    if (version := caches[0]["cache"].get("version")) != VERSION:
        raise CheckpointError(
            f"{directory} is a cache of version {version!r}, but this version of zerostart reads version "
            f"{VERSION}: remove {directory}, and the next run makes it again"
        )
    return caches[0]


class CachedItems:
    """The items of an epoch, from the cache in ``directory``.

    An item has tensors on the CPU with the names of diffusers' pipelines: ``latents`` ([C, H, W] of a
    picture, [C, F, H, W] of a video, not packed), ``prompt_embeds`` [L, D], and other inputs of its
    transformer. Several processes may read it at once.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        chosen: Sequence[str] | None = None,
        shares: Sequence[tuple[int, int]] = (),
    ) -> None:
        """Read the index; raises CheckpointNotFoundError if there is none.

        ``chosen`` are the files of the items, by default all, each once; ``shares`` has the number of rows
        and repeats of each data set.
        """
        self.directory = Path(directory)
        document = read_index(self.directory)
        if document is None:
            raise CheckpointNotFoundError(f"no cache in {self.directory}; make it with zerostart cache")
        self._files: dict[str, Any] = document["files"]
        self._shapes: dict[str, dict[str, list[int]]] = document["cache"]["items"]
        self.texts: tuple[str, ...] = tuple(document["cache"]["texts"])
        self._names = list(self._shapes if chosen is None else chosen)
        self.shares = tuple(shares) or ((len(self._names), 1),)

    def __len__(self) -> int:
        return len(self._names)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """Read item ``index``. Raises IndexError, and ReadError that names a damaged file."""
        return self._read(self._names[index])

    def digest(self) -> str:
        """Return a digest of all items, independent of their directory."""
        hashed = hashlib.blake2b(repr(self.shares).encode(), digest_size=16)
        for name in self._names:
            hashed.update(bytes.fromhex(self._files[name]["sha256"]))
        return hashed.hexdigest()

    def shapes(self) -> Sequence[Hashable]:
        """Return a key for each example; equal keys fit in one batch (texts may differ)."""
        return [
            tuple((key, tuple(shape)) for key, shape in self._shapes[name].items() if key not in _TEXT)
            for name in self._names
        ]

    def prompt(self, text: str = "") -> dict[str, torch.Tensor]:
        """Read the embeddings of ``text``.

        Raises ConfigError for a text that was not asked for when the cache was made, and ReadError.
        """
        if text not in self.texts:
            raise ConfigError(
                f"{self.directory} has no embeddings of the text {text!r}; name it in cache.prompts, and run "
                "zerostart cache again: its items stay"
            )
        return self._read(text_file(text))

    def _read(self, name: str) -> dict[str, torch.Tensor]:
        path = self.directory / name
        try:
            data = path.read_bytes()
        except OSError as error:
            raise ReadError(f"{path}: cannot be read: {error.strerror}") from error
        if hashlib.sha256(data).hexdigest() != self._files[name]["sha256"]:
            raise ReadError(
                f"{path} has other contents than were written: the file is damaged; remove it, and "
                "zerostart cache makes it again"
            )
        return dict(sorted(load(data).items()))


def hold_lock(stack: contextlib.ExitStack, path: Path, refusal: str) -> None:
    """Hold the lock ``path`` until ``stack`` or this process ends.

    Raises WriteError if it cannot be made, and with the text ``refusal`` if another process holds it.
    """
    try:
        stack.enter_context(FileLock(path, timeout=_WORKERS_END_S))
    except Timeout as error:
        raise WriteError(refusal) from error
    except OSError as error:
        raise WriteError(f"{path} cannot be made: {error.strerror}") from error
    # Callbacks run in reverse: the file is removed while it is still locked.
    stack.callback(path.unlink, missing_ok=True)
