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
    "sphinxcontrib.mermaid",
]
exclude_patterns = ["_site"]
root_doc = "index"

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

html_theme = "furo"
html_title = "zerostart"
html_show_sourcelink = False
html_copy_source = False


def setup(app: object) -> None:
    """Fill in what is generated, and lead links out of this folder to what the site has."""
    app.connect("source-read", preparing.prepare)  # type: ignore[attr-defined]
