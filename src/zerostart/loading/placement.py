"""Placements of a pipeline's components: kind of memory, and dtype."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from zerostart.errors import ConfigError

if TYPE_CHECKING:
    import torch

KINDS = {
    "shard": "the engine shards its parameters over the ranks",
    "replicate": "whole on every rank",
    "offload": "stored on the host or on disk, and fetched layer by layer",
    "drop": "whole on every rank until zerostart.drop_components",
}


@dataclass(frozen=True)
class Placement:
    """Memory and dtypes of a pipeline's component; ``"offload"`` is short for ``Placement("offload")``.

    Attributes:
        kind: ``shard``, ``replicate``, ``offload`` or ``drop``.
        store: storage of an ``offload`` component. ``"disk"``: layers are read from the checkpoint's files.
            ``"host"``: host memory, page-locked if there is a device. None: ``host`` with a device,
            ``disk`` without one.
        storage_dtype: floating dtype in which matrices are stored, such as ``torch.float8_e4m3fn``, with
            ``replicate`` or a ``host`` store. Vectors (norms, biases) and float32 tensors of the model keep
            their dtype. None: ``compute_dtype``.
        compute_dtype: floating dtype of the component; None: the pipeline's.
    """

    kind: str
    store: str | None = None
    storage_dtype: torch.dtype | None = None
    compute_dtype: torch.dtype | None = None

    @property
    def is_fetched(self) -> bool:
        """True if each use of the component fetches its parameters from a store."""
        return self.kind == "offload" or self.storage_dtype is not None

    def check(self, component: str) -> None:
        """Raise ConfigError, naming ``component``, if the settings contradict each other."""
        entry = f"placement[{component!r}]"
        if self.kind not in KINDS:
            kinds = "; ".join(f"{kind!r} ({words})" for kind, words in KINDS.items())
            raise ConfigError(f"{entry} is {self.kind!r}; there are {kinds}")
        if self.store is not None and self.kind != "offload":
            raise ConfigError(f"{entry}: store={self.store!r} is for 'offload', not for {self.kind!r}")
        if self.store not in (None, "host", "disk"):
            raise ConfigError(f"{entry}: store={self.store!r} is neither 'host' nor 'disk'")
        for name in ("storage_dtype", "compute_dtype"):
            dtype = getattr(self, name)
            if dtype is not None and not getattr(dtype, "is_floating_point", False):
                raise ConfigError(f"{entry}: {name}={dtype!r} must be a floating torch.dtype")
        if self.storage_dtype is None:
            return
        if self.kind in ("shard", "drop"):
            raise ConfigError(
                f"{entry}: a component placed {self.kind!r} is stored in the dtype in which it computes; "
                "storage_dtype is for 'replicate' and 'offload'"
            )
        if self.store == "disk":
            raise ConfigError(
                f"{entry}: on disk a weight has the dtype of its file; storage_dtype is for store='host'"
            )

    @classmethod
    def of(cls, value: object, component: str) -> Placement:
        """Convert the user's value for a component to a placement. Raises ConfigError."""
        if isinstance(value, Placement):
            placement = value
        else:
            placement = cls(value if isinstance(value, str) else repr(value))
        placement.check(component)
        return placement
