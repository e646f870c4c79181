"""The documentation site finds its own faults when it is built (``make docs``); here that it finds each."""

import json
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


def search(site: Path, code: str = "window.Stemmer = 1;") -> None:
    (site / "_static").mkdir(exist_ok=True)
    (site / "_static" / "language_data.js").write_text(code)


def faults_of(site: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[list[str], str]:
    monkeypatch.syspath_prepend(str(DOCS / "_site"))
    import checking

    return list(checking.faults(site)), checking.repository()


@pytest.mark.parametrize("text", FAULTS)
def test_a_fault_is_found(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    search(tmp_path)
    (tmp_path / "site.css").write_text("body { margin: 0 }")
    (tmp_path / "other.html").write_text('<h1 id="there">Other</h1>')
    (tmp_path / "page.html").write_text(PAGE.format(""))
    found, repository = faults_of(tmp_path, monkeypatch)
    assert found == []
    (tmp_path / "page.html").write_text(PAGE.format(text.replace("{repository}", repository)))
    assert faults_of(tmp_path, monkeypatch)[0] == [FAULTS[text].replace("{repository}", repository)]


def test_a_search_that_does_not_run_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    search(tmp_path, "window.Stemmer = English and ChineseStemmer;")
    (found,) = faults_of(tmp_path, monkeypatch)[0]
    assert found.startswith("_static/language_data.js: the search does not run: SyntaxError")


def test_search_cuts_what_is_asked_as_it_cuts_the_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one in the browser, in JavaScript; the other when the site is built."""
    monkeypatch.syspath_prepend(str(DOCS / "_site"))
    quickjs = pytest.importorskip("quickjs")
    import languages

    browser = quickjs.Context()
    browser.eval(languages.EnglishAndChinese.js_splitter_code)
    pages = languages.EnglishAndChinese({})
    texts = ("load_state on 4 ranks, bf16", "检查点", "把检查点加载为分片模型，支持 ZeRO", "训练", "卡")
    for text in texts:
        asked = list(json.loads(browser.eval(f"JSON.stringify(splitQuery({json.dumps(text)}))")))
        assert asked == pages.split(text)
    assert pages.split(texts[1]) == ["检查", "查点"]


def test_styles_that_fetch_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    search(tmp_path)
    (tmp_path / "site.css").write_text("@import url('https://example.org/font.css');")
    found = ["site.css: https://example.org/font.css: needs a network to be read"]
    assert faults_of(tmp_path, monkeypatch)[0] == found
