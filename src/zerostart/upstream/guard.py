"""Check the parts of other libraries that zerostart builds on; ``docs/upstream.md`` lists them."""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
import os
import pkgutil
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import CodeType, ModuleType
from typing import Any, TypeAlias

from zerostart.errors import UnsupportedVersionError
from zerostart.upstream.versions import LIBRARIES, Library

logger = logging.getLogger("zerostart")

#: A function of another library, or its replacement: with the same parameters.
Function: TypeAlias = Callable[..., Any]

_ENTRY = re.compile(r"(\.?)([\w.:]+)(?:\(([^)]*)\))?")
_BY_NAME = {library.name: library for library in LIBRARIES}


@dataclass(frozen=True)
class Use:
    """Names of a module or class (``module:Class``) that zerostart replaces, calls or reads.

    ``names`` lists ``name``, which exists; ``name(a, b, *, c)``, which takes ``a, b`` first and ``c``
    anywhere; ``.name``, which methods of the class set on ``self``. A name with a colon has its own owner.
    ``source`` lists ``method: code`` that the source of a method contains.
    """

    owner: str
    names: str
    why: str
    source: tuple[str, ...] = ()

    @property
    def library(self) -> Library:
        """The library that the owner belongs to."""
        return _BY_NAME[re.split("[.:]", self.owner)[0]]

    @property
    def functions(self) -> list[str]:
        """The names that are looked up on the owner itself."""
        return [name for dot, name, _ in _ENTRY.findall(self.names) if not dot and ":" not in name]

    def misfit(self) -> str:
        """Describe what the installed library lacks; empty if it fits. Imports the library."""
        try:
            owner = resolve(self.owner)
            wrong = [_misfit(self.owner, owner, *entry.groups()) for entry in _ENTRY.finditer(self.names)]
            wrong += [_lacking(self.owner, owner, line) for line in self.source]
        except (ImportError, AttributeError):
            return f"{_plain(self.owner)} is missing"
        return next(filter(None, wrong), "")


def _misfit(place: str, owner: object, dot: str, name: str, parameters: str | None) -> str:
    if dot:
        there = hasattr(owner, name) or any(name in code.co_names for code in _method_codes(owner))
        return "" if there else f"{_plain(place)} misses {name}"
    if ":" in name:
        place, _, name = name.rpartition(":") if "." not in name.rpartition(":")[2] else name.rpartition(".")
        owner = resolve(place)
    function = getattr(owner, name, None)
    if not hasattr(owner, name):
        return f"{_plain(place)} misses {name}"
    if parameters is None:
        return ""
    given = [n for n in inspect.signature(_unwrap(function)).parameters if n not in ("self", "cls")]
    first, _, anywhere = parameters.partition("*")
    leading = _names(first)
    if given[: len(leading)] != leading:
        return (
            f"{_plain(place)}.{name} has changed: it takes ({', '.join(given)}), "
            f"not ({', '.join(leading)}, ...)"
        )
    absent = [n for n in _names(anywhere) if n not in given]
    return f"{_plain(place)}.{name} has changed: it takes no {', '.join(absent)}" if absent else ""


def _lacking(place: str, owner: object, line: str) -> str:
    method, _, code = line.partition(": ")
    try:
        source = inspect.getsource(_unwrap(getattr(owner, method)))
    except (OSError, TypeError):
        return f"the source of {_plain(place)}.{method} cannot be read"
    same = "".join(code.split()) in "".join(source.split())
    return "" if same else f"{_plain(place)}.{method} has changed: `{code}` is missing"


def _names(parameters: str) -> list[str]:
    return [name.strip() for name in parameters.split(",") if name.strip()]


def _plain(path: str) -> str:
    return path.replace(":", ".")


def resolve(path: str) -> Any:
    """Return the object ``module`` or ``module:name.name``; raises ImportError or AttributeError."""
    module, _, names = path.partition(":")
    return functools.reduce(getattr, names.split(".") if names else (), importlib.import_module(module))


def _unwrap(function: Any) -> Any:
    function = inspect.unwrap(getattr(function, "__func__", function))
    code = getattr(function, "__code__", None)
    if code is not None and code.co_freevars == ("func",):
        return _unwrap(function.__closure__[0].cell_contents)
    return function


@functools.lru_cache(maxsize=32)
def _method_codes(kind: Any) -> tuple[CodeType, ...]:
    methods = (_unwrap(value) for base in kind.__mro__ for value in vars(base).values() if callable(value))
    return tuple(method.__code__ for method in methods if hasattr(method, "__code__"))


def misfit(uses: Iterable[Use]) -> str:
    """Describe what the installed libraries lack of ``uses``; empty if nothing. Warns of newer releases."""
    uses = tuple(uses)
    libraries = tuple(dict.fromkeys(use.library for use in uses))
    for library in libraries:
        importlib.import_module(library.name)
    wrong = [f"{library.name} {library.running()} is installed" for library in libraries if library.is_old()]
    wrong += [f"{text} ({use.why})" for use in uses if (text := use.misfit())]
    if not wrong:
        _warn_of_newer_releases()
        return ""
    known = " and ".join(f"{library.name} {library.range}" for library in libraries)
    asked = " ".join(f"'{library.name}{library.specifier}'" for library in libraries)
    here = " and ".join(f"{library.name} {library.running()}" for library in libraries)
    return f"{'; '.join(wrong)}. This is {here}; zerostart knows {known}: pip install {asked}"


def demand(uses: Iterable[Use], remedy: str = "") -> None:
    """Raise UnsupportedVersionError, with the ``remedy``, unless the installed libraries fit."""
    wrong = misfit(uses)
    if wrong:
        raise UnsupportedVersionError(f"{wrong}. {remedy}" if remedy else wrong)


@functools.cache
def need(*uses: Use) -> None:
    """Call ``demand`` once in a process as long as the libraries fit."""
    demand(uses)


#: Names of libraries that a warning has named as newer than known.
_named: set[str] = set()


def _warn_of_newer_releases() -> None:
    newer = [library for library in LIBRARIES if library.name not in _named and library.is_new()]
    _named.update(library.name for library in newer)
    if newer and is_first_rank():
        logger.warning(
            "newer than the versions zerostart was tested with: %s. zerostart checks the parts that it "
            "builds "
            "on when they are needed; so far they fit. `zerostart env --check` lists those that do not",
            ", ".join(f"{library.name} {library.running()} (known: {library.range})" for library in newer),
        )


def is_first_rank() -> bool:
    """Return whether this process is rank 0 or the only one."""
    dist: ModuleType | None = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        return bool(dist.get_rank() == 0)
    return os.environ.get("RANK", "0") == "0"


def is_of_class(model: object, path: str) -> bool:
    """Return whether ``model`` is a ``module:Class`` (or a subclass), without importing that module."""
    # By names along the MRO: FSDP2 and PEFT put classes of their own in front.
    kind = model if isinstance(model, type) else type(model)
    return any(f"{base.__module__}:{base.__name__}" == path for base in kind.__mro__)


def declared_uses() -> Iterator[Use]:
    """Import all files of this room and yield what they declare, library by library."""
    import zerostart.upstream

    found: dict[Use, None] = {}
    for file in pkgutil.walk_packages(zerostart.upstream.__path__, "zerostart.upstream."):
        for value in vars(importlib.import_module(file.name)).values():
            several = value if isinstance(value, tuple) else (value,)
            found |= {use: None for use in several if isinstance(use, Use)}
    yield from sorted(found, key=lambda use: LIBRARIES.index(use.library))
