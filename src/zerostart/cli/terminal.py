"""Print text and durations."""

from __future__ import annotations

from rich.console import Console

from zerostart.errors import printable


def say(console: Console, text: str) -> None:
    """Print ``text`` without markup and without wrapping lines."""
    console.print("\n".join(printable(line) for line in text.splitlines()), markup=False, soft_wrap=True)


def duration(seconds: float) -> str:
    """Format ``seconds`` in a suitable unit."""
    if seconds < 0.001:
        return "< 1 ms" if seconds > 0 else "0 s"
    if seconds < 0.9995:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 120:
        return f"{seconds:.1f} s" if seconds < 9.95 else f"{seconds:.0f} s"
    return f"{seconds / 60:,.0f} min" if seconds < 7200 else f"{seconds / 3600:,.1f} h"
