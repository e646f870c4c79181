"""A forecast in the terminal: a table of ranks, memory as stacked bars, and what to do where it is short."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from rich.console import Console
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from zerostart.checkpoint.paths import shown_url
from zerostart.loading.drawing import spans
from zerostart.training.loop.terminal import duration, say

if TYPE_CHECKING:
    from zerostart.loading.forecast import Fit, RankForecast, WorldPlan

#: Rows that a table shows; a line sums up the rest.
SHOWN = 12
#: Cells of a bar, where the terminal has them beside the names of phases and the sizes.
WIDTH = 48
BESIDE = 24
#: Limits up to so many times the highest peak are drawn.
FAR = 4
#: Forecasts from which on a measurement is set in relation to them. Below, what any process allocates or
#: waits for beside the load decides: buffers of the process group, threads that start.
COMPARED_BYTES, COMPARED_SECONDS = 32_000_000, 0.1
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
    say(
        console,
        f"{shown_url(source)}: {decimal(made.checkpoint_bytes)}, {made.parameters:,} elements, "
        f"largest tensor {decimal(made.largest_tensor_bytes)}; planned in {made.planning_seconds:.2f} s",
    )
    say(console, _job(made))
    classes = sorted(made.classes, key=lambda pair: -_highest(pair[0]))
    for table in _tables(made, classes[:SHOWN]):
        console.print(table)
    if made.store is not None:
        of_all, how = made.world_size / max(1, len(made.ranks)), made.store
        requests = round(of_all * sum(rank.get_requests for rank in made.ranks))
        nbytes = round(of_all * sum(rank.get_bytes for rank in made.ranks))
        known = "measured" if how.measured else "assumed"
        say(
            console,
            f"from the store: {requests:,} requests (GET) for {decimal(nbytes)} by all ranks; {known}: "
            f"{1000 * how.latency:.3g} ms to the first byte, {decimal(round(how.rate))}/s on a connection"
            + ("" if made.cost is None else f"; at the given prices {of_all * made.cost:,.2f}"),
        )
    if len(classes) > SHOWN:
        say(console, f"... and {len(classes) - SHOWN} more kinds of ranks, each of which holds less")
    if classes:
        _bars(console, made, _largest(made))
    for line in _lines(made):
        say(console, line)


def _job(made: WorldPlan) -> str:
    from zerostart.engines import titled

    many = "1 rank" if made.world_size == 1 else f"{made.world_size:,} ranks"
    return f"{titled(made.engine, made.zero_stage)} ({made.engine_reason}), {many}, {made.optimizer}"


def _tables(
    made: WorldPlan, classes: Sequence[tuple[RankForecast, Sequence[RankForecast]]]
) -> tuple[Table, Table]:
    """What ranks read, and what they hold: two, so that each fits into a narrow terminal."""
    reading = _table("reading", ranks="left", reads="right", operations="right", time="right")
    holding = _table("memory, highest in each phase", ranks="left", memory="left")
    for title in TITLES.values():
        holding.add_column(title, justify="right", no_wrap=True)
    for shown, alike in classes:
        name = spans((rank.rank for rank in alike), 4)
        reading.add_row(name, decimal(shown.read_bytes), f"{shown.read_ops:,}", duration(shown.read_seconds))
        for kind in ("device", "host") if made.accelerator else ("host",):
            sizes = [decimal(getattr(m, f"{kind}_bytes")) for m in shown.memory.values()]
            holding.add_row(name, kind, *sizes)
            name = ""
    return reading, holding


def _table(title: str, **columns: Literal["left", "right"]) -> Table:
    """A table of which the first column alone is broken where the terminal is narrow."""
    table = Table(title=title, title_justify="left")
    for number, (heading, justify) in enumerate(columns.items()):
        table.add_column(heading, justify=justify, no_wrap=number > 0)
    return table


def _highest(rank: RankForecast) -> int:
    return max((m.host_bytes + m.device_bytes for m in rank.memory.values()), default=0)


def _largest(made: WorldPlan) -> RankForecast:
    return max(made.ranks, key=_highest)


def _bars(console: Console, made: WorldPlan, rank: RankForecast) -> None:
    """Each kind of memory of ``rank``, phase by phase, against the limit of one rank."""
    width = max(8, min(WIDTH, console.width - BESIDE))
    limits = {fit.where: fit.limit // fit.ranks for fit in made.fits}
    used: dict[str, None] = {}
    for where in ("device", "host"):
        rows = {phase: getattr(memory, where) for phase, memory in rank.memory.items()}
        if not any(rows.values()):
            continue
        limit = limits.get(where)
        say(console, f"{where} memory of rank {rank.rank}, highest in each phase, without activations")
        if where == "host" and not made.accelerator:
            say(console, "(the device is the CPU: its memory is host memory)")
        highest = max(sum(parts.values()) for parts in rows.values())
        # A limit far off would leave nothing to see of the bars: it is told then, and not drawn.
        near = limit is not None and limit <= FAR * highest
        scale = max(highest, limit or 0) if near else highest
        for phase, parts in rows.items():
            bar = _bar(parts, scale, limit if near else None, width)
            console.print(
                Text(f"  {TITLES[phase]:<11}") + bar + Text(f" {decimal(sum(parts.values()))}"),
                soft_wrap=True,
            )
            # For the legend: each kind once, in the order in which it is first seen.
            used |= dict.fromkeys(parts)
        if limit is not None and near:
            marked = " " * _cells(limit, scale, width)
            console.print(f"  {'limit':<11}{marked}^ {decimal(limit)}", soft_wrap=True)
        elif limit is not None:
            console.print(
                f"  {'limit':<11}{decimal(limit)}, {limit / highest:,.0f} times that", soft_wrap=True
            )
    _legend(console, [name for name in LOOKS if name in used])


def _legend(console: Console, names: Sequence[str]) -> None:
    """What the bars are made of; a component's sign stays beside its name."""
    line = Text(" ")
    for name in names:
        glyph, style = LOOKS[name]
        if len(line) > 1 and len(line) + len(name) + 4 > console.width:
            console.print(line, soft_wrap=True)
            line = Text(" ")
        line.append(f" {glyph * 2}", style=style).append(f" {name} ")
    console.print(line, soft_wrap=True)


