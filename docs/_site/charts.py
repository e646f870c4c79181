"""Figures as pictures: bars of medians with their ranges, in SVG, from the committed results of a benchmark.

``python docs/_site/charts.py`` writes what README shows; a test compares.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

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


@dataclass(frozen=True)
class Bar:
    """One row: a median with its range, and the class that colours it (ours, theirs, limit)."""

    label: str
    kind: str
    value: float
    low: float
    high: float
    text: str


def bars(title: str, note: str, rows: Sequence[Bar]) -> str:
    """A chart of horizontal bars as SVG; lengths are in proportion to the values, from zero."""
    height = _TOP + _ROW * len(rows) + 30
    scale = (_WIDTH - _LABELS - 150) / max(max(row.value, row.high) for row in rows)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" '
        f'height="{height}" role="img" aria-label="{escape(title)}">',
        f"<style>{_STYLE}</style>",
        f'<text class="title" x="0" y="18">{escape(title)}</text>',
    ]
    for index, row in enumerate(rows):
        y = _TOP + index * _ROW
        middle = y + 9
        low, high = (_LABELS + scale * value for value in (row.low, row.high))
        end = max(_LABELS + scale * row.value, high)
        lines += [
            f'<text x="{_LABELS - 10}" y="{y + 14}" text-anchor="end">{escape(row.label)}</text>',
            f'<rect class="{row.kind}" x="{_LABELS}" y="{y}" width="{scale * row.value:.1f}" '
            'height="18" rx="2"/>',
            f'<line class="range" x1="{low:.1f}" x2="{high:.1f}" y1="{middle}" y2="{middle}"/>',
            f'<text x="{end + 8:.1f}" y="{y + 14}">{escape(row.text)}</text>',
        ]
    lines += [f'<text class="note" x="0" y="{height - 8}">{escape(note)}</text>', "</svg>"]
    return "\n".join(lines) + "\n"


def load_chart() -> str:
    """How long a load takes beside other routes, and what a rank holds above its shard."""
    results = json.loads((RESULTS / "load.json").read_text(encoding="utf-8"))
    routes = {
        "ceiling": ("reading the bytes, nothing else", "limit"),
        "zerostart-deepspeed": ("zerostart, DeepSpeed ZeRO-3", "ours"),
        "stock-deepspeed": ("transformers + DeepSpeed ZeRO-3", "theirs"),
        "zerostart-fsdp2": ("zerostart, FSDP2", "ours"),
        "native-fsdp2": ("transformers' own FSDP2 loading", "theirs"),
    }
    rows = []
    for name, (label, kind) in routes.items():
        arm = results["summary"][name]
        text = f"{arm['seconds']:.1f} s, +{arm['over_shard'] / 2**20:,.0f} MiB"
        rows.append(Bar(label, kind, arm["seconds"], *arm["seconds_range"], text))
    gigabytes = results["checkpoint_bytes"] / 1e9
    return bars(
        f"Loading a {gigabytes:.1f} GB mixture of experts on {results['ranks']} ranks",
        f"Seconds (median, range of {results['repeats']}), and memory above the shard; "
        f"{results['machine']['cores']} CPU cores, page cache warm, {results['date']}.",
        rows,
    )


if __name__ == "__main__":
    COMMITTED["load"].write_text(load_chart(), encoding="utf-8")
