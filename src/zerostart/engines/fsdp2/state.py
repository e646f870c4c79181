"""The training state of a model in FSDP2 shards: torch's optimizer steps the shards themselves."""

from __future__ import annotations

from zerostart.engines.training_state import OptimizerState
from zerostart.errors import ConfigError
from zerostart.upstream.torch.fsdp2 import has_unreduced


class FSDP2State(OptimizerState):
    """An optimizer's state, and units that may hold gradients which are not reduced yet."""

    def check_reduced(self) -> None:
        if has_unreduced(self._model):
            raise ConfigError(
                "FSDP2 holds gradients that are not yet reduced (set_requires_gradient_sync(False)): save "
                "after an optimizer step"
            )