def _cells(nbytes: float, scale: int, width: int) -> int:
    return round(width * nbytes / max(1, scale))


def _bar(parts: Mapping[str, int], scale: int, limit: int | None, width: int) -> Text:
    """Components one after another; what is over the limit is in reverse."""
    bar, done = Text(), 0
    # The cell from which on everything is over the limit.
    edge = width if limit is None else _cells(limit, scale, width)
    ordered = sorted(parts.items(), key=lambda item: list(LOOKS).index(item[0]))
    for name, size in ordered:
        # By running sums, so that roundings do not add up to a bar of another length.
        begin, done = _cells(done, scale, width), done + size
        glyph, style = LOOKS[name]
        for cell in range(begin, _cells(done, scale, width)):
            bar.append(glyph, style=style if cell < edge else f"{style} reverse")
    bar.append(" " * (width - len(bar)))
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
        of = "; storage is what one machine gets" if made.rates.get("storage") is not None else ""
        yield f"Times at {rates}{of}"
    if made.sharing is not None:
        yield f"Reading: {made.sharing}"
    if made.exchanged_bytes:
        between, within = made.between_machines_bytes, made.within_machines_bytes
        ways = (
            f": {decimal(between)} between machines, {decimal(within)} within them" if made.messages else ""
        )
        yield f"All ranks together get {decimal(sum(made.exchanged_bytes))} from others{ways}"
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
        share = f"{fit.needed / fit.limit:.0%}" if fit.needed > 0.005 * fit.limit else "less than 1%"
        return f"Fits: {fit.where} memory{whose}, {decimal(fit.needed)} ({phase}), is {share} of {limit}"
    return f"Does not fit: {fit.where} memory{whose}, {decimal(fit.needed)} ({phase}), exceeds {limit}"


def show_comparison(
    forecast: Sequence[Mapping[str, Any]],
    measured: Sequence[Mapping[str, Any]],
    console: Console | None = None,
) -> None:
    """Print what was foreseen of the ranks beside what was measured: sums of bytes, worst peaks and times.

    Bytes that are read are counted, and compare at any size; peaks and times from `COMPARED_BYTES` and
    `COMPARED_SECONDS` on.
    """
    console = console or Console()
    table = Table(title="forecast and measurement", title_justify="left")
    for heading in ("", "forecast", "measured", "measured / forecast"):
        table.add_column(heading, justify="right" if heading else "left", min_width=8 if heading else None)
    rows: list[tuple[str, float | None, float | None, float, Callable[[float], str]]] = [
        ("read, all ranks", _sum(forecast, "read_bytes"), _sum(measured, "read_bytes"), 1, _size),
        *(
            (f"{where} peak", _most(forecast, key), _most(measured, key), COMPARED_BYTES, _size)
            for where, key in (("host", "peak_host_bytes"), ("device", "peak_device_bytes"))
        ),
        (
            "reading, slowest rank",
            _most(forecast, "read_seconds"),
            max(rank["seconds"]["read"] for rank in measured),
            COMPARED_SECONDS,
            duration,
        ),
    ]
    small = False
    for name, told, found, floor, shown in rows:
        if told is None or found is None:
            # A device that counts no peak has none to compare.
            shown_as = [shown(value) if value is not None else "unknown" for value in (told, found)]
            table.add_row(name, *shown_as, "-")
        elif told or found:
            small |= told < floor
            table.add_row(name, shown(told), shown(found), f"{found / told:.1%}" if told >= floor else "-")
    console.print(table)
    if small:
        say(
            console,
            f"- not compared: below {_size(COMPARED_BYTES)} of memory or {duration(COMPARED_SECONDS)} of "
            "reading, what else a process does decides what is measured",
        )


def _size(nbytes: float) -> str:
    return decimal(int(nbytes))


def _sum(ranks: Sequence[Mapping[str, Any]], key: str) -> int:
    return int(sum(rank[key] for rank in ranks))


def _most(ranks: Sequence[Mapping[str, Any]], key: str) -> float | None:
    """The most of any rank; None where one could not tell."""
    values = [rank[key] for rank in ranks]
    return None if None in values else float(max(values))
