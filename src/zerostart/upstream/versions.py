"""Known versions of the libraries whose private parts zerostart uses."""

from __future__ import annotations

import functools
import importlib.metadata
import sys
from dataclasses import dataclass

from packaging.version import InvalidVersion, Version


@dataclass(frozen=True)
class Library:
    """A package, its first known version, and the first unknown one."""

    name: str
    first: tuple[int, ...]
    before: tuple[int, ...]
    #: The extra of zerostart that installs it, if zerostart does not require it.
    extra: str | None = None

    @property
    def specifier(self) -> str:
        """Known versions as a requirement."""
        first, before = (".".join(map(str, version)) for version in (self.first, self.before))
        return f">={first},<{before}"

    def installed(self) -> str | None:
        """Return the version in the package's metadata, or None; imports nothing."""
        try:
            return importlib.metadata.version(self.name)
        except importlib.metadata.PackageNotFoundError:
            return None

    def running(self) -> str | None:
        """Return the version of the imported module, or the installed one; imports nothing."""
        # A library that is being imported may not have set its version yet.
        return getattr(sys.modules.get(self.name), "__version__", None) or _installed(self)

    def knows(self, version: str) -> bool:
        """Return True if ``version``, or the release that it precedes, is known."""
        return self.first <= Version(version).release < self.before

    def is_old(self) -> bool:
        """Return True if the running version is older than the first known one."""
        release = _release(self.running())
        return release is not None and release < self.first

    def is_new(self) -> bool:
        """Return True if the running version is newer than the last known one."""
        release = _release(self.running())
        return release is not None and release >= self.before


@functools.cache
def _release(version: str | None) -> tuple[int, ...] | None:
    try:
        return None if version is None else Version(version).release
    except InvalidVersion:
        return None


@functools.cache
def _installed(library: Library) -> str | None:
    return library.installed()


TORCH = Library("torch", (2, 11), (2, 16))
TRANSFORMERS = Library("transformers", (5, 17), (5, 25))
ACCELERATE = Library("accelerate", (1, 12), (1, 16))
DEEPSPEED = Library("deepspeed", (0, 19, 8), (0, 20), extra="deepspeed")
DIFFUSERS = Library("diffusers", (0, 42), (0, 43), extra="diffusers")
DIFFSYNTH = Library("diffsynth", (2, 1, 12), (2, 2), extra="diffsynth")
PEFT = Library("peft", (0, 19), (0, 22), extra="peft")
VLLM = Library("vllm", (0, 32), (0, 33), extra="vllm")
TRL = Library("trl", (1, 16), (1, 17), extra="trl")
SGLANG = Library("sglang", (0, 5, 23), (0, 5, 24), extra="sglang")

LIBRARIES = (TORCH, TRANSFORMERS, ACCELERATE, DEEPSPEED, DIFFUSERS, DIFFSYNTH, PEFT, VLLM, TRL, SGLANG)
