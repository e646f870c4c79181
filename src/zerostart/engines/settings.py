"""The one place where an ``engine_config`` is read: as the settings of its engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zerostart.engines.deepspeed.settings import ZeroSettings
    from zerostart.engines.fsdp2.settings import FSDP2Settings

__all__ = ["settings_of"]


def settings_of(engine: str, config: Mapping[str, Any] | None) -> ZeroSettings | FSDP2Settings:
    """The checked settings; raises ConfigError or EngineError for what no load can serve."""
    if engine == "deepspeed":
        from zerostart.engines.deepspeed.settings import ZeroSettings

        return ZeroSettings.of(config)
    from zerostart.engines.fsdp2.settings import FSDP2Settings

    return FSDP2Settings.of(config)
