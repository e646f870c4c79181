"""The pages under ``docs/zh`` as a site in Chinese: navigation, words of the theme, search.

A page of that folder shows the tree that ``zh/index.md`` has, in the place of the one of the English site. A
page that there is in both languages links to the other.
"""

from __future__ import annotations

import re
from gettext import translation
from pathlib import Path
from typing import Any

import sphinx
from docutils import nodes
from furo.navigation import get_navigation_tree
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.environment.adapters.toctree import TocTree
from sphinx.search import SearchEnglish, languages

_FOLDER, _ROOT = "zh/", "zh/index"
#: Words of the theme that Sphinx's own translation does not have.
_WORDS = {
    "Skip to content": "跳到正文",
    "On this page": "本页内容",
    "Back to top": "回到顶部",
    "Home": "首页",
    "View this page": "查看本页源文件",
    "Edit this page": "编辑本页",
    "Made with ": "生成工具：",
    "Copyright &#169; %(copyright)s": "版权所有 &#169; %(copyright)s",
    "Next": "下一页",
    "Previous": "上一页",
}
_SPHINX = translation("sphinx", Path(sphinx.__file__).parent / "locale", ["zh_CN"])


def _chinese(text: str) -> str:
    return _WORDS.get(text) or _SPHINX.gettext(text)


def _other(app: Sphinx, page: str) -> dict[str, str] | None:
    """The same page in the other language, as what the sidebar shows."""
    chinese = page.startswith(_FOLDER)
    other = page.removeprefix(_FOLDER) if chinese else _FOLDER + page
    if other not in app.env.all_docs:
        if chinese:
            return None
        other = _ROOT
    uri = app.builder.get_relative_uri(page, other)
    return {"link": uri, "label": "English" if chinese else "中文", "language": "en" if chinese else "zh-CN"}


def _trees(app: Sphinx) -> list[addnodes.toctree]:
    return list(app.env.get_doctree(_ROOT).findall(addnodes.toctree))


def _navigation(app: Sphinx, page: str) -> str:
    """The sidebar's tree for a page in Chinese, in HTML."""
    found = addnodes.compact_paragraph(toctree=True)
    adapter = TocTree(app.env)
    for tree in _trees(app):
        shown = adapter.resolve(page, app.builder, tree, maxdepth=-1, titles_only=True, includehidden=True)
        if shown is not None:
            found += shown.children
    html: str = app.builder.render_partial(found)["fragment"]  # type: ignore[attr-defined]
    return get_navigation_tree(html)


def _neighbours(app: Sphinx, page: str) -> dict[str, Any]:
    """The pages before and after, in the order of the Chinese tree; English pages in it end the way."""
    entries = [(name, title) for tree in _trees(app) for title, name in tree["entries"]]
    order = [(_ROOT, None), *((name, title) for name, title in entries if name.startswith(_FOLDER))]
    names = [name for name, _ in order]
    at = names.index(page)
    found: dict[str, Any] = {"prev": None, "next": None}
    for word, number in (("prev", at - 1), ("next", at + 1)):
        if 0 <= number < len(order):
            name, title = order[number]
            found[word] = {
                "link": app.builder.get_relative_uri(page, name),
                "title": title or app.env.titles[name].astext(),
            }
    return found


def page_context(app: Sphinx, page: str, _template: str, context: dict[str, Any], doctree: object) -> None:
    """What the templates get for a page; after the theme has given it what it gives to all."""
    if doctree is None:  # search, index
        return
    context["other_language"] = _other(app, page)
    if page.startswith(_FOLDER):
        context["language"] = "zh-CN"
        context["furo_navigation_tree"] = _navigation(app, page)
        context.update(_neighbours(app, page))
        context["_"] = context["gettext"] = _chinese
        context["master_doc"] = context["root_doc"] = _ROOT


class EnglishAndChinese(SearchEnglish):
    """English words, and of Chinese, which has no spaces, every two characters that stand side by side."""

    _runs = re.compile(r"[\u3400-\u9fff]+|[^\W\u3400-\u9fff]+")
    js_splitter_code = """
var splitQuery = (query) =>
  (query.match(/\\p{Script=Han}+|(?:(?!\\p{Script=Han})[\\p{Letter}\\p{Number}_])+/gu) || []).flatMap((run) =>
    /^\\p{Script=Han}{3,}$/u.test(run)
      ? [...run].slice(1).map((last, at) => [...run][at] + last)
      : [run]);
"""

    def split(self, input: str) -> list[str]:
        """As ``splitQuery`` in the browser does with what is asked."""
        found: list[str] = []
        for run in self._runs.findall(input):
            chinese = "\u3400" <= run[0] <= "\u9fff" and len(run) > 2
            found += [run[at : at + 2] for at in range(len(run) - 1)] if chinese else [run]
        return found


def own_tree(app: Sphinx, _doctree: nodes.document) -> None:
    """The root of the Chinese tree is in no other, and need not be."""
    if app.env.docname == _ROOT:
        app.env.metadata[_ROOT]["orphan"] = True


def setup(app: Sphinx) -> dict[str, bool]:
    """Connect it, behind the theme."""
    languages["en"] = EnglishAndChinese
    app.connect("doctree-read", own_tree, priority=900)
    app.connect("html-page-context", page_context, priority=900)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
