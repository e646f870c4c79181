"""Diagrams in ``mermaid`` fences become SVG while the site is built, so that reading it needs no network.

GitHub draws the same fences by itself. Here mermaid's own library runs in a small JavaScript engine
(``mermaidx``); colours are left to ``static/site.css``, which follows the light and the dark theme.
"""

from __future__ import annotations

import json
import re

import mermaidx
from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

_SETTINGS = {
    "theme": "base",
    "themeVariables": {"fontSize": "14px"},
    "flowchart": {"wrappingWidth": 260, "nodeSpacing": 28, "rankSpacing": 36, "padding": 12},
}


def svg(text: str, name: str) -> str:
    """The diagram as an SVG element whose identifiers begin with ``name``.

    Raises:
        Exception: the text is none that mermaid reads; its message says where.
    """
    drawn = mermaidx.render(f"%%{{init: {json.dumps(_SETTINGS)}}}%%\n{text}").svg()
    drawn = drawn[drawn.index("<svg") :].replace("my-svg", name)
    # Its style sheet fixes colours and fonts for a page of its own; shapes and markers need none of it.
    return re.sub(r"<style>.*?</style>", "", drawn, flags=re.DOTALL)


class Mermaid(SphinxDirective):
    """A ``mermaid`` fence: a figure with the diagram in it."""

    has_content = True

    def run(self) -> list[nodes.Node]:
        """Draw it; a diagram that mermaid refuses is a warning at its place, and so fails the build."""
        name = f"diagram-{self.env.new_serialno('diagram')}"
        try:
            drawn = svg("\n".join(self.content), name)
        except Exception as error:
            return [self.state.document.reporter.warning(f"mermaid: {error}", line=self.lineno)]
        return [nodes.raw("", f'<figure class="diagram">{drawn}</figure>', format="html")]


def setup(app: Sphinx) -> dict[str, bool]:
    """Give Sphinx the directive."""
    app.add_directive("mermaid", Mermaid)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
