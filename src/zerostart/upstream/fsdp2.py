"""Private parts of FSDP2: telling it that its local tensors have been replaced.

Known for torch 2.11 to 2.13. Used of it: ``FSDPModule._apply``, which resets the references that the
parameter groups keep, as it does after any ``Module.to``.
"""

from __future__ import annotations

import functools

import torch
from torch import nn

from zerostart.errors import UnsupportedVersionError

__all__ = ["SUPPORTED", "adopt_local_tensors"]

#: First known and first unknown version.
SUPPORTED = ((2, 11), (2, 14))


@functools.cache
def _check() -> None:
    from torch.distributed.fsdp import FSDPModule

    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if not SUPPORTED[0] <= version < SUPPORTED[1] or "_apply" not in vars(FSDPModule):
        low, high = (".".join(map(str, v)) for v in SUPPORTED)
        raise UnsupportedVersionError(
            f"torch {torch.__version__} is installed; zerostart knows FSDP2 of versions from {low} to "
            f"before {high}"
        )


def adopt_local_tensors(model: nn.Module) -> None:
    """Make FSDP2's parameter groups look at the parameters that the modules now hold."""
    _check()
    model._apply(lambda tensor: tensor)  # type: ignore[no-untyped-call]  # torch leaves it untyped
