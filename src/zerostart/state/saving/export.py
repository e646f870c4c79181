"""``zerostart export``: what a run left as a plain directory, which is a conversion by one process."""

from __future__ import annotations

import os

import torch

from zerostart.state.converting.convert import Converted, convert


def export(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    dtype: torch.dtype | None = None,
    max_shard_size: int | str = "5GB",
) -> Converted:
    """Write the model that lies at ``source`` as an ordinary directory, or below a URL, ``out``.

    It is a conversion to "hf" of weights alone: raises what ``convert`` raises.
    """
    return convert(source, out, "hf", dtype=dtype, max_shard_size=max_shard_size, weights_alone=True)
