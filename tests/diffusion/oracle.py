"""Import DiffSynth-Studio from the environment or from ``build/diffsynth`` (``make build/diffsynth``).

Only ranks import it, because they end with their test: torchvision, which it needs, changes what
transformers imports.
"""

import functools
import importlib.util
import sys
from pathlib import Path

import pytest
import torch

DIFFSYNTH_FOLDER = Path(__file__).parents[2] / "build" / "diffsynth"
#: Operators for which torchvision's Python code registers implementations, even without its library.
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
_libraries: list[torch.library.Library] = []


def _is_available() -> bool:
    return (DIFFSYNTH_FOLDER / "diffsynth").is_dir() or importlib.util.find_spec("diffsynth") is not None


needs_diffsynth = pytest.mark.skipif(
    not _is_available(), reason="DiffSynth-Studio is not installed: make build/diffsynth"
)


@functools.cache
def import_diffsynth() -> None:
    """Import DiffSynth-Studio in this process, with stand-ins for torchvision's operators."""
    if DIFFSYNTH_FOLDER.is_dir():
        sys.path.append(str(DIFFSYNTH_FOLDER))
    declare_operators()
    import diffsynth.core  # noqa: F401


@functools.cache
def declare_operators() -> None:
    """Declare torchvision's operators: a build for accelerators cannot load them with a CPU torch."""
    if not torch.version.cuda:
        library = torch.library.Library("torchvision", "DEF")
        for name in _OPERATORS:
            library.define(f"{name}(Tensor a) -> Tensor")
        _libraries.append(library)
