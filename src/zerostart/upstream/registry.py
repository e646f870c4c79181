"""What zerostart touches of other libraries: every override, and every private part that it uses.

Each file of this room that touches something declares it in a constant ``TOUCHED``, beside the code that does
it: a :class:`PatchPoint` for what is replaced or written, a :class:`Use` for what is read or called. The
declarations are plain calls with constants in them, so that :func:`touched` can list them without running
the files, whose imports take seconds.
"""

from __future__ import annotations

import ast
import functools
import importlib
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from zerostart.errors import UnsupportedVersionError
from zerostart.upstream import versions
from zerostart.upstream.shapes import Shape, assigns, found
from zerostart.upstream.versions import Library

__all__ = [
    "Lasts",
    "Otherwise",
    "PatchPoint",
    "Shape",
    "Touched",
    "Use",
    "demand",
    "misfit",
    "touched",
]


class Lasts(StrEnum):
    """How long something stays touched."""

    CALL = "one call"
    CONSTRUCTION = "one constructor"
    BLOCK = "zerostart.enabled()"
    LOAD = "the load"
    OPTIMIZER = "the optimizer"
    MODEL = "the loaded model"
    SAVE = "a save in the background"


class Otherwise(StrEnum):
    """What becomes of a library that is not as declared."""

    REFUSED = "refused"
    STOCK = "left to the library"


@dataclass(frozen=True, kw_only=True)
class Touched:
    """Something of a module, of a class (``module:Class``), or of the objects of a class."""

    library: Library
    owner: str
    why: str
    #: Functions, methods and other names.
    names: tuple[str, ...] = ()
    #: Attributes that objects of the owner get when they are made: the owner's source assigns them.
    attributes: tuple[str, ...] = ()
    #: What is counted on beyond the names.
    shapes: tuple[Shape, ...] = ()

    def misfit(self) -> str:
        """What of this the installed library has otherwise, in words; empty if nothing. Imports it."""
        try:
            owner = found(self.owner)
        except (ImportError, AttributeError):
            return f"{self.place} is missing"
        absent = [name for name in self.names if not hasattr(owner, name)]
        absent += [n for n in self.attributes if not hasattr(owner, n) and not assigns(owner, n)]
        if absent:
            return f"{self.place} misses {', '.join(absent)}"
        return next(filter(None, (shape.misfit() for shape in self.shapes)), "")

    @property
    def place(self) -> str:
        """The owner as one writes it in code."""
        return self.owner.replace(":", ".")


@dataclass(frozen=True, kw_only=True)
class Use(Touched):
    """Private names that are read or called, and stay as they are."""


@dataclass(frozen=True, kw_only=True)
class PatchPoint(Touched):
    """Names that are replaced, and attributes of objects that are written, and for how long."""

    lasts: Lasts
    otherwise: Otherwise = Otherwise.REFUSED
    #: Attributes that the owner's code finds on objects as it would have left them itself.
    writes: tuple[str, ...] = ()


def misfit(points: Iterable[Touched]) -> str:
    """What is wrong with the installed libraries, for ``points``, in words; empty if nothing is."""
    wrong: list[str] = []
    told: list[str] = []
    for library in {point.library: None for point in points}:
        # A library that is being imported may not have come to its version yet.
        version = getattr(importlib.import_module(library.name), "__version__", None) or library.installed()
        if version is None or not library.knows(version):
            wrong.append(f"{library.name} {version} is installed; zerostart knows versions {library.range}")
        told.append(f"{library.name} {version}")
    otherwise = [text for point in points if (text := point.misfit())]
    if otherwise and not wrong:
        wrong = [f"{' and '.join(told)} differs from what zerostart knows"]
    return "; ".join(wrong + otherwise)


def demand(points: Iterable[Touched], remedy: str = "") -> None:
    """Raise UnsupportedVersionError, with the ``remedy``, unless the installed libraries fit ``points``."""
    wrong = misfit(points)
    if wrong:
        raise UnsupportedVersionError(f"{wrong}. {remedy}" if remedy else wrong)


@functools.cache
def touched() -> dict[str, tuple[Touched, ...]]:
    """Everything that is declared, by the file of this room, without importing anything."""
    return {
        file.stem: declared
        for file in sorted(Path(__file__).parent.glob("*.py"))
        if (declared := _declared(file))
    }


def _declared(file: Path) -> tuple[Touched, ...]:
    """``TOUCHED`` of one file, and the declarations with a name of their own that it lists."""
    kinds = (Lasts, Otherwise, PatchPoint, Shape, Use)
    names: dict[str, Any] = {kind.__name__: kind for kind in kinds}
    names |= {name: value for name, value in vars(versions).items() if isinstance(value, Library)}
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if not isinstance(node, ast.Assign) or not isinstance(node.targets[0], ast.Name):
            continue
        target, value = node.targets[0].id, node.value
        called = ast.unparse(value.func) if isinstance(value, ast.Call) else ""
        text = isinstance(value, ast.Constant) and isinstance(value.value, str)
        if text or target == "TOUCHED" or called in ("PatchPoint", "Use", "Shape"):
            code = compile(ast.Expression(value), str(file), "eval")
            names[target] = eval(code, {"__builtins__": {}}, names)  # our own file, constants only
    declared: tuple[Touched, ...] = names.get("TOUCHED", ())
    return declared
