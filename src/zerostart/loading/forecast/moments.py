"""The peak of each phase, among the moments at which memory may be at its highest."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from zerostart.engines.forecast import MemoryPeak, Sizes, Target
from zerostart.loading.forecast.result import PHASES, Memory


def peaks(moments: Iterable[MemoryPeak], ranks: int, target: Target) -> list[dict[str, Memory]]:
    """Of each rank the highest memory of each phase, by component."""
    known = [moment.on(target) for moment in moments]
    of_phase = {phase: [m for m in known if m.phase == phase] for phase in PHASES}
    hosts = {phase: _highest([m.host for m in made], ranks) for phase, made in of_phase.items()}
    devices = {phase: _highest([m.device for m in made], ranks) for phase, made in of_phase.items()}
    # Ranks that hold the same share one object: a big job has few kinds of ranks.
    shared: dict[tuple[int, ...], dict[str, Memory]] = {}
    found = []
    for rank in range(ranks):
        rows = {phase: (hosts[phase][rank], devices[phase][rank]) for phase in PHASES if of_phase[phase]}
        key = tuple(v for host, device in rows.values() for v in (*host.values(), -1, *device.values(), -2))
        found.append(shared.setdefault(key, {phase: Memory(*row) for phase, row in rows.items()}))
    return found


def _highest(sizes: Sequence[Sizes], ranks: int) -> list[dict[str, int]]:
    """Of each rank the components of its highest moment."""
    tables = []
    for one in sizes:
        columns = {n: np.broadcast_to(np.asarray(v, np.int64), ranks).tolist() for n, v in one.items()}
        total = sum((np.asarray(v, np.int64) for v in one.values()), np.zeros(ranks, np.int64))
        tables.append((total.tolist(), columns))
    result: list[dict[str, int]] = []
    for rank in range(ranks):
        best = max(tables, key=lambda table: table[0][rank], default=None)
        columns = {} if best is None else best[1]
        result.append({name: values[rank] for name, values in columns.items() if values[rank]})
    return result
