"""``zerostart export``: what a run left as a plain directory, which is a conversion by one process."""

from __future__ import annotations

import os

import torch

from zerostart.state.converting.convert import Converted, converted
from zerostart.state.converting.targets import Asked, Options, check_dtype, target_format


def export(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    dtype: torch.dtype | None = None,
    max_shard_size: int | str = "5GB",
) -> Converted:
    """Write the model that lies at ``source`` as an ordinary directory, or below a URL, ``out``.

    It is a conversion to "hf" of weights alone, which may replace a model that is there: raises what
    ``convert`` raises.
    """
    check_dtype(dtype)
    options = Options(dtype, max_shard_size)
    return converted(Asked(source, target_format("hf"), options, weights_alone=True, replaces=True), out)
