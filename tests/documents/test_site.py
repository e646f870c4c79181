"""The documentation site finds its own faults when it is built (``make docs``); here that it finds each."""

from pathlib import Path

import pytest

from tests.documents.blocks import DOCS

pytest.importorskip("sphinx")

PAGE = """<html><head><link rel="stylesheet" href="site.css"></head><body>
<h1 id="top">A page</h1>
<a href="#top">here</a> <a href="other.html#there">there</a> <a href="https://example.org/a#b">elsewhere</a>
<pre>[a](b.md) |---|</pre>
<dl><dt class="sig" id="a.name">name</dt><dd>says something</dd></dl>
{}</body></html>"""
FAULTS = {
    '<a href="#nowhere">x</a>': "page.html: #nowhere: there is no such anchor",
    '<a href="other.html#nowhere">x</a>': "page.html: other.html#nowhere: there is no such anchor",
    '<a href="gone.html">x</a>': "page.html: gone.html: there is no such file",
    '<a href="htps://example.org">x</a>': "page.html: htps://example.org: no address",
    '<a href="https://example/a b">x</a>': "page.html: https://example/a b: no address",
    '<a href="{repository}/blob/main/docs/gone.md">x</a>': (
        "page.html: {repository}/blob/main/docs/gone.md: not in the repository"
    ),
    '<script src="https://example.org/a.js"></script>': (
        "page.html: https://example.org/a.js: needs a network to be read"
    ),
    "<p>see [a page](a.md)</p>": "page.html: '](a.md)': Markdown that was not understood",
    '<dl><dt class="sig" id="b.name">b</dt><dd></dd></dl>': "page.html: b.name: an entry that says nothing",
}


def faults_of(site: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[list[str], str]:
    monkeypatch.syspath_prepend(str(DOCS / "_site"))
    import checking

    return list(checking.faults(site)), checking.repository()


@pytest.mark.parametrize("text", FAULTS)
def test_a_fault_is_found(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "site.css").write_text("body { margin: 0 }")
    (tmp_path / "other.html").write_text('<h1 id="there">Other</h1>')
    (tmp_path / "page.html").write_text(PAGE.format(""))
    found, repository = faults_of(tmp_path, monkeypatch)
    assert found == []
    (tmp_path / "page.html").write_text(PAGE.format(text.replace("{repository}", repository)))
    assert faults_of(tmp_path, monkeypatch)[0] == [FAULTS[text].replace("{repository}", repository)]


def test_styles_that_fetch_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "site.css").write_text("@import url('https://example.org/font.css');")
    found = ["site.css: https://example.org/font.css: needs a network to be read"]
    assert faults_of(tmp_path, monkeypatch)[0] == found
