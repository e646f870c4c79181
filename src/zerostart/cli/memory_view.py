"""Print a forecast in the terminal: tables of ranks, and whether it fits."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.filesize import decimal
from rich.table import Table

from zerostart.checkpoint.paths import shown_url
from zerostart.cli.terminal import duration, say

if TYPE_CHECKING:
    from zerostart.loading.forecast import Fit, RankForecast, WorldPlan

#: Kinds of ranks in a table.
MAX_KINDS = 12


def show_plan(plan: WorldPlan, source: str, console: Console | None = None) -> None:
    """Print the plan for a person."""
    from zerostart.engines import title_of

    console = console or Console()
    say(
        console,
        f"{shown_url(source)}: {decimal(plan.checkpoint_bytes)}, {plan.parameters:,} elements, "
        f"largest tensor {decimal(plan.largest_tensor_bytes)}; planned in {plan.planning_seconds:.2f} s",
    )
    world = "1 rank" if plan.world_size == 1 else f"{plan.world_size:,} ranks"
    engine = f"{title_of(plan.engine, plan.zero_stage)} ({plan.engine_reason})"
    say(console, f"{engine}, {world}, {plan.optimizer}")
    classes = sorted(plan.classes, key=lambda pair: -_peak_bytes(pair[0]))
    for table in _make_tables(plan, classes[:MAX_KINDS]):
        console.print(table)
    if len(classes) > MAX_KINDS:
        say(console, f"... and {len(classes) - MAX_KINDS} more kinds of ranks, each of which holds less")
    for line in _describe_plan(plan):
        say(console, line)


def _make_tables(
    plan: WorldPlan, classes: Sequence[tuple[RankForecast, Sequence[RankForecast]]]
) -> tuple[Table, Table]:
    from zerostart.loading.forecast.result import PHASE_TITLES, number_ranges

    reading = _make_table("reading", "ranks", "reads", "operations", "time")
    holding = _make_table(
        "memory, highest in each phase, without activations", "ranks", "memory", *PHASE_TITLES.values()
    )
    for shown, alike in classes:
        name = number_ranges(rank.rank for rank in alike)
        reading.add_row(name, decimal(shown.read_bytes), f"{shown.read_ops:,}", duration(shown.read_seconds))
        for kind in ("device", "host") if plan.accelerator else ("host",):
            sizes = [decimal(getattr(m, f"{kind}_bytes")) for m in shown.memory.values()]
            holding.add_row(name, kind, *sizes)
            name = ""
    return reading, holding


def _make_table(title: str, first: str, *headings: str) -> Table:
    """Build a table that breaks only its first column where the terminal is narrow."""
    table = Table(title=title, title_justify="left")
    table.add_column(first)
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "memory" else "right", no_wrap=True)
    return table


def _peak_bytes(rank: RankForecast) -> int:
    return max((m.host_bytes + m.device_bytes for m in rank.memory.values()), default=0)


def _describe_plan(plan: WorldPlan) -> Iterable[str]:
    if not plan.accelerator:
        yield "(the device is the CPU: its memory is host memory)"
    yield from map(_describe_fit, plan.fits)
    rates = ", ".join(f"{name} {decimal(int(rate))}/s" for name, rate in plan.rates.items() if rate)
    if rates:
        yield f"Times at {rates}; storage is what one machine gets"
    if plan.exchanged_bytes:
        yield f"All ranks together get {decimal(sum(plan.exchanged_bytes))} from others"
    if plan.tier is not None:
        yield f"Whole parameters on every rank, {plan.tier}"
    for kind in ("missing", "unexpected", "computed_whole"):
        if names := getattr(plan, kind):
            more = ", ..." if len(names) > 5 else ""
            yield f"{kind.replace('_', ' ')} ({len(names)}): {', '.join(names[:5])}{more}"


def _describe_fit(fit: Fit) -> str:
    from zerostart.loading.forecast.result import PHASE_TITLES

    whose = f" of {fit.ranks} ranks" if fit.ranks > 1 else ""
    limit = f"{decimal(fit.limit)}{' that this machine has free' if fit.found else ''}"
    need = f"{fit.where} memory{whose}, {decimal(fit.needed)} ({PHASE_TITLES[fit.phase]})"
    if fit.fits:
        return f"Fits: {need}, is {fit.needed / fit.limit:.0%} of {limit}"
    return f"Does not fit: {need}, exceeds {limit}"
