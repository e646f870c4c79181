"""The documentation site: Sphinx over the Markdown pages of this folder (``make docs``)."""

import re
from importlib import metadata
from pathlib import Path

project = "zerostart"
author = "the zerostart authors"
copyright = author
release = version = metadata.version("zerostart")

extensions = ["myst_parser", "sphinx_copybutton"]
exclude_patterns = ["_site", "patches"]
root_doc = "index"
# Keep two dashes of an option.
smartquotes = False

myst_heading_anchors = 4

# Commands and files can be copied, but not printed output.
copybutton_selector = "div.highlight:not(.highlight-text *) pre"

html_theme = "furo"
html_title = "zerostart"
html_show_sourcelink = False
html_copy_source = False
html_static_path = ["_site/static"]
html_css_files = ["site.css"]
html_favicon = "_site/static/favicon.svg"


def name_outside_files(_app: object, page: str, source: list[str]) -> None:
    """Replace links to files outside this folder by their paths."""
    docs = Path(__file__).parent

    def replace(match: re.Match[str]) -> str:
        target = ((docs / page).parent / match["path"]).resolve()
        if target.is_relative_to(docs) or not target.exists():
            return match[0]
        path = str(target.relative_to(docs.parent))
        title = match["title"]
        return title if path in title else f"{title} in `{path}`"

    source[0] = re.sub(
        r"\[(?P<title>[^\]\n]*(?:\n[^\]\n]*)?)\]\((?P<path>\.\./[\w./-]+)(?:#[\w-]+)?\)", replace, source[0]
    )


def setup(app: object) -> None:
    app.connect("source-read", name_outside_files)  # type: ignore[attr-defined]
