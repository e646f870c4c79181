"""What optimizers keep, and what their update takes beside it.

Counted in copies of what they update. ``torch.optim`` runs over tensors one by one on the host (AdamW then
has a square root and a quotient of the tensor at hand), and over all of them at once on accelerators
(``foreach``, one intermediate list). Fused kernels, DeepSpeed's FusedAdam and DeepSpeedCPUAdam among them,
take nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from zerostart.errors import ConfigError

__all__ = ["OPTIMIZERS", "Optimizer", "optimizer_of"]


@dataclass(frozen=True)
class Optimizer:
    """``states``: copies that stay; ``host_scratch`` and ``device_scratch``: copies during an update."""

    name: str
    states: int
    host_scratch: int = 0
    device_scratch: int = 0

    def scratch(self, on_host: bool) -> int:
        """Copies of what is updated at a time that the update takes for itself."""
        return self.host_scratch if on_host else self.device_scratch


OPTIMIZERS: Mapping[str, Optimizer] = {
    made.name: made
    for made in (
        Optimizer("adamw", 2, 2, 1),
        Optimizer("adam", 2, 2, 1),
        Optimizer("fused_adamw", 2),
        Optimizer("momentum", 1),
        Optimizer("sgd", 0),
    )
}
#: Names in a DeepSpeed configuration for fused kernels.
_CONFIGURED = {"adam": "fused_adamw", "adamw": "fused_adamw", "sgd": "sgd"}


def optimizer_of(name: str | None, config: Mapping[str, Any] | None) -> Optimizer:
    """The optimizer of that name; None: the one that a DeepSpeed configuration makes, else AdamW.

    Raises ConfigError for an unknown name.
    """
    if name is None:
        section = (config or {}).get("optimizer")
        kind = str(section.get("type", "")).lower() if isinstance(section, Mapping) else ""
        plain = isinstance(section, Mapping) and (section.get("params") or {}).get("torch_adam") is True
        name = "adamw" if plain or kind not in _CONFIGURED else _CONFIGURED[kind]
    if name not in OPTIMIZERS:
        raise ConfigError(f"optimizer={name!r} is unknown; choose one of {', '.join(OPTIMIZERS)}")
    return OPTIMIZERS[name]
