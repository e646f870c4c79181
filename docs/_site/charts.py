"""Figures as pictures: bars of medians with their ranges, in SVG, from the committed results of a benchmark.

``python docs/_site/charts.py`` writes what README shows; a test compares. The page of figures has the
others, which are drawn when the site is built.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[2]
RESULTS = REPOSITORY / "benchmarks" / "results"
#: Pictures that are committed, by the results that they show.
COMMITTED = {"load": REPOSITORY / "docs" / "images" / "load.svg"}

_WIDTH, _LABELS, _ROW, _TOP = 760, 270, 34, 46
# Colours that are readable on white and on black, since the picture lies on either.
_STYLE = """\
text{font:13px system-ui,sans-serif;fill:#24292f}.title{font-weight:600;font-size:14px}.note{fill:#57606a}
.ours{fill:#2563eb}.theirs{fill:#9ca3af}.limit{fill:#10b981}.range{stroke:#111827;stroke-width:1.5}
@media(prefers-color-scheme:dark){text{fill:#e6edf3}.note{fill:#9198a1}.range{stroke:#f9fafb}}"""
#: Arms of the load benchmark, in the order of the charts.
_ROUTES = {
    "ceiling": ("reading the bytes, nothing else", "limit"),
    "zerostart-deepspeed": ("zerostart, DeepSpeed ZeRO-3", "ours"),
    "stock-deepspeed": ("transformers + DeepSpeed ZeRO-3", "theirs"),
    "zerostart-fsdp2": ("zerostart, FSDP2", "ours"),
    "native-fsdp2": ("transformers' own FSDP2 loading", "theirs"),
}


@dataclass(frozen=True)
class Bar:
    """One row: a median with its range, and the class that colours it (ours, theirs, limit)."""

    label: str
    kind: str
    value: float
    low: float
    high: float
    text: str


@dataclass(frozen=True)
class Chart:
    """A title, bars, and below them what is measured, where and when."""

    title: str
    note: str
    rows: Sequence[Bar]


def picture(chart: Chart) -> str:
    """A chart as an SVG file of its own; lengths are in proportion to the values, from zero."""
    height = _TOP + _ROW * len(chart.rows) + 30
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" '
        f'height="{height}" role="img" aria-label="{escape(chart.title)}">',
        f"<style>{_STYLE}</style>",
        f'<text class="title" x="0" y="18">{escape(chart.title)}</text>',
        *_bars(chart.rows, _WIDTH, _LABELS, _TOP),
        f'<text class="note" x="0" y="{height - 8}">{escape(chart.note)}</text>',
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def _bars(rows: Sequence[Bar], width: int, labels: int, top: int) -> Iterator[str]:
    """The bars, each beside its label, or below it where ``labels`` leaves no room for one."""
    scale = (width - labels - 150) / max(max(row.value, row.high) for row in rows)
    step = _ROW if labels else _ROW + 20
    for index, row in enumerate(rows):
        y = top + index * step
        if labels:
            yield f'<text x="{labels - 10}" y="{y + 14}" text-anchor="end">{escape(row.label)}</text>'
        else:
            yield f'<text x="0" y="{y + 14}">{escape(row.label)}</text>'
            y += 20
        middle = y + 9
        low, high = (labels + scale * value for value in (row.low, row.high))
        end = max(labels + scale * row.value, high)
        yield (
            f'<rect class="{row.kind}" x="{labels}" y="{y}" width="{scale * row.value:.1f}" '
            'height="18" rx="2"/>'
        )
        yield f'<line class="range" x1="{low:.1f}" x2="{high:.1f}" y1="{middle}" y2="{middle}"/>'
        yield f'<text x="{end + 8:.1f}" y="{y + 14}">{escape(row.text)}</text>'


def _results(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def _spread(values: Iterable[float]) -> tuple[float, float, float]:
    """Median, lowest and highest."""
    found = list(values)
    return statistics.median(found), min(found), max(found)


def _machine(results: Any) -> str:
    return f"{results['machine']['cores']} CPU cores, {results['date']}"


def load_chart() -> Chart:
    """How long a load takes beside other routes, and what a rank holds above its shard."""
    results = _results("load")
    rows = []
    for name, (label, kind) in _ROUTES.items():
        arm = results["summary"][name]
        text = f"{arm['seconds']:.1f} s, +{arm['over_shard'] / 2**20:,.0f} MiB"
        rows.append(Bar(label, kind, arm["seconds"], *arm["seconds_range"], text))
    gigabytes = results["checkpoint_bytes"] / 1e9
    return Chart(
        f"Loading a {gigabytes:.1f} GB mixture of experts on {results['ranks']} ranks",
        f"Seconds (median, range of {results['repeats']}), and memory above the shard; "
        f"{results['machine']['cores']} CPU cores, page cache warm, {results['date']}.",
        rows,
    )


def memory_chart() -> Chart:
    """What a rank holds above its shard at the highest moment of a load."""
    results = _results("load")
    rows = []
    for name, (label, kind) in _ROUTES.items():
        value, low, high = _spread(
            max(rank["peak"]["resident"] - rank["shard_bytes"] for rank in ranks) / 2**20
            for ranks in results["cells"][name]
        )
        rows.append(Bar(label, kind, value, low, high, f"{value:,.0f} MiB"))
    shard = max(arm["shard_bytes"] for arm in results["summary"].values()) / 2**20
    return Chart(
        "Memory above the shard of a rank, in the same loads",
        f"MiB at the highest moment (median, range of {results['repeats']}); the shard: {shard:,.0f} MiB; "
        f"{_machine(results)}.",
        rows,
    )


def cold_chart() -> Chart:
    """The same loads from storage."""
    results = _results("load_cold_peers")
    rows = []
    for name, (label, kind) in _ROUTES.items():
        if name in results["summary"]:
            arm = results["summary"][name]
            rows.append(Bar(label, kind, arm["seconds"], *arm["seconds_range"], f"{arm['seconds']:.1f} s"))
    return Chart(
        "The same load with nothing in the page cache",
        f"Seconds (median, range of {results['repeats']}); {_machine(results)}.",
        rows,
    )


def initialize_chart() -> Chart:
    """From a checkpoint's path to the masters of ZeRO-2."""
    results = _results("init")
    arms = {
        "unavoidable": ("reading, and writing masters", "limit"),
        "zerostart": ("zerostart, then deepspeed.initialize", "ours"),
        "zerostart-exchange": ("the same, each byte read once", "ours"),
        "stock": ("transformers, then deepspeed.initialize", "theirs"),
    }
    rows = []
    for name, (label, kind) in arms.items():
        seconds = _spread(max(rank["to_masters"] for rank in ranks) for ranks in results["cells"][name])
        peak = results["summary"][name]["peak_masters"] / 2**20
        rows.append(Bar(label, kind, *seconds, f"{seconds[0]:.1f} s, {peak:,.0f} MiB"))
    return Chart(
        f"From a {results['checkpoint_bytes'] / 1e9:.1f} GB file to fp32 masters, ZeRO-{results['stage']}",
        f"Seconds (median, range of {results['repeats']}), and the peak of a rank until then; "
        f"{results['ranks']} ranks, {_machine(results)}.",
        rows,
    )


def save_chart() -> Chart:
    """Writing a sharded model back to disk."""
    results = _results("save")
    arms = {
        "ceiling-direct": ("writing the bytes, nothing else", "limit"),
        "zerostart-deepspeed": ("zerostart, DeepSpeed ZeRO-3", "ours"),
        "save_pretrained-zero3": ("save_pretrained, DeepSpeed ZeRO-3", "theirs"),
        "zerostart-fsdp2": ("zerostart, FSDP2", "ours"),
        "save_pretrained-fsdp2": ("save_pretrained, FSDP2", "theirs"),
        "dcp-consolidated": ("torch's DCP, as Hugging Face files", "theirs"),
    }
    rows = []
    for name, (label, kind) in arms.items():
        cells = results["cells"].get(name)
        if cells:
            seconds = _spread(max(rank["seconds"] for rank in ranks) for ranks in cells)
            peak = max(rank["peak"] for ranks in cells for rank in ranks) / 2**20
            rows.append(Bar(label, kind, *seconds, f"{seconds[0]:.1f} s, +{peak:,.0f} MiB"))
    return Chart(
        f"Saving a {results['bytes'] / 1e9:.1f} GB mixture of experts from {results['ranks']} ranks",
        f"Seconds until the files are synced, and memory added; one run; {_machine(results)}.",
        rows,
    )


def state_chart() -> Chart:
    """Writing a training checkpoint."""
    results = _results("state_saves")
    arms = {
        "save_state-deepspeed": ("zerostart, DeepSpeed ZeRO-3", "ours"),
        "save_checkpoint-deepspeed": ("DeepSpeed's save_checkpoint", "theirs"),
        "save_state-fsdp2": ("zerostart, FSDP2", "ours"),
        "dcp-fsdp2": ("torch's DCP, FSDP2", "theirs"),
    }
    rows = []
    for name, (label, kind) in arms.items():
        cells = results["cells"][name]
        seconds = _spread(cell["seconds"] for cell in cells)
        rows.append(Bar(label, kind, *seconds, f"{seconds[0]:.1f} s for {cells[0]['bytes'] / 1e9:.1f} GB"))
    return Chart(
        "Saving a training: model, masters, optimizer",
        f"Seconds until the files are synced (median, range of {len(cells)}); {results['ranks']} ranks, "
        f"{_machine(results)}.",
        rows,
    )


def forecast_chart() -> Chart:
    """How far measured peaks lie from the forecast ones."""
    cells = _results("forecast")["cells"]
    words = {"load": "the load", "initialize": "through initialize", "step": "the first step"}
    rows = []
    for phase, label in words.items():
        differences = _spread(
            100 * abs(cell["measured"][phase] / cell["forecast"][phase] - 1)
            for cell in cells
            if cell["forecast"].get(phase)
        )
        rows.append(
            Bar(label, "ours", *differences, f"{differences[0]:.1f} %, at most {differences[2]:.1f} %")
        )
    return Chart(
        f"How far measured memory lies from the forecast, {len(cells)} configurations",
        "Percent of the forecast (median, range over the configurations): engines, stages, offload, ranks.",
        rows,
    )


CHARTS = {
    "load": load_chart,
    "memory": memory_chart,
    "cold": cold_chart,
    "initialize": initialize_chart,
    "save": save_chart,
    "state": state_chart,
    "forecast": forecast_chart,
}


def figure(name: str) -> str:
    """A chart as a part of a page, whose style sheet shows the drawing that fits the screen."""
    chart = CHARTS[name]()
    lines = [f'<figure class="chart"><figcaption>{escape(chart.title)}</figcaption>']
    for kind, width, labels, row in (("wide", _WIDTH, _LABELS, _ROW), ("narrow", 340, 0, _ROW + 20)):
        height = row * len(chart.rows)
        lines += [
            f'<svg class="{kind}" viewBox="0 0 {width} {height}" role="img" '
            f'aria-label="{escape(chart.title)}">',
            *_bars(chart.rows, width, labels, 4),
            "</svg>",
        ]
    return "\n".join([*lines, f"<p>{escape(chart.note)}</p></figure>"])


if __name__ == "__main__":
    COMMITTED["load"].write_text(picture(load_chart()), encoding="utf-8")
