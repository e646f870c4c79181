"""Where names of types in signatures lead: our own to their entry, those of others to their documentation.

A signature says ``Report`` or ``nn.Module``, as the code imports it; Sphinx asks here for what it has no
entry for. What is found nowhere stays a warning, and so fails the build. No inventory is fetched:
the addresses are few, and stand here.
"""

from __future__ import annotations

import re

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment

_PYTHON = "https://docs.python.org/3/library/"
_TORCH = "https://docs.pytorch.org/docs/stable/"
_OTHERS = {
    "os.PathLike": f"{_PYTHON}os.html#os.PathLike",
    "AbstractContextManager": f"{_PYTHON}contextlib.html#contextlib.AbstractContextManager",
    "torch.Tensor": f"{_TORCH}tensors.html#torch.Tensor",
    "torch.device": f"{_TORCH}tensor_attributes.html#torch.device",
    "torch.dtype": f"{_TORCH}tensor_attributes.html#torch.dtype",
    "torch.optim.Optimizer": f"{_TORCH}optim.html#torch.optim.Optimizer",
    "nn.Module": f"{_TORCH}generated/torch.nn.Module.html",
    "DiffusionPipeline": "https://huggingface.co/docs/diffusers/api/pipelines/overview#diffusers.DiffusionPipeline",
    "PretrainedConfig": "https://huggingface.co/docs/transformers/main_classes/configuration",
    "BaseModel": "https://docs.pydantic.dev/latest/api/base_model/",
}
#: The arguments of a call.
_CALL = re.compile(r"\(.*\)$", re.DOTALL)


def resolve(
    app: Sphinx, env: BuildEnvironment, node: addnodes.pending_xref, shown: nodes.Element
) -> nodes.Element | None:
    """A link for a name that Sphinx has no entry for, or None."""
    name = node["reftarget"]
    if node.get("refdomain") != "py":
        return None
    if " " in name:  # the first words of a docstring, which Sphinx takes for a type if a colon follows
        return shown
    if name in _OTHERS:
        return _outside(_OTHERS[name], shown)
    objects = env.domains.python_domain.objects
    found = {full: entry for full, entry in objects.items() if full.rpartition(".")[2] == name}
    if len(found) != 1:
        return None
    (entry,) = found.values()
    uri = app.builder.get_relative_uri(node["refdoc"], entry.docname)
    return nodes.reference("", "", shown, internal=True, refuri=f"{uri}#{entry.node_id}")


def _outside(address: str, shown: nodes.Element) -> nodes.Element:
    return nodes.reference("", "", shown, internal=False, refuri=address)


def link_names(app: Sphinx, doctree: nodes.document, page: str) -> None:
    """Lead code in running text that is one of our names (`zerostart.save`, `PeerError`) to its entry."""
    objects = app.env.domains.python_domain.objects
    errors = {name.rpartition(".")[2]: name for name in objects if name.startswith("zerostart.errors.")}
    for literal in list(doctree.findall(nodes.literal)):
        name = _CALL.sub("", literal.astext())
        entry = objects.get(errors.get(name, name if name.startswith("zerostart.") else ""))
        above = literal.parent
        if entry is None or isinstance(above, (nodes.reference, nodes.title, addnodes.pending_xref)):
            continue
        uri = app.builder.get_relative_uri(page, entry.docname)
        link = nodes.reference("", "", internal=True, refuri=f"{uri}#{entry.node_id}")
        above.replace(literal, link)
        link += literal


def dashes(_app: Sphinx, doctree: nodes.document) -> None:
    """Between the name of an argument and what is said of it Sphinx writes two hyphens, for a dash."""
    for text in list(doctree.findall(nodes.Text)):
        if text == " -- ":
            text.parent.replace(text, nodes.Text(" – "))


def setup(app: Sphinx) -> dict[str, bool]:
    """Connect it."""
    app.connect("doctree-read", dashes)
    app.connect("doctree-resolved", link_names)
    app.connect("missing-reference", resolve)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
