"""A forecast in the terminal: a table of ranks, memory as stacked bars, and what to do where it is short."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from zerostart.forecast import Fit, RankForecast, WorldPlan

__all__ = ["show_comparison", "show_plan"]

#: Rows that the table shows; a line sums up the rest.
SHOWN = 12
WIDTH = 48
#: Limits up to so many times the highest peak are drawn.
FAR = 4
#: How a component looks, in colour and without.
LOOKS = {
    "parameters": ("█", "blue"),
    "buffers": ("▮", "cyan"),
    "secondary partitions": ("▧", "blue"),
    "staging": ("░", "white"),
    "master weights": ("▓", "magenta"),
    "gradients": ("▒", "green"),
    "optimizer state": ("▚", "yellow"),
    "gathered parameters": ("▤", "cyan"),
    "incoming gradient": ("▥", "green"),
    "buckets": ("▦", "red"),
    "scratch": ("·", "white"),
}
TITLES = {"load": "load", "initialize": "initialize", "step": "first step"}


def show_plan(made: WorldPlan, source: str, console: Console | None = None) -> None:
    """Print the plan for a person."""
    console = console or Console()
    console.print(
        f"{source}: {decimal(made.checkpoint_bytes)}, {made.parameters:,} elements, "
        f"largest tensor {decimal(made.largest_tensor_bytes)}; planned in {made.planning_seconds:.2f} s",
        soft_wrap=True,
    )
    console.print(_table(made))
    classes = made.classes
    if len(classes) > SHOWN:
        console.print(f"... and {len(classes) - SHOWN} more kinds of ranks, each of which holds less")
    if classes:
        _bars(console, made, _largest(made))
    for line in _lines(made):
        console.print(line, soft_wrap=True)


def _table(made: WorldPlan) -> Table:
    from zerostart.engines import titled

    many = "1 rank" if made.world_size == 1 else f"{made.world_size} ranks"
    what = titled(made.engine, made.zero_stage)
    table = Table(title=f"{what}, {many}, {made.optimizer}", title_justify="left")
    kinds = ("device", "host") if made.accelerator else ("host",)
    for heading in ("ranks", "reads", "operations", "time", "memory", *TITLES.values()):
        table.add_column(heading, justify="left" if heading in ("ranks", "memory") else "right")
    ordered = sorted(made.classes, key=lambda pair: -_highest(pair[0]))
    for shown, alike in ordered[:SHOWN]:
        first = [
            _spans([rank.rank for rank in alike]),
            decimal(shown.read_bytes),
            f"{shown.read_ops:,}",
            f"{shown.read_seconds:.2g} s",
        ]
        for kind in kinds:
            sizes = [decimal(getattr(m, f"{kind}_bytes")) for m in shown.memory.values()]
            table.add_row(*(first if kind == kinds[0] else [""] * 4), kind, *sizes)
    return table


def _highest(rank: RankForecast) -> int:
    return max((m.host_bytes + m.device_bytes for m in rank.memory.values()), default=0)


def _largest(made: WorldPlan) -> RankForecast:
    return max(made.ranks, key=_highest)


def _spans(numbers: Sequence[int]) -> str:
    """``0 to 5, 7``: ascending numbers, runs of them by their ends."""
    spans: list[tuple[int, int]] = []
    for number in numbers:
        if spans and spans[-1][1] == number - 1:
            spans[-1] = (spans[-1][0], number)
        else:
            spans.append((number, number))
    words = [str(a) if a == b else f"{a} to {b}" for a, b in spans[:4]]
    return ", ".join(words) + (", ..." if len(spans) > 4 else "")


def _bars(console: Console, made: WorldPlan, rank: RankForecast) -> None:
    """Each kind of memory of ``rank``, phase by phase, against the limit of one rank."""
    limits = {fit.where: fit.limit // fit.ranks for fit in made.fits}
    used: dict[str, None] = {}
    for where in ("device", "host"):
        rows = {phase: getattr(memory, where) for phase, memory in rank.memory.items()}
        if not any(rows.values()):
            continue
        limit = limits.get(where)
        title = f"{where} memory of rank {rank.rank}, highest in each phase, without activations"
        if where == "host" and not made.accelerator:
            title += "; the device is the CPU: its memory is host memory"
        console.print(Text(title, style="bold"), soft_wrap=True)
        highest = max(sum(parts.values()) for parts in rows.values())
        # A limit far off would leave nothing to see of the bars: it is told then, and not drawn.
        near = limit is not None and limit <= FAR * highest
        scale = max(highest, limit or 0) if near else highest
        for phase, parts in rows.items():
            bar = _bar(parts, scale, limit if near else None)
            console.print(
                Text(f"  {TITLES[phase]:<11}") + bar + Text(f" {decimal(sum(parts.values()))}"),
                soft_wrap=True,
            )
            used |= dict.fromkeys(parts)
        if limit is not None and near:
            console.print(f"  {'limit':<11}{' ' * _cells(limit, scale)}^ {decimal(limit)}", soft_wrap=True)
        elif limit is not None:
            console.print(
                f"  {'limit':<11}{decimal(limit)}, {limit / highest:.0f} times that", soft_wrap=True
            )
    legend = Text("  ")
    for name in (name for name in LOOKS if name in used):
        glyph, style = LOOKS[name]
        legend.append(f"{glyph * 2} ", style=style).append(f"{name}  ")
    console.print(legend)


def _cells(nbytes: float, scale: int) -> int:
    return round(WIDTH * nbytes / max(1, scale))


def _bar(parts: Mapping[str, int], scale: int, limit: int | None) -> Text:
    """Components one after another; what is over the limit is in reverse."""
    bar, done = Text(), 0
    edge = WIDTH if limit is None else _cells(limit, scale)
    ordered = sorted(parts.items(), key=lambda item: list(LOOKS).index(item[0]))
    for name, size in ordered:
        begin, done = _cells(done, scale), done + size
        glyph, style = LOOKS[name]
        for cell in range(begin, _cells(done, scale)):
            bar.append(glyph, style=style if cell < edge else f"{style} reverse")
    bar.append(" " * (WIDTH - len(bar)))
    return bar


def _lines(made: WorldPlan) -> Iterable[str]:
    for fit in made.fits:
        yield _verdict(fit)
    for advice in made.advice:
        yield f"To make it fit: {advice}"
    rates = ", ".join(
        f"{name} {decimal(int(rate))}/s" for name, rate in made.rates.items() if rate is not None
    )
    if rates:
        yield f"Times at {rates}; storage is what one machine gets"
    if made.sharing is not None:
        yield f"Reading: {made.sharing}"
    if made.exchanged_bytes:
        yield f"All ranks together get {decimal(sum(made.exchanged_bytes))} from others"
    if made.tier is not None:
        yield f"Whole parameters on every rank, {made.tier}"
    for kind, names in (
        ("missing", made.missing),
        ("unexpected", made.unexpected),
        ("computed from whole tensors", made.computed_whole),
    ):
        if names:
            yield f"{kind} ({len(names)}): {', '.join(names[:5])}{', ...' if len(names) > 5 else ''}"


def _verdict(fit: Fit) -> str:
    whose = f" of {fit.ranks} ranks" if fit.ranks > 1 else ""
    limit = f"{decimal(fit.limit)}{' that this machine has free' if fit.found else ''}"
    phase = TITLES[fit.phase]
    if fit.fits:
        share = f"{fit.needed / fit.limit:.0%}"
        return f"Fits: {fit.where} memory{whose}, {decimal(fit.needed)} ({phase}), is {share} of {limit}"
    return f"Does not fit: {fit.where} memory{whose}, {decimal(fit.needed)} ({phase}), exceeds {limit}"


def show_comparison(
    forecast: Sequence[Mapping[str, Any]],
    measured: Sequence[Mapping[str, Any]],
    console: Console | None = None,
) -> None:
    """Print what was foreseen of the ranks beside what was measured: sums of bytes, worst peaks and times."""
    table = Table(title="forecast and measurement", title_justify="left")
    for heading in ("", "forecast", "measured", "measured / forecast"):
        table.add_column(heading, justify="left" if not heading else "right")
    rows: list[tuple[str, float, float, Any]] = [
        ("read, all ranks", _sum(forecast, "read_bytes"), _sum(measured, "read_bytes"), decimal),
        ("host peak", _most(forecast, "peak_host_bytes"), _most(measured, "peak_host_bytes"), decimal),
        ("device peak", _most(forecast, "peak_device_bytes"), _most(measured, "peak_device_bytes"), decimal),
        (
            "reading, slowest rank",
            _most(forecast, "read_seconds"),
            max(rank["seconds"]["read"] for rank in measured),
            lambda seconds: f"{seconds:.2f} s",
        ),
    ]
    for name, told, found, shown in rows:
        if told or found:
            ratio = f"{found / told:.1%}" if told else ""
            values = [value if shown is not decimal else int(value) for value in (told, found)]
            table.add_row(name, *map(shown, values), ratio)
    (console or Console()).print(table)


def _sum(ranks: Sequence[Mapping[str, Any]], key: str) -> int:
    return int(sum(rank[key] for rank in ranks))


def _most(ranks: Sequence[Mapping[str, Any]], key: str) -> float:
    return float(max(rank[key] for rank in ranks))
