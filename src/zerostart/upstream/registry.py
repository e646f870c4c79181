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
import logging
import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from types import ModuleType
from typing import Any

from zerostart.errors import UnsupportedVersionError
from zerostart.upstream import versions
from zerostart.upstream.shapes import Shape, assigns, reading, resolve
from zerostart.upstream.versions import LIBRARIES, Library

logger = logging.getLogger("zerostart")


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
            owner = resolve(self.owner)
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
    """What the installed libraries have otherwise, for ``points``, in words; empty if nothing.

    The code's shape decides, not its version: of a release that is newer than known, and fits, a person is
    told once. An older one than the first that is known counts as misfit.
    """
    points = tuple(points)
    libraries = tuple({point.library: None for point in points})  # each once, in order
    for library in libraries:
        importlib.import_module(library.name)
    wrong = [f"{library.name} {library.running()} is installed" for library in libraries if library.is_old()]
    # Too old is said whatever the code looks like; too new is not: the shapes decide.
    with reading():
        wrong += [f"{text} ({point.why})" for point in points if (text := point.misfit())]
    if not wrong:
        _tell_unknown()
        return ""
    known = " and ".join(f"{library.name} {library.range}" for library in libraries)
    asked = " ".join(f"'{library.name}{library.specifier}'" for library in libraries)
    here = " and ".join(f"{library.name} {library.running()}" for library in libraries)
    return f"{'; '.join(wrong)}. This is {here}; zerostart knows {known}: pip install {asked}"


def demand(points: Iterable[Touched], remedy: str = "") -> None:
    """Raise UnsupportedVersionError, with the ``remedy``, unless the installed libraries fit ``points``.

    Ask for no more than the feature at hand needs: what is refused is that one, and nothing else.
    """
    wrong = misfit(points)
    if wrong:
        raise UnsupportedVersionError(f"{wrong}. {remedy}" if remedy else wrong)


@functools.cache
def need(*points: Touched) -> None:
    """``demand``, once in a process as long as they fit."""
    demand(points)


#: Names of libraries of which a person was told that they are newer than known.
_told: set[str] = set()


def _tell_unknown() -> None:
    """Warn once, on rank 0, of all libraries that are newer than known."""
    news = [library for library in LIBRARIES if library.name not in _told and library.is_new()]
    _told.update(library.name for library in news)
    if news and is_first_rank():
        logger.warning(
            "newer than the versions zerostart was tested with: %s. zerostart compares the parts "
            "that it builds on with their code when they are needed; so far they fit. `zerostart "
            "env --check` lists those that do not",
            ", ".join(f"{library.name} {library.running()} (known: {library.range})" for library in news),
        )


def is_first_rank() -> bool:
    """Whether a person is told by this process: it is rank 0, or alone."""
    dist: ModuleType | None = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        return bool(dist.get_rank() == 0)
    return os.environ.get("RANK", "0") == "0"


@functools.cache
def touched() -> dict[str, tuple[Touched, ...]]:
    """Everything that is declared, by module of this room (``torch.fsdp2``), without importing anything."""
    room = Path(__file__).parent
    return {
        ".".join(file.relative_to(room).with_suffix("").parts): declared
        for file in sorted(room.rglob("*.py"))
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
