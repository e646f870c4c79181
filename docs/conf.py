"""The documentation site: Sphinx over the Markdown pages of this folder (``make docs``)."""

import sys
from importlib import metadata
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "_site"))

import preparing

project = "zerostart"
author = "the zerostart authors"
copyright = author
release = version = metadata.version("zerostart")

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "checking",
    "diagrams",
    "languages",
    "names",
]
exclude_patterns = ["_site", "patches"]
root_doc = "index"
nitpicky = True
nitpick_ignore = [("py:class", "zerostart.activation.Result")]  # what the caller's own function returns
# What is written is what is shown: an option's two dashes are two dashes.
smartquotes = False

myst_heading_anchors = 4
myst_fence_as_directive = ["mermaid"]

autodoc_typehints = "description"
autodoc_typehints_description_target = "documented_params"
autodoc_member_order = "bysource"
# Types are shown as they are written, so that no library has to be imported for one.
autodoc_use_type_comments = False
python_use_unqualified_type_names = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False

# Commands and files are copied; what a program printed is not.
copybutton_selector = "div.highlight:not(.highlight-text *) pre"

html_theme = "furo"
html_title = "zerostart"
html_show_sourcelink = False
html_copy_source = False
html_static_path = ["_site/static"]
templates_path = ["_site/templates"]
html_css_files = ["site.css"]
html_favicon = "_site/static/favicon.svg"
html_sidebars = {
    "**": [
        "sidebar/brand.html",
        "sidebar/language.html",
        "sidebar/search.html",
        "sidebar/scroll-start.html",
        "sidebar/navigation.html",
        "sidebar/scroll-end.html",
    ]
}
html_theme_options = {
    "source_repository": f"{preparing.repository()}/",
    "source_branch": "main",
    "source_directory": "docs/",
    "top_of_page_buttons": ["view"],
}


def setup(app: object) -> None:
    """Fill in what is generated, and lead links out of this folder to what the site has."""
    app.connect("source-read", preparing.prepare)  # type: ignore[attr-defined]
    app.connect("autodoc-process-docstring", preparing.prepare_docstring)  # type: ignore[attr-defined]
