"""Private parts of transformers: the forwards of its tensor-parallel styles.

Used of it: the registry ``ALL_PARALLEL_STYLES`` of ``transformers.distributed.parallel_utils`` (in 5.17 of
``transformers.distributed.tensor_parallel``) and each style's ``install_forward(module, mesh)``, which
replaces ``module.forward``; ``mla_kv_a_proj`` looks for ``module.config``.
"""

from __future__ import annotations

import functools
from typing import Any

from torch import nn

from zerostart.errors import UnsupportedVersionError

__all__ = ["require", "run_in_style"]


@functools.cache
def _styles() -> Any:
    """The registry, filled."""
    import transformers
    from transformers.distributed import tensor_parallel

    try:
        from transformers.distributed import parallel_utils
    except ImportError:
        parallel_utils = tensor_parallel
    styles: Any = getattr(parallel_utils, "ALL_PARALLEL_STYLES", None)
    if not hasattr(getattr(tensor_parallel, "TensorParallelLayer", None), "install_forward"):
        styles = None
    if styles is None:
        raise UnsupportedVersionError(
            "tensor_parallel needs a transformers whose styles zerostart knows, such as 5.23; "
            f"{transformers.__version__} is installed"
        )
    return styles


def require() -> None:
    """Raise UnsupportedVersionError unless the styles are there."""
    _styles()


def run_in_style(model: Any, module: nn.Module, style: str, mesh: Any) -> None:
    """Make ``module`` of ``model`` run over the tensor-parallel ``mesh``, with its parameters cut."""
    layer: Any = _styles()[style]
    if style == "mla_kv_a_proj":
        owner: Any = module
        owner.config = model.config.get_text_config()
    layer.install_forward(module, mesh)
