"""Whether a library is as a file of this room knows it: its version, and the parts that are used of it."""

from __future__ import annotations

from collections.abc import Iterable
from types import ModuleType

from packaging.version import Version

from zerostart.errors import UnsupportedVersionError

__all__ = ["Known", "demand", "misfit"]

#: First known and first unknown version.
Known = tuple[tuple[int, ...], tuple[int, ...]]


def misfit(library: ModuleType, known: Known, parts: Iterable[tuple[object, Iterable[str]]]) -> str:
    """What is wrong with ``library``, in words; empty if nothing is.

    ``parts`` are modules or classes, and names that each must have.
    """
    absent = [
        f"{getattr(owner, '__name__', owner)}.{name}"
        for owner, names in parts
        for name in names
        if not hasattr(owner, name)
    ]
    # Not compared as versions: a pre-release of a known version is known.
    if known[0] <= Version(library.__version__).release < known[1] and not absent:
        return ""
    low, high = (".".join(map(str, version)) for version in known)
    return (
        f"{library.__name__} {library.__version__} is installed; zerostart knows versions from {low} to "
        f"before {high}" + (f", and misses {', '.join(absent)}" if absent else "")
    )


def demand(library: ModuleType, known: Known, parts: Iterable[tuple[object, Iterable[str]]]) -> None:
    """Raise UnsupportedVersionError unless ``library`` is known and has ``parts``."""
    wrong = misfit(library, known, parts)
    if wrong:
        raise UnsupportedVersionError(wrong)
