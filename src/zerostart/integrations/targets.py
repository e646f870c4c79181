"""Engines that ``zerostart.refit`` tells of its pushes, known by the calls that they have."""

from __future__ import annotations

from zerostart.state.refitting.targets import Driver, register_target


@register_target
def _vllm(target: object) -> Driver | None:
    from zerostart.integrations.vllm.driver import driver_of

    return driver_of(target)
