"""Render a forecast as one HTML page without scripts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape

from rich.filesize import decimal

from zerostart.engines import title_of
from zerostart.errors import printable
from zerostart.loading.forecast.result import PHASE_TITLES, RankForecast, WorldPlan, number_ranges

#: Rows of a table and names of a list; `--json` has all of them.
MAX_ROWS = 200
#: Bar colours by component, in stacking order.
COLOURS = {
    "parameters": "#2563eb",
    "buffers": "#0891b2",
    "secondary partitions": "#7c9cf0",
    "staging": "#9ca3af",
    "master weights": "#9333ea",
    "gradients": "#16a34a",
    "optimizer state": "#ca8a04",
    "gathered parameters": "#38bdf8",
    "incoming gradient": "#86c06c",
    "buckets": "#db2777",
    "scratch": "#6b7280",
}
_STYLE = """
:root{color-scheme:light dark}
body{max-width:64rem;margin:auto;padding:1rem;font:16px/1.5 system-ui,sans-serif}
table{border-collapse:collapse;font-variant-numeric:tabular-nums;margin:.5rem 0}
th,td{padding:.2rem .6rem;border-bottom:1px solid #8886;text-align:right}
th:first-child{text-align:left}
.bar{position:relative;display:flex;height:1.2rem;background:#8882}
.limit{position:absolute;top:0;bottom:0;border-left:3px solid #cf222e}
"""


def page_of(plan: WorldPlan, source: str) -> str:
    """Render the page of the plan of ``source``."""
    ranks = "1 rank" if plan.world_size == 1 else f"{plan.world_size:,} ranks"
    title = _text(f"{source}: {title_of(plan.engine, plan.zero_stage)}, {ranks}")
    facts = (
        f"{decimal(plan.checkpoint_bytes)}, {plan.parameters:,} elements, largest tensor "
        f"{decimal(plan.largest_tensor_bytes)}; {plan.optimizer}; planned in {plan.planning_seconds:.2f} s"
    )
    body = [f"<h1>{title}</h1><p>{_text(facts)}</p>", *_verdicts(plan), *_memory(plan), *_reads(plan)]
    for kind in ("missing", "unexpected", "computed", "computed_whole"):
        if names := getattr(plan, kind):
            items = "".join(f"<li>{_text(name)}</li>" for name in names[:MAX_ROWS])
            body.append(f"<h2>{kind.replace('_', ' ')} ({len(names):,})</h2><ul>{items}</ul>")
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}</title><style>{_STYLE}</style></head><body>{''.join(body)}</body></html>\n"
    )


def _text(value: object) -> str:
    return escape(printable(str(value)))


def _verdicts(plan: WorldPlan) -> Iterator[str]:
    for fit in plan.fits:
        verdict = "fits" if fit.fits else "does not fit"
        yield (
            f"<p><strong>{verdict}</strong>: {fit.where} memory of {fit.ranks} ranks, {decimal(fit.needed)} "
            f"({PHASE_TITLES[fit.phase]}) of {decimal(fit.limit)}</p>"
        )


def _memory(plan: WorldPlan) -> Iterator[str]:
    limits = {fit.where: fit.limit // fit.ranks for fit in plan.fits}
    yield "<h2>Memory of each rank, highest in each phase, without activations</h2>"
    for shown, alike in plan.classes[:MAX_ROWS]:
        yield f"<h3>ranks {number_ranges(rank.rank for rank in alike)}</h3>"
        for where in ("device", "host"):
            phases = {phase: getattr(memory, where) for phase, memory in shown.memory.items()}
            if any(phases.values()):
                yield from _bars(where, phases, limits.get(where))


def _bars(where: str, phases: Mapping[str, Mapping[str, int]], limit: int | None) -> Iterator[str]:
    scale = max(limit or 0, *(sum(parts.values()) for parts in phases.values()))
    mark = "" if limit is None else f'<span class="limit" style="left:{100 * limit / scale:.2f}%"></span>'
    for phase, parts in phases.items():
        cells = "".join(
            f'<span style="width:{100 * parts[name] / scale:.2f}%;background:{colour}" '
            f'title="{name} {decimal(parts[name])}"></span>'
            for name, colour in COLOURS.items()
            if name in parts
        )
        yield f'<div>{PHASE_TITLES[phase]}</div><div class="bar">{cells}{mark}</div>'
    rows = [
        (name, *(decimal(parts.get(name, 0)) for parts in phases.values()))
        for name in COLOURS
        if any(name in parts for parts in phases.values())
    ]
    rows.append(("together", *(decimal(sum(parts.values())) for parts in phases.values())))
    yield _table((f"{where} memory", *(PHASE_TITLES[phase] for phase in phases)), rows)


def _reads(plan: WorldPlan) -> Iterator[str]:
    read, seconds = sum(rank.read_bytes for rank in plan.ranks), plan.read_seconds
    yield f"<h2>Reads</h2><p>{decimal(read)} by all ranks; the slowest reads for {seconds:.3g} s</p>"
    yield _table(("rank", "reads", "operations", "time"), [_row(rank) for rank in plan.ranks[:MAX_ROWS]])


def _row(rank: RankForecast) -> Sequence[str]:
    return str(rank.rank), decimal(rank.read_bytes), f"{rank.read_ops:,}", f"{rank.read_seconds:.3g} s"


def _table(headings: Iterable[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f"<th>{_text(heading)}</th>" for heading in headings)
    body = "".join(
        f"<tr><th>{_text(row[0])}</th>{''.join(f'<td>{_text(cell)}</td>' for cell in row[1:])}</tr>"
        for row in rows
    )
    return f"<table><tr>{head}</tr>{body}</table>"
