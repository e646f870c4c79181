"""What a script over accelerate does, written down: the loss of each step, and the weights at the end.

Some example scripts show only a mean of losses, and save partitions in the place of weights under ZeRO-3.
Imported in the same way with and without zerostart; changes nothing that the script computes.
"""

from __future__ import annotations

import functools
import json
import os
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType

# An example script of transformers asks for it by the name that it had before accelerate 1.0.
if not hasattr(DistributedType, "TPU"):
    DistributedType.TPU = "TPU"  # type: ignore[attr-defined]

_losses: list[float] = []
_models: list[Any] = []


def _wrap(name: str) -> Any:
    def decorate(after: Any) -> Any:
        original = getattr(Accelerator, name)

        @functools.wraps(original)
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            return after(original, self, *args, **kwargs)

        setattr(Accelerator, name, method)
        return method

    return decorate


@_wrap("backward")
def _backward(original: Any, self: Any, loss: Any, **kwargs: Any) -> Any:
    _losses.append(loss.detach().float().item())
    return original(self, loss, **kwargs)


@_wrap("prepare")
def _prepare(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    prepared = original(self, *args, **kwargs)
    for item in prepared if isinstance(prepared, (list, tuple)) else (prepared,):
        if isinstance(item, torch.nn.Module):
            _models.append(item)
    return prepared


@_wrap("end_training")
def _end(original: Any, self: Any) -> Any:
    folder = Path(os.environ["ZEROSTART_RECORD"])
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"losses-{self.process_index}.json").write_text(json.dumps(_losses))
    state = self.get_state_dict(_models[0])
    if self.is_main_process:
        torch.save(
            {name: tensor.detach().clone().cpu() for name, tensor in state.items()}, folder / "state.pt"
        )
    return original(self)
