"""Values of a DeepSpeed configuration, checked as they are read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zerostart.errors import ConfigError

#: Where parameters and states can be put.
DEVICES = ("none", "cpu", "nvme")


def section_of(config: Mapping[str, Any], key: str, where: str = "engine_config") -> Mapping[str, Any]:
    """A section of ``config``, {} where there is none; raises ConfigError for anything but a section."""
    section = config.get(key)
    if section is None:
        return {}
    if not isinstance(section, Mapping):
        raise ConfigError(f"{where}[{key!r}] is not a dict")
    return section


def number(section: Mapping[str, Any], key: str, default: int) -> int:
    """A whole number that is not negative; "auto" and None are the default. Raises ConfigError for others."""
    value = section.get(key, default)
    if value in ("auto", None):
        return default
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value < 0 or value != int(value):
        raise ConfigError(f"engine_config has {key}={value!r}, which is not a whole number")
    return int(value)


def device_of(section: Mapping[str, Any], key: str, outdated: object) -> str:
    """One of ``DEVICES``, that an offload section names; ``outdated`` is what stood in its place before it.

    Raises ConfigError for another device.
    """
    if not section:
        return "cpu" if outdated is True else "none"
    device = str(getattr(section.get("device"), "value", section.get("device")) or "none")
    if device not in DEVICES:
        raise ConfigError(f"{key} to {device!r} is unknown; choose one of {', '.join(DEVICES)}")
    return device
