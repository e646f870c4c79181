"""ZeRO-3 partitions that are computed with and not trained."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

#: Of a configuration that is for training, what an engine without an optimizer takes as well.
KEPT = ("zero_optimization", "bf16", "fp16", "communication_data_type", "prescale_gradients")


def serve(model: nn.Module, config: Mapping[str, Any] | None) -> None:
    """Have ``deepspeed.initialize`` register its hooks on ``model``, frozen; collective.

    The module itself is called then, and not the engine, which lives as long as the module.
    """
    import deepspeed

    model.requires_grad_(False)
    own = {name: value for name, value in (config or {}).items() if name in KEPT}
    own["zero_optimization"] = {**own.get("zero_optimization", {}), "stage": 3}
    own["train_micro_batch_size_per_gpu"] = 1
    engine, *_ = deepspeed.initialize(model=model, config=own)
    # Beside the modules, of which it is none: it would be found in itself.
    vars(model)["_zerostart_engine"] = engine
