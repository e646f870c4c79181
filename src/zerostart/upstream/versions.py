"""The libraries that zerostart works with below their public surface, and the versions that it knows."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import sys
from dataclasses import dataclass

from packaging.version import InvalidVersion, Version


@dataclass(frozen=True)
class Library:
    """A package, its first known version, and the first that is not known."""

    name: str
    first: tuple[int, ...]
    before: tuple[int, ...]
    #: What a user installs to have it, if zerostart itself does not need it.
    extra: str | None = None

    @property
    def range(self) -> str:
        """The known versions in words."""
        first, before = (".".join(map(str, version)) for version in (self.first, self.before))
        return f"from {first} to before {before}"

    @property
    def specifier(self) -> str:
        """The known versions as a requirement has them."""
        first, before = (".".join(map(str, version)) for version in (self.first, self.before))
        return f">={first},<{before}"

    def installed(self) -> str | None:
        """The installed version by the package's metadata, None if there is none; imports nothing."""
        try:
            return importlib.metadata.version(self.name)
        except importlib.metadata.PackageNotFoundError:
            return None

    def running(self) -> str | None:
        """The version of the module that is imported, or else the installed one; imports nothing."""
        # A library that is being imported may not have come to its version yet.
        return getattr(sys.modules.get(self.name), "__version__", None) or _installed(self)

    def knows(self, version: str) -> bool:
        """Whether ``version`` is a known one; a pre-release of a known version is."""
        return self.first <= Version(version).release < self.before

    def is_old(self) -> bool:
        """Whether what runs is older than the first known version."""
        release = self._release()
        return release is not None and release < self.first

    def is_new(self) -> bool:
        """Whether what runs is newer than the last known version."""
        release = self._release()
        return release is not None and release >= self.before

    def _release(self) -> tuple[int, ...] | None:
        """The numbers of what runs; None where nothing is there, or its version is not a number (a build)."""
        version = self.running()
        return None if version is None else _numbers(version)


@functools.cache
def _numbers(version: str) -> tuple[int, ...] | None:
    with contextlib.suppress(InvalidVersion):
        return Version(version).release
    return None


@functools.cache
def _installed(library: Library) -> str | None:
    """As ``installed``, read once a process: each load asks, and metadata is a file of some kilobytes."""
    return library.installed()


TORCH = Library("torch", (2, 11), (2, 16))
TRANSFORMERS = Library("transformers", (5, 17), (5, 24))
ACCELERATE = Library("accelerate", (1, 12), (1, 16))
DEEPSPEED = Library("deepspeed", (0, 19, 8), (0, 20), extra="deepspeed")
DIFFUSERS = Library("diffusers", (0, 42), (0, 43), extra="diffusers")
DIFFSYNTH = Library("diffsynth", (2, 1, 12), (2, 2), extra="diffsynth")
PEFT = Library("peft", (0, 19), (0, 22), extra="peft")
VLLM = Library("vllm", (0, 32), (0, 33), extra="vllm")
TRL = Library("trl", (1, 16), (1, 17), extra="trl")
SGLANG = Library("sglang", (0, 5, 23), (0, 5, 24), extra="sglang")

LIBRARIES = (TORCH, TRANSFORMERS, ACCELERATE, DEEPSPEED, DIFFUSERS, DIFFSYNTH, PEFT, VLLM, TRL, SGLANG)
