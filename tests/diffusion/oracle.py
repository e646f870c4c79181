"""DiffSynth-Studio, where it is installed or lies under ``build/diffsynth`` (``make build/diffsynth``).

It is imported by ranks alone, which end with their test: what it needs beside it (torchvision) changes what
transformers imports.
"""

import functools
import importlib.util
import sys
from pathlib import Path

import pytest
import torch

BESIDE = Path(__file__).parents[2] / "build" / "diffsynth"
#: What torchvision's Python parts register implementations for, beside a torch that cannot load its library.
_OPERATORS = [
    "_deform_conv2d_backward",
    "_ps_roi_align_backward",
    "_ps_roi_pool_backward",
    "_roi_align_backward",
    "_roi_pool_backward",
    "deform_conv2d",
    "nms",
    "ps_roi_align",
    "ps_roi_pool",
    "qnms",
    "qroi_align",
    "roi_align",
    "roi_pool",
]
_declared: list[torch.library.Library] = []


def _available() -> bool:
    return (BESIDE / "diffsynth").is_dir() or importlib.util.find_spec("diffsynth") is not None


needs_diffsynth = pytest.mark.skipif(
    not _available(), reason="DiffSynth-Studio is not here: make build/diffsynth"
)


@functools.cache
def import_diffsynth() -> None:
    """Import it in this process, with the parts of torchvision that it wants."""
    if BESIDE.is_dir():
        sys.path.append(str(BESIDE))
    declare_operators()
    import diffsynth.core  # noqa: F401


@functools.cache
def declare_operators() -> None:
    """A torchvision that is built for accelerators cannot load its operators beside a torch for the CPU."""
    if not torch.version.cuda:
        library = torch.library.Library("torchvision", "DEF")
        for name in _OPERATORS:
            library.define(f"{name}(Tensor a) -> Tensor")
        _declared.append(library)
