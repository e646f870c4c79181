"""Draw the load benchmark, seconds and memory next to each other.

``make reference`` writes ``docs/images/load.svg`` from ``results/load.json``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULT = ROOT / "benchmarks" / "results" / "load.json"
CHART = ROOT / "docs" / "images" / "load.svg"
#: Label and colour class of each bar, from top to bottom.
BARS = {
    "stock-deepspeed": ("transformers + DeepSpeed ZeRO-3", "stock"),
    "zerostart-deepspeed": ("zerostart, ZeRO-3", "ours"),
    "native-fsdp2": ("transformers, FSDP2", "stock"),
    "zerostart-fsdp2": ("zerostart, FSDP2", "ours"),
    "ceiling": ("reading the bytes, nothing else", "plain"),
}
#: Left edge and longest bar of each panel, in pixels.
PANELS = ((258, 190), (546, 130))
TOP, STEP, BAR = 64, 34, 20
STYLE = """
text{font:14px system-ui,sans-serif;fill:#1f2328}.head{font-weight:600}.note{font-size:12px;fill:#59636e}
.ours{fill:#2563eb}.stock{fill:#9ca3af}.plain{fill:#d1d5db}
@media(prefers-color-scheme:dark){text{fill:#e6edf3}.note{fill:#9198a1}.ours{fill:#58a6ff}.stock{fill:#6e7681}
.plain{fill:#484f58}}
"""


def draw(result: dict[str, Any]) -> Iterator[str]:
    """Yield the lines of the SVG."""
    height = TOP + STEP * len(BARS) + 32
    title = f"Loading {result['checkpoint_bytes'] / 1e9:.1f} GB of experts on {result['ranks']} ranks"
    yield f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 760 {height}" role="img">'
    yield f"<title>{title}: seconds, and memory above the shard</title>"
    yield f"<style>{STYLE}</style>"
    yield f'<text class="head" x="0" y="18">{title}</text>'
    rows = [(result["summary"][arm], *names) for arm, names in BARS.items()]
    seconds = [row["seconds"] for row, _, _ in rows]
    memory = [row["over_shard"] / (1 << 20) for row, _, _ in rows]
    for (left, longest), head, values, unit in (
        (PANELS[0], "seconds", seconds, "{:.1f} s"),
        (PANELS[1], "memory above the shard", memory, "{:,.0f} MiB"),
    ):
        yield f'<text class="head" x="{left}" y="{TOP - 16}">{head}</text>'
        for number, (value, (_, _, kind)) in enumerate(zip(values, rows, strict=True)):
            y, width = TOP + STEP * number, max(2, longest * value / max(values))
            yield f'<rect class="{kind}" x="{left}" y="{y}" width="{width:.1f}" height="{BAR}" rx="2"/>'
            yield f'<text x="{left + width + 6:.1f}" y="{y + 15}">{unit.format(value)}</text>'
    for number, (_, label, _) in enumerate(rows):
        yield f'<text x="0" y="{TOP + STEP * number + 15}">{label}</text>'
    machine, packages = result["machine"], result["machine"]["packages"]
    versions = ", ".join(f"{name} {packages[name]}" for name in ("torch", "transformers", "deepspeed"))
    note = f"{result['date']}: {machine['cores']} CPU cores, medians of {result['repeats']}, {versions}"
    yield f'<text class="note" x="0" y="{height - 10}">{note}</text>'
    yield "</svg>"


def drawing() -> str:
    """Return the SVG of the committed result."""
    return "\n".join(draw(json.loads(RESULT.read_text(encoding="utf-8")))) + "\n"
