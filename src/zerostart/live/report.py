"""Measure and describe a load."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from rich.filesize import decimal

from zerostart.engines.residence import Residence
from zerostart.errors import printable


class Clock:
    """Measures seconds by phase; a phase may be entered several times."""

    def __init__(self, *phases: str) -> None:
        self._start = time.perf_counter()
        self.seconds = dict.fromkeys(phases or ("plan", "compile", "build", "read"), 0.0)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time of the body to the phase ``name``."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] += time.perf_counter() - begin

    def stop(self) -> dict[str, float]:
        """Return the seconds of each phase, with the ``total`` since the start."""
        return {**self.seconds, "total": time.perf_counter() - self._start}


@dataclass(frozen=True)
class Report:
    """Seconds, bytes, peak memory and tensor names of a load on one rank.

    Names are state-dict names of the unsharded model. Peaks are bytes above the level before the load,
    including the final shards.
    """

    #: Names that the checkpoint lacks.
    missing: tuple[str, ...] = ()
    #: Names of the checkpoint that the model does not use.
    unexpected: tuple[str, ...] = ()
    #: Names with another shape in the checkpoint.
    mismatched: tuple[str, ...] = ()
    #: Shapes in checkpoint and model of tensors that ``from_pretrained(ignore_mismatched_sizes=True)``
    #: initialised.
    reinitialised: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=dict)
    #: Names of tensors that got their values from the model's initialiser.
    initialised: tuple[str, ...] = ()
    #: Names of tensors that are not taken as they are stored.
    converted: tuple[str, ...] = ()
    #: Missing or unexpected names that the model declares ignorable.
    ignored: tuple[str, ...] = ()
    #: Names in ``initialised`` that every rank had to initialise whole.
    initialised_whole: tuple[str, ...] = ()
    #: Names of tensors that a conversion computed.
    computed: tuple[str, ...] = ()
    #: Names in ``computed`` that needed whole tensors, without a memory limit.
    computed_whole: tuple[str, ...] = ()
    #: Quantisation method of a dequantised checkpoint.
    dequantised: str = ""
    #: Seconds of ``plan, compile, build, read, total``; ``compile`` builds DeepSpeed's operators.
    phases: dict[str, float] = field(default_factory=dict)
    #: Seconds from the start of the process to the load: imports and process groups; 0 if unknown.
    start_seconds: float = 0.0
    #: Seconds from the start of the process to the end of its first optimizer step; 0 before it.
    first_step_seconds: float = 0.0
    #: Bytes that this rank read, for itself and for other ranks.
    read_bytes: int = 0
    #: Bytes that the plan of this rank reads; equal to ``read_bytes``.
    planned_bytes: int = 0
    #: Bytes received from other ranks.
    exchanged_bytes: int = 0
    #: Description of the read strategy.
    reading: str = ""
    #: Peak of anonymous host memory.
    peak_host_bytes: int = 0
    #: Peak of device memory; None if the device's allocator has no statistics.
    peak_device_bytes: int | None = 0
    rank: int = 0
    world_size: int = 1
    engine: str = ""
    #: Reason for the choice of the engine.
    engine_reason: str = ""
    #: Memory of parameters that every rank holds whole; None without such parameters.
    tier: Residence | None = None

    def __str__(self) -> str:
        why = f" ({self.engine_reason})" if self.engine_reason else ""
        lines = [
            f"Loaded on {self.engine}{why}, rank {self.rank} of {self.world_size}, "
            f"in {self.phases['total']:.2f} s, after {self.start_seconds:.1f} s of imports and other work",
            "  phases: " + ", ".join(f"{k} {v:.2f} s" for k, v in self.phases.items() if k != "total"),
            f"  read {decimal(self.read_bytes)}"
            + (f" and got {decimal(self.exchanged_bytes)} from other ranks" if self.exchanged_bytes else "")
            + self._rate()
            + (f" ({self.reading})" if self.reading else ""),
            f"  peak memory: {decimal(self.peak_host_bytes)} on the host" + self._on_the_device(),
        ]
        if self.first_step_seconds:
            ended = f"{self.first_step_seconds:.1f} s after the start of the process"
            lines += [f"  the first optimizer step ended {ended}"]
        lines += [f"  whole parameters {self.tier}"] if self.tier is not None else []
        if self.dequantised:
            lines += [f"  dequantised from {self.dequantised} while the weights were read"]
        kinds = ("missing", "unexpected", "mismatched", "initialised", "converted", "computed", "ignored")
        for kind in kinds:
            lines += _named(kind, getattr(self, kind))
        lines += _named("initialised at full size", self.initialised_whole)
        lines += _named("computed from whole tensors, without a memory limit", self.computed_whole)
        return "\n".join(lines)

    def _on_the_device(self) -> str:
        if self.peak_device_bytes is None:
            return ", unknown on the device"
        return f", {decimal(self.peak_device_bytes)} on the device" if self.peak_device_bytes else ""

    def _rate(self) -> str:
        seconds = self.phases.get("read", 0.0)
        nbytes = self.read_bytes + self.exchanged_bytes
        return f" at {decimal(int(nbytes / seconds))}/s" if seconds > 0 and nbytes else ""


def _named(kind: str, names: tuple[str, ...], shown: int = 5) -> list[str]:
    if not names:
        return []
    more = f", and {len(names) - shown} more" if len(names) > shown else ""
    return [f"  {kind} ({len(names)}): {', '.join(map(printable, names[:shown]))}{more}"]
