"""Text for a person: at a terminal broken between words, elsewhere one line stays one line."""

from __future__ import annotations

import textwrap

from rich.console import Console

from zerostart.errors import printable


def say(console: Console, text: str) -> None:
    """Print ``text``, in which nothing is markup; what does not fit into a terminal goes on indented."""
    lines = [printable(line) for line in text.splitlines()]
    if console.is_terminal:
        lines = [_broken(line, console.width) for line in lines]
    console.print("\n".join(lines), markup=False, soft_wrap=True)


def _broken(line: str, width: int) -> str:
    indent = " " * (len(line) - len(line.lstrip()) + 2)
    # A path or a name that is longer than a line stays whole: it is there to be copied.
    return textwrap.fill(
        line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def duration(seconds: float) -> str:
    """Seconds in the unit that a person would take, to two digits or so."""
    if seconds < 0.001:
        return "< 1 ms" if seconds > 0 else "0 s"
    if seconds < 0.9995:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 120:
        return f"{seconds:.1f} s" if seconds < 9.95 else f"{seconds:.0f} s"
    return f"{seconds / 60:,.0f} min" if seconds < 7200 else f"{seconds / 3600:,.1f} h"
