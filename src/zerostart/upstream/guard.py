"""Check the parts of other libraries that zerostart depends on; see ``docs/generated/upstream.md``."""

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

#: Function of another library, or its replacement with the same parameters.
Function: TypeAlias = Callable[..., Any]

_ENTRY = re.compile(r"(\.?)([\w.:]+)(?:\(([^)]*)\))?")
_BY_NAME = {library.name: library for library in LIBRARIES}


@dataclass(frozen=True)
class Use:
    """Names of a module or class (``module:Class``) that zerostart replaces, calls or reads.

    Each entry of ``names`` requires one thing:

    - ``name``: the owner has this attribute;
    - ``name(a, b, *, c)``: this function takes ``a`` and ``b`` first, and ``c`` at any place;
    - ``.name``: a method of the class uses this attribute;
    - ``module:name``: another module or class has this attribute.

    ``source`` lists ``method: code``: the source of the method must contain the code.
    """

    owner: str
    names: str
    why: str
    source: tuple[str, ...] = ()

    @property
    def library(self) -> Library:
        """Library of the owner."""
        return _BY_NAME[re.split("[.:]", self.owner)[0]]

    @property
    def functions(self) -> list[str]:
        """Names that are attributes of the owner itself."""
        return [name for dot, name, _ in _ENTRY.findall(self.names) if not dot and ":" not in name]

    def find_misfit(self) -> str:
        """Import the library and describe its first missing part; empty if none."""
        try:
            owner = resolve(self.owner)
            errors = [_check(self.owner, owner, *entry.groups()) for entry in _ENTRY.finditer(self.names)]
            errors += [_check_source(self.owner, owner, line) for line in self.source]
        except (ImportError, AttributeError):
            return f"{_dotted(self.owner)} is missing"
        return next(filter(None, errors), "")


def _check(place: str, owner: object, dot: str, name: str, parameters: str | None) -> str:
    if dot:
        is_used = hasattr(owner, name) or any(name in code.co_names for code in _method_codes(owner))
        return "" if is_used else f"{_dotted(place)} misses {name}"
    if ":" in name:
        place, _, name = name.rpartition(":") if "." not in name.rpartition(":")[2] else name.rpartition(".")
        owner = resolve(place)
    function = getattr(owner, name, None)
    if not hasattr(owner, name):
        return f"{_dotted(place)} misses {name}"
    if parameters is None:
        return ""
    actual = [n for n in inspect.signature(_unwrap(function)).parameters if n not in ("self", "cls")]
    first, _, anywhere = parameters.partition("*")
    leading = _names(first)
    if actual[: len(leading)] != leading:
        return (
            f"{_dotted(place)}.{name} has changed: it takes ({', '.join(actual)}), "
            f"not ({', '.join(leading)}, ...)"
        )
    absent = [n for n in _names(anywhere) if n not in actual]
    return f"{_dotted(place)}.{name} has changed: it takes no {', '.join(absent)}" if absent else ""


def _check_source(place: str, owner: object, line: str) -> str:
    method, _, code = line.partition(": ")
    try:
        source = inspect.getsource(_unwrap(getattr(owner, method)))
    except (OSError, TypeError):
        return f"the source of {_dotted(place)}.{method} cannot be read"
    is_present = "".join(code.split()) in "".join(source.split())
    return "" if is_present else f"{_dotted(place)}.{method} has changed: `{code}` is missing"


def _names(parameters: str) -> list[str]:
    return [name.strip() for name in parameters.split(",") if name.strip()]


def _dotted(path: str) -> str:
    return path.replace(":", ".")


def resolve(path: str) -> Any:
    """Import ``module`` or ``module:name.name``; raises ImportError or AttributeError."""
    module, _, names = path.partition(":")
    return functools.reduce(getattr, names.split(".") if names else (), importlib.import_module(module))


def _unwrap(function: Any) -> Any:
    function = inspect.unwrap(getattr(function, "__func__", function))
    code = getattr(function, "__code__", None)
    # DeepSpeed's decorators, such as `instrument_w_nvtx`, keep the function only in their closure.
    if code is not None and code.co_freevars == ("func",):
        return _unwrap(function.__closure__[0].cell_contents)
    return function


@functools.lru_cache(maxsize=32)
def _method_codes(kind: Any) -> tuple[CodeType, ...]:
    methods = (_unwrap(value) for base in kind.__mro__ for value in vars(base).values() if callable(value))
    return tuple(method.__code__ for method in methods if hasattr(method, "__code__"))


def find_misfits(uses: Iterable[Use]) -> str:
    """Describe missing parts of the installed libraries; empty if none.

    Warns if a library is newer than the versions that zerostart was tested with.
    """
    uses = tuple(uses)
    libraries = tuple(dict.fromkeys(use.library for use in uses))
    for library in libraries:
        importlib.import_module(library.name)
    errors = [f"{library.name} {library.running()} is installed" for library in libraries if library.is_old()]
    errors += [f"{text} ({use.why})" for use in uses if (text := use.find_misfit())]
    if not errors:
        _warn_of_newer_releases()
        return ""
    requirements = " ".join(f"'{library.name}{library.specifier}'" for library in libraries)
    running = " and ".join(f"{library.name} {library.running()}" for library in libraries)
    return f"{'; '.join(errors)}. This is {running}; install a known version: pip install {requirements}"


def demand(uses: Iterable[Use], remedy: str = "") -> None:
    """Raise UnsupportedVersionError, with the ``remedy``, if a part is missing."""
    errors = find_misfits(uses)
    if errors:
        raise UnsupportedVersionError(f"{errors}. {remedy}" if remedy else errors)


@functools.cache
def need(*uses: Use) -> None:
    """Call ``demand`` and remember its success for this process."""
    demand(uses)


#: Names of the newer libraries that were already reported in a warning.
_reported: set[str] = set()


def _warn_of_newer_releases() -> None:
    imported = [library for library in LIBRARIES if library.name in sys.modules]
    newer = [library for library in imported if library.name not in _reported and library.is_new()]
    _reported.update(library.name for library in newer)
    if newer and is_first_rank():
        logger.warning(
            "newer than the versions that zerostart was tested with: %s. The parts checked so far are "
            "compatible; run `zerostart env --check` to check all parts",
            ", ".join(f"{each.name} {each.running()} (known: {each.specifier})" for each in newer),
        )


def is_first_rank() -> bool:
    """Return True if this process is rank 0 or the only one."""
    dist: ModuleType | None = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        return bool(dist.get_rank() == 0)
    return os.environ.get("RANK", "0") == "0"


def is_of_class(model: object, path: str) -> bool:
    """Return True for an instance of ``module:Class``, without importing the module.

    ``model`` may also be a class. Subclasses match too.
    """
    # Compare all base classes: FSDP2 and PEFT add subclasses.
    kind = model if isinstance(model, type) else type(model)
    return any(f"{base.__module__}:{base.__name__}" == path for base in kind.__mro__)


def declared_uses() -> Iterator[Use]:
    """Import all modules of ``zerostart.upstream`` and yield their uses, by library."""
    import zerostart.upstream

    uses: dict[Use, None] = {}
    for file in pkgutil.walk_packages(zerostart.upstream.__path__, "zerostart.upstream."):
        for value in vars(importlib.import_module(file.name)).values():
            values = value if isinstance(value, tuple) else (value,)
            uses |= {use: None for use in values if isinstance(use, Use)}
    yield from sorted(uses, key=lambda use: LIBRARIES.index(use.library))
