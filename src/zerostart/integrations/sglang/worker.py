"""In an SGLang worker: its connection with a trainer, by SGLang's own door for loaders of weights.

SGLang calls a function that ``custom_weight_loader`` names for an ``update_weights_from_tensor`` whose
``load_format`` is that name, in each of its workers, with the model and the tensors that came. Here a tensor
is empty, and its name says what to do: the weights come by the refit's own transport.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from zerostart.integrations.participant import participant_of
from zerostart.state.refitting.receiver import ModuleWeights
from zerostart.upstream.sglang import updating

logger = logging.getLogger("zerostart")
#: The name under which SGLang is told of ``weight_loader``.
LOADER = "zerostart.serving.sglang_weight_loader"


class SGLangWeights(ModuleWeights):
    """A model in an SGLang worker, for ``Receiver``.

    Between SGLang's begin and end of an update its parameters are as a load finds them; what is packed is
    packed at the end, by SGLang.
    """

    # What was packed is unpacked by SGLang's begin where it can be, and is not always what it was.
    keeps_values = False

    def __init__(self, model: nn.Module) -> None:
        updating.require()
        load: Any = model
        super().__init__(model, load.load_weights, f"SGLang's {type(model).__name__}")

    @contextmanager
    def tracing(
        self,
    ) -> Iterator[tuple[Mapping[str, torch.Tensor], Callable[[Iterable[tuple[str, torch.Tensor]]], object]]]:
        """As ``EngineWeights``."""
        with updating.nothing_derived(self._model), super().tracing() as found:
            yield found

    def stages(
        self, filled: Mapping[str, bool]
    ) -> Iterator[AbstractContextManager[Mapping[str, torch.Tensor]]]:
        """As ``EngineWeights``: one; then what the model derives from its weights is made anew."""
        yield nullcontext(self._tensors)
        with torch.no_grad():
            updating.derive(self._model)


def weight_loader(model: nn.Module, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """For ``custom_weight_loader`` of SGLang: do what the trainer asks of this worker.

    Raises nothing, since SGLang ends where a loader raises: what it fails with is logged, and the trainer
    is told of it by the worker's own connection.
    """
    for text, _ in named_tensors:
        try:
            asked = json.loads(text)
            rank = dist.get_rank() if dist.is_initialized() else 0
            participant = participant_of(model, SGLangWeights(model), f"sglang-{rank}")
            if asked["do"] == "join":
                participant.join(asked["address"], asked["secret"], asked["timeout"])
            elif asked["do"] == "follow":
                participant.follow(asked["version"])
            else:
                participant.leave()
        except Exception as error:  # of a loader, a transport, the trainer
            logger.warning("%s: %s", type(error).__name__, error)
