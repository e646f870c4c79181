"""Placements of a pipeline's components: where each lies in memory, and in which precision."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from zerostart.errors import ConfigError

if TYPE_CHECKING:
    import torch

KINDS = {
    "shard": "its parameters are shared out over the ranks by the engine",
    "replicate": "whole on every rank",
    "offload": "at rest on the host or on disk, brought in by layers for each use",
    "drop": "whole on every rank until zerostart.drop_components",
}


@dataclass(frozen=True)
class Placement:
    """Where one component of a pipeline lies; ``"offload"`` is short for ``Placement("offload")``.

    Attributes:
        kind: ``shard``, ``replicate``, ``offload`` or ``drop``.
        store: with ``offload``, where the weights are at rest: ``"disk"``, in the files that they came in,
            from which layers are read as they are needed; or ``"host"``, in host memory (page-locked where
            there is a device). None: ``host`` where there is a device, else ``disk``.
        storage_dtype: with ``replicate``, or in a ``host`` store, the floating dtype in which matrices are
            held at rest, such as ``torch.float8_e4m3fn``; vectors (norms, biases) and what the model keeps
            in float32 stay as they are. None: ``compute_dtype``.
        compute_dtype: the floating dtype of the component; None: that of the pipeline.
    """

    kind: str
    store: str | None = None
    storage_dtype: torch.dtype | None = None
    compute_dtype: torch.dtype | None = None

    @property
    def brought_in(self) -> bool:
        """Whether each use of the component brings its parameters in from where they are stored meanwhile."""
        return self.kind == "offload" or self.storage_dtype is not None

    def check(self, component: str) -> None:
        """Raise ConfigError, which names the ``component``, for settings that contradict one another."""
        here = f"placement[{component!r}]"
        if self.kind not in KINDS:
            known = "; ".join(f"{kind!r} ({words})" for kind, words in KINDS.items())
            raise ConfigError(f"{here} is {self.kind!r}; there are {known}")
        if self.store is not None and self.kind != "offload":
            raise ConfigError(f"{here}: store={self.store!r} is for 'offload', not for {self.kind!r}")
        if self.store not in (None, "host", "disk"):
            raise ConfigError(f"{here}: store={self.store!r} is neither 'host' nor 'disk'")
        for name in ("storage_dtype", "compute_dtype"):
            dtype = getattr(self, name)
            if dtype is not None and not getattr(dtype, "is_floating_point", False):
                raise ConfigError(f"{here}: {name}={dtype!r} must be a floating torch.dtype")
        if self.storage_dtype is None:
            return
        if self.kind in ("shard", "drop"):
            raise ConfigError(
                f"{here}: a component placed {self.kind!r} is stored in the dtype in which it computes; "
                "storage_dtype is for 'replicate' and 'offload'"
            )
        if self.store == "disk":
            raise ConfigError(
                f"{here}: on disk a weight has the dtype of its file; storage_dtype is for store='host'"
            )

    @classmethod
    def of(cls, given: object, component: str) -> Placement:
        """Make a placement of what the user gave for a component. Raises ConfigError."""
        made = (
            given if isinstance(given, Placement) else cls(given if isinstance(given, str) else repr(given))
        )
        made.check(component)
        return made
