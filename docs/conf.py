"""The documentation site: Sphinx over the Markdown pages of this folder (``make docs``)."""

import sys
from importlib import metadata
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "_site"))

import pages

project = "zerostart"
author = "the zerostart authors"
copyright = author
release = version = metadata.version("zerostart")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
exclude_patterns = ["_site", "patches"]
root_doc = "index"
suppress_warnings = ["ref.python"]
# What is written is what is shown: an option's two dashes are two dashes.
smartquotes = False

myst_heading_anchors = 4

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
html_css_files = ["site.css"]
html_favicon = "_site/static/favicon.svg"
html_theme_options = {
    "source_repository": f"{pages.REPOSITORY}/",
    "source_branch": "main",
    "source_directory": "docs/",
    "top_of_page_buttons": ["view"],
}


def setup(app: object) -> None:
    """Fill in what is generated, and lead links out of this folder to the repository."""
    app.connect("source-read", pages.prepare)  # type: ignore[attr-defined]
