"""What a built site must not have, looked for in its files when the build ends: each fault is a warning.

Links and anchors that lead nowhere, whatever needs a network to be read, entries of the reference that say
nothing, Markdown that was left as it stands, and a search whose code does not run.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import quickjs
from preparing import REPOSITORY, repository
from sphinx.application import Sphinx
from sphinx.util import logging

_log = logging.getLogger(__name__)
#: Markdown in running text: a link, a row below the head of a table, a fence, what a merge left.
_MARKDOWN = re.compile(r"\]\([\w./#-]+\)|\|\s*:?--+|```|<{7}|>{7}")
_IN_STYLES = re.compile(r"(?:url\(|@import)\s*[\"']?((?:https?:)?//[^\"')\s]+)")
#: What a browser fetches by itself, by its tag and attribute; ``link`` by what it is for.
_FETCHED = {("script", "src"), ("img", "src"), ("iframe", "src"), ("source", "src"), ("image", "href")}
_FETCHED_LINKS = {"stylesheet", "icon", "shortcut icon", "preload", "prefetch", "modulepreload"}
_VOID = {"area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "source", "track", "wbr"}


@dataclass
class Page(HTMLParser):
    """What one page has: anchors, links, what it fetches, and text outside of code."""

    anchors: set[str] = field(default_factory=set)
    links: list[str] = field(default_factory=list)
    fetched: list[str] = field(default_factory=list)
    markdown: list[str] = field(default_factory=list)
    silent: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()
        self._open: list[str] = []
        self._entry: str | None = None  # of the reference, as long as nothing has been said of it

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """An element begins."""
        given = {name: value or "" for name, value in attrs}
        self.anchors |= {given[name] for name in ("id", "name") if name in given}
        for name in given.keys() & {"href", "src"}:
            wanted = tag == "link" and given.get("rel") in _FETCHED_LINKS
            (self.fetched if wanted or (tag, name) in _FETCHED else self.links).append(given[name])
        if tag == "dt" and "sig" in given.get("class", "").split():
            self.silent += [] if self._entry is None else [self._entry]
            self._entry = given.get("id", "")
        if tag not in _VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        """An element ends; those in it that were left open end, too."""
        if tag == "dd" and self._entry is not None:
            self.silent.append(self._entry)
            self._entry = None
        if tag in self._open:
            while self._open.pop() != tag:
                pass

    def handle_data(self, data: str) -> None:
        """Text."""
        if data.strip() and "dd" in self._open and "dt" not in self._open:
            self._entry = None
        if not {"pre", "code", "script", "style"} & set(self._open):
            self.markdown += [found[0] for found in _MARKDOWN.finditer(data)]


def faults(site: Path) -> Iterator[str]:
    """One line for each fault of the site in the folder ``site``."""
    pages: dict[Path, Page] = {}
    for file in sorted(site.rglob("*.html")):
        pages[file] = Page()
        pages[file].feed(file.read_text(encoding="utf-8"))
    for file, page in pages.items():
        place = file.relative_to(site)
        for address in dict.fromkeys([*page.links, *page.fetched]):
            wrong = _outside(address) if _is_outside(address) else _inside(address, file, pages)
            if wrong:
                yield f"{place}: {address}: {wrong}"
        for address in page.fetched:
            if _is_outside(address):
                yield f"{place}: {address}: needs a network to be read"
        for text in dict.fromkeys(page.markdown):
            yield f"{place}: {text!r}: Markdown that was not understood"
        for name in page.silent:
            yield f"{place}: {name}: an entry that says nothing"
    search = site / "_static" / "language_data.js"
    try:
        quickjs.Context().eval("var window = globalThis;" + search.read_text(encoding="utf-8"))
    except (OSError, quickjs.JSException) as error:
        yield f"{search.relative_to(site)}: the search does not run: {error}"
    for file in sorted(site.rglob("*.css")):
        for address in _IN_STYLES.findall(file.read_text(encoding="utf-8")):
            yield f"{file.relative_to(site)}: {address}: needs a network to be read"


def _is_outside(address: str) -> bool:
    return bool(urlsplit(address).scheme) or address.startswith("//")


def _outside(address: str) -> str:
    """What is wrong with the form of an address elsewhere; those of the repository's files are looked up."""
    parts = urlsplit(address)
    if parts.scheme in ("data", "mailto"):
        return ""
    if parts.scheme not in ("http", "https") or "." not in parts.netloc or re.search(r"[\s<>]", address):
        return "no address"
    found = re.match(rf"{re.escape(repository())}/(?:blob|tree|raw)/main/([^#?]+)", address)
    if found and not (REPOSITORY / unquote(found[1])).exists():
        return "not in the repository"
    return ""


def _inside(address: str, file: Path, pages: dict[Path, Page]) -> str:
    parts = urlsplit(address)
    target = (file.parent / unquote(parts.path)).resolve() if parts.path else file
    if not target.is_file():
        return "there is no such file"
    anchor = unquote(parts.fragment)
    if anchor and target in pages and anchor not in pages[target].anchors:
        return "there is no such anchor"
    return ""


def _finished(app: Sphinx, error: Exception | None) -> None:
    if error is None:
        for fault in faults(Path(app.outdir).resolve()):
            _log.warning("%s", fault)


def setup(app: Sphinx) -> dict[str, bool]:
    """Connect it."""
    app.connect("build-finished", _finished)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
