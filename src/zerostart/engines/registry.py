"""Engines by name: those of zerostart, and those that other packages bring."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from importlib.util import find_spec
from typing import NamedTuple

from zerostart.engines.engine import Engine
from zerostart.errors import ConfigError
from zerostart.geometry.layout import Mesh
from zerostart.upstream.registry import Registry

logger = logging.getLogger("zerostart")

#: Entry points of other packages: a name, and the subclass of ``Engine``.
GROUP = "zerostart.engines"
#: Module and class of each name, imported on demand.
_OWN: Mapping[str, tuple[str, str]] = {
    "deepspeed": ("zerostart.engines.deepspeed.family", "DeepSpeed"),
    "fsdp2": ("zerostart.engines.fsdp2.family", "FSDP2"),
}
_registry = Registry[Engine]("an engine", GROUP, _OWN)


def register_engine(kind: type[Engine]) -> type[Engine]:
    """Register ``kind`` as ``engine=kind.name`` in this process; also a decorator.

    Raises ConfigError for a name that another engine has, zerostart's own, registered or installed.
    """
    return _registry.register(kind)


def engine_names() -> list[str]:
    """The names that ``engine=`` takes."""
    return list(dict.fromkeys((*_OWN, *_registry.names())))


def family_of(name: str) -> type[Engine]:
    """The family of engines of that name.

    Raises ConfigError for one that is not known, and for another package's that cannot be imported.
    """
    if name not in engine_names():
        raise ConfigError(f"engine={name!r} is unknown; choose one of {', '.join(engine_names())}")
    return _registry.find(name)


def engine_families() -> list[type[Engine]]:
    """List the families of all known engines. Raises ConfigError as ``family_of`` does."""
    return [family_of(name) for name in engine_names()]


class EngineChoice(NamedTuple):
    """The ``name`` of an engine, and the ``reason`` for choosing it."""

    name: str
    reason: str


def choose_engine(requested: str | None = None) -> EngineChoice:
    """Choose the engine of a job: the requested one, or one that is available.

    Without a request it is the one that accelerate's launcher has set up, or else zerostart's first engine
    whose library is installed. Raises ConfigError if the launcher has set up another version of it.
    """
    if requested is not None:
        return EngineChoice(requested, "as asked for")
    for name in engine_names():
        if _is_launched(name):
            return EngineChoice(name, "set up by the launcher")
    available = [name for name in _OWN if find_spec(family_of(name).library) is not None]
    first = f"the first installed of {', '.join(available)}"
    reason = "the only engine installed" if len(available) == 1 else first
    return EngineChoice(available[0], reason)


def _is_launched(name: str) -> bool:
    try:
        return family_of(name).is_launched()
    except Exception as error:
        if name in _OWN:
            raise
        logger.debug("engine %s of another package cannot be asked whether it is launched: %s", name, error)
        return False


def check_choice(name: str, zero_stage: int) -> type[Engine]:
    """Return the family of engines with that name. Raises ConfigError for an unknown stage."""
    family = family_of(name)
    if zero_stage not in family.stages:
        stages = ", ".join(map(str, family.stages))
        raise ConfigError(f"zero_stage={zero_stage} is not available on {name} in this version; use {stages}")
    return family


def resolve_engine(
    name: str,
    zero_stage: int,
    config: Mapping[str, object] | None,
    mesh: Mesh,
    exchange: bool | None = None,
) -> Engine:
    """The engine of a job, its settings checked. Raises ConfigError or EngineError."""
    engine = check_choice(name, zero_stage).for_stage(zero_stage, config, mesh, exchange)
    engine.check()
    return engine


def title_of(name: str, zero_stage: int) -> str:
    """The engine of that name at a stage, in words.

    Raises ConfigError for a name or a stage that is not known.
    """
    return check_choice(name, zero_stage).title_of(zero_stage)
