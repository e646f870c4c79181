"""Engines that ``zerostart.refit`` tells of its pushes, known by the calls that they have."""

from __future__ import annotations

from zerostart.state.refitting.targets import Driver, register_target


# Before vLLM, whose server is known by nothing that another has not: this asks an address what it is.
@register_target
def _sglang(target: object) -> Driver | None:
    from zerostart.integrations.sglang.driver import driver_of

    return driver_of(target)


@register_target
def _vllm(target: object) -> Driver | None:
    from zerostart.integrations.vllm.driver import driver_of

    return driver_of(target)
