"""Text for a person."""

from __future__ import annotations

from rich.console import Console

from zerostart.errors import printable


def say(console: Console, text: str) -> None:
    """Print ``text``, in which nothing is markup, and no line is broken."""
    console.print("\n".join(printable(line) for line in text.splitlines()), markup=False, soft_wrap=True)


def duration(seconds: float) -> str:
    """Seconds in the unit that a person would take, to two digits or so."""
    if seconds < 0.001:
        return "< 1 ms" if seconds > 0 else "0 s"
    if seconds < 0.9995:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 120:
        return f"{seconds:.1f} s" if seconds < 9.95 else f"{seconds:.0f} s"
    return f"{seconds / 60:,.0f} min" if seconds < 7200 else f"{seconds / 3600:,.1f} h"
