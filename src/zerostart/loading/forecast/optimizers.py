"""What optimizers keep, and what their update takes beside it.

Counted in copies of what they update. ``torch.optim`` runs over tensors one by one on the host (AdamW then
has a square root and a quotient of the tensor at hand), and over all of them at once on accelerators
(``foreach``, one intermediate list). Fused kernels, DeepSpeed's FusedAdam and DeepSpeedCPUAdam among them,
take nothing.
"""

from __future__ import annotations

from collections.abc import Mapping

from zerostart.engines.forecast import OptimizerCost
from zerostart.errors import ConfigError

OPTIMIZERS: Mapping[str, OptimizerCost] = {
    made.name: made
    for made in (
        OptimizerCost("adamw", 2, 2, 1),
        OptimizerCost("adam", 2, 2, 1),
        OptimizerCost("fused_adamw", 2),
        OptimizerCost("momentum", 1),
        OptimizerCost("sgd", 0),
    )
}


def optimizer_of(name: str | None, configured: str | None) -> OptimizerCost:
    """The optimizer of that name; None: the one that the engine is ``configured`` to make, else AdamW.

    Raises ConfigError for an unknown name.
    """
    name = name or configured or "adamw"
    if name not in OPTIMIZERS:
        raise ConfigError(f"optimizer={name!r} is unknown; choose one of {', '.join(OPTIMIZERS)}")
    return OPTIMIZERS[name]
