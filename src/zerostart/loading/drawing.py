"""Parts of a page to look at: numbers, tables, bars, lines and maps, as HTML and SVG.

A page is one file that asks no network for anything, in light and in dark, on a narrow screen too; what a
picture shows is there as a table as well. Whatever comes from outside is text: all that is not `Markup` is
escaped where it is put in, and a page runs no script but its own (its policy has that script's digest).
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from html import escape
from importlib.resources import files

import numpy as np
import numpy.typing as npt
from rich.filesize import decimal

from zerostart.errors import printable

#: Cells of a map that are drawn at a time, rows and columns, and shades of one that holds something; as in
#: ``drawing.js`` and ``drawing.css``.
MOST_ROWS, MOST_COLUMNS, SHADES = 64, 96, 12
#: Elements that are written without contents, of HTML and of SVG.
_VOID = {"br", "img", "input", "link", "meta", "rect", "path", "line", "circle", "polyline", "source"}


class Markup(str):
    """HTML that stands as it is; any other string is text."""

    __slots__ = ()


def joined(*children: object) -> Markup:
    """All of them one after the other, escaped where they are text."""
    return Markup("".join(c if isinstance(c, Markup) else escape(printable(str(c))) for c in children))


def tag(name: str, /, *children: object, **attributes: object) -> Markup:
    """An element: ``class_`` is the attribute class, ``data_map`` data-map. None and False leave one out."""
    told = ""
    for key, value in attributes.items():
        if value is not None and value is not False:
            word = key.rstrip("_").replace("_", "-")
            told += f" {word}" if value is True else f' {word}="{escape(printable(str(value)))}"'
    if name in _VOID:
        return Markup(f"<{name}{told}/>")  # within SVG what is not closed has all that follows in it
    return Markup(f"<{name}{told}>{joined(*children)}</{name}>")


def number(value: float, shown: str | None = None) -> Markup:
    """``value`` as a person reads it, with the exact one for programs: ``<data value=...>``."""
    return tag("data", f"{value:,}" if shown is None else shown, value=value)


def size(nbytes: int) -> Markup:
    """So many bytes, in the units of all that zerostart prints."""
    return number(nbytes, decimal(nbytes))


def spans(numbers: Iterable[int], most: int = 8) -> str:
    """``0 to 5, 7``: ascending numbers, runs of them by their ends, ``most`` of these runs."""
    found: list[tuple[int, int]] = []
    for one in numbers:
        if found and found[-1][1] == one - 1:
            found[-1] = (found[-1][0], one)
        else:
            found.append((one, one))
    words = [str(a) if a == b else f"{a} to {b}" for a, b in found[:most]]
    return ", ".join(words) + (", ..." if len(found) > most else "")


def table(
    caption: str, headings: Sequence[str], rows: Iterable[Sequence[object]], **attributes: str
) -> Markup:
    """A table whose first column names its rows."""
    head = tag("tr", *(tag("th", heading, scope="col") for heading in headings))
    body = [tag("tr", tag("th", row[0], scope="row"), *(tag("td", cell) for cell in row[1:])) for row in rows]
    made = tag("table", tag("caption", caption), tag("thead", head), tag("tbody", *body), **attributes)
    return tag("div", made, class_="scroll", tabindex=0, role="region", aria_label=caption)


def folded(summary: str, *children: object, opened: bool = False) -> Markup:
    """What is shown on demand."""
    return tag("details", tag("summary", summary), *children, open=opened)


def stacked(parts: Mapping[str, int], scale: float, colours: Mapping[str, int], limit: int | None) -> Markup:
    """A bar of ``parts``, in bytes, whose full length is ``scale`` and whose ``limit`` is marked."""
    cells = [
        tag(
            "span",
            class_=f"part c{colours[name]}",
            style=f"width:{100 * value / max(1, scale):.3f}%",
            title=f"{name} {decimal(value)}",
        )
        for name, value in sorted(parts.items(), key=lambda item: colours[item[0]])
    ]
    if limit is not None and limit <= scale:
        at = f"left:{100 * limit / max(1, scale):.3f}%"
        cells.append(tag("span", class_="limit", style=at, title=f"limit {decimal(limit)}"))
    return tag("div", *cells, class_="bar", aria_hidden="true")


def legend(names: Iterable[str], colours: Mapping[str, int]) -> Markup:
    """Which colour is what."""
    items = [tag("li", tag("span", class_=f"key c{colours[name]}"), name) for name in names]
    return tag("ul", *items, class_="legend")


@dataclass(frozen=True)
class Line:
    """One line of a chart: points ``(x, lowest, mean, highest)``; a range is drawn where it is one."""

    label: str
    colour: int
    points: Sequence[tuple[float, float, float, float]]


def chart(
    title: str,
    lines: Sequence[Line],
    span: tuple[float, float],
    marks: Mapping[float, str] | None = None,
    shown: Callable[[float], str] = "{:.4g}".format,
    logarithmic: bool = False,
) -> Markup:
    """Lines over ``span``, with the ends of both axes as words; ``marks`` has words for places on x.

    ``logarithmic``: figures that are all above 0, of which the highest is more than 50 times the lowest, get
    a logarithmic axis, which the heading says.
    """
    # Heights alone, without the place on x.
    values = [value for line in lines for point in line.points for value in point[1:]]
    if not values:
        return tag("figure", tag("figcaption", title), tag("p", "nothing yet", class_="note"))
    low, high = min(values), max(values)
    scaled = logarithmic and low > 0 and high > 50 * low
    low, high = (math.log10(low), math.log10(high)) if scaled else (low, high)
    # A twentieth of air above and below; a line of one height is drawn in the middle.
    room = (high - low) or abs(high) or 1.0
    low, high = (low - room / 20, high + room / 20) if high > low else (low - room / 2, high + room / 2)

    # Figures that are never below 0 get no axis that is.
    if not scaled and min(values) >= 0:
        low = max(low, 0.0)

    def x(value: float) -> float:
        return 1000 * (value - span[0]) / max(1e-9, span[1] - span[0])

    def y(value: float) -> float:
        # From above: in SVG y grows downwards.
        return 300 * (high - (math.log10(value) if scaled else value)) / (high - low)

    drawn: list[Markup] = []
    for at, words in (marks or {}).items():
        place = f"M{x(at):.1f} 0V300"
        drawn.append(tag("g", tag("title", words), tag("path", class_="mark", d=place)))
    for line in lines:
        ends = [(x(at), y(least), y(most)) for at, least, _, most in line.points]
        if any(least != most for _, least, most in ends):
            above = " ".join(f"{at:.1f} {most:.1f}" for at, _, most in ends)
            below = " ".join(f"{at:.1f} {least:.1f}" for at, least, _ in reversed(ends))
            drawn.append(tag("path", class_=f"range c{line.colour}", d=f"M{above} L{below}Z"))
        places = [f"{x(at):.1f} {y(mean):.1f}" for at, _, mean, _ in line.points]
        # A line of no length with round ends is a dot: what a single point leaves to see.
        way = places if len(places) > 1 else places * 2
        drawn.append(tag("path", class_=f"line c{line.colour}", d="M" + " L".join(way)))
    top, bottom = (10**high, 10**low) if scaled else (high, low)
    plot = tag(
        "svg",
        *drawn,
        viewBox="0 0 1000 300",
        preserveAspectRatio="none",
        role="img",
        aria_label=f"{title}; the table below has the figures",
    )
    heading = title + (" (logarithmic)" if scaled else "")
    many = legend([line.label for line in lines], {line.label: line.colour for line in lines})
    return tag(
        "figure",
        tag("figcaption", heading),
        tag("div", tag("span", shown(top)), tag("span", shown(bottom)), class_="ends y"),
        tag("div", plot, class_="plot"),
        tag("div", tag("span", f"{span[0]:,.0f}"), tag("span", f"{span[1]:,.0f}"), class_="ends x"),
        many if len(lines) > 1 else "",
        class_="chart",
    )


Grid = npt.NDArray[np.int64]


def _binned(grid: Grid, rows: int, columns: int) -> Grid:
    """``grid`` summed up to at most so many rows and columns."""
    # Where each bin begins; it ends where the next begins, which is what ``reduceat`` sums.
    down = np.linspace(0, grid.shape[0], min(rows, grid.shape[0]) + 1).astype(np.int64)[:-1]
    across = np.linspace(0, grid.shape[1], min(columns, grid.shape[1]) + 1).astype(np.int64)[:-1]
    found: Grid = np.add.reduceat(np.add.reduceat(grid, down, axis=0), across, axis=1)
    return found


def _shades(grid: Grid) -> Markup:
    """A path for each shade, of runs of cells that have it."""
    # By the root, so that little is told from nothing beside much.
    share = np.sqrt(grid / max(1, int(grid.max())))
    # 0 is nothing at all; what holds anything has the lightest shade at least.
    shade = np.where(grid > 0, np.clip((share * SHADES).astype(np.int64), 1, SHADES), 0)
    paths: dict[int, list[str]] = {}
    for row, values in enumerate(shade):
        starts = np.flatnonzero(np.diff(values, prepend=-1))
        for start, stop in zip(starts, [*starts[1:], len(values)], strict=True):
            if values[start]:
                paths.setdefault(int(values[start]), []).append(f"M{start} {row}h{stop - start}v1H{start}z")
    return joined(*(tag("path", class_=f"s{shade}", d="".join(d)) for shade, d in sorted(paths.items())))


#: What a row or a column is: the first and the last of what is summed up in it.
Ends = tuple[str, str]


def heat(
    name: str, title: str, rows: Sequence[Ends], columns: Sequence[Ends], values: Mapping[str, Grid]
) -> Markup:
    """A map of cells, [rows, columns], dark where much is; `page_script` makes it one to walk through.

    ``values`` has ``bytes`` and what else is told of a cell: ``reads``, and ``begin`` and ``end`` of what is
    read, which are told of a single one. ``name`` is an identifier.
    """
    grid = values["bytes"]
    cells = _binned(grid, MOST_ROWS, MOST_COLUMNS)
    plot = tag(
        "svg",
        _shades(cells),
        viewBox=f"0 0 {cells.shape[1]} {cells.shape[0]}",
        preserveAspectRatio="none",
        role="img",
        aria_label=f"{title}; the tables below have the figures",
    )
    known = {
        "rows": [[printable(end) for end in ends] for ends in rows],
        "columns": [[printable(end) for end in ends] for ends in columns],
        **{key: value.ravel().tolist() for key, value in values.items()},
    }
    # Within a script element nothing ends it but "</": no "<" is left.
    data = json.dumps(known, separators=(",", ":")).replace("<", "\\u003c")
    keys = "arrow keys move, + and - zoom, 0 shows all"
    tools = [
        tag("button", "+", type="button", data_zoom="in", aria_label="zoom in"),
        tag("button", "−", type="button", data_zoom="out", aria_label="zoom out"),
        tag("button", "all", type="button", data_zoom="all"),
        tag("span", keys, class_="note"),
    ]
    return tag(
        "figure",
        tag("figcaption", title),
        tag("div", *tools, class_="tools", hidden=True),
        tag("div", plot, class_="plot map", tabindex=0, role="group", aria_label=f"{title}: {keys}"),
        tag("output", class_="note", aria_live="polite"),
        tag("script", Markup(data), type="application/json", id=name),
        data_map=name,
    )


def page(title: str, *body: object, script: str = "", refresh: int | None = None) -> str:
    """A whole page. It is loaded again after ``refresh`` seconds, and shows files that lie beside it."""
    # Of the very text that the script element gets: a browser runs no other.
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    allowed = f"'sha256-{digest}'" if script else "'none'"
    policy = (
        "default-src 'none'; style-src 'unsafe-inline'; img-src 'self' file:; media-src 'self' file:; "
        f"script-src {allowed}; base-uri 'none'; form-action 'none'"
    )
    again = tag("meta", http_equiv="refresh", content=refresh) if refresh else ""
    head = joined(
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=policy),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        again,
        tag("title", title),
        tag("style", Markup(_resource("drawing.css"))),
    )
    end = tag("script", Markup(script)) if script else ""
    shown = tag("body", tag("main", *body), end)
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n{shown}</html>\n'


def page_script() -> str:
    """What walks through the maps of a page: a window of cells, summed up to as many as `heat` draws."""
    return _resource("drawing.js")


@cache
def _resource(name: str) -> str:
    return (files("zerostart.loading") / name).read_text(encoding="utf-8")
