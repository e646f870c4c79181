"""The optimizer that DiffSynth's scripts are told to use (``--customized_optimizer``).

The scripts set no seed: it is set here, after the model is loaded and before the first batch is drawn, so
that two routes draw the same. What each rank did until a step ends is written down.
"""

import json
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from tests.diffusion.script_memory import peak

_steps: list[dict[str, float]] = []


def AdamW(parameters: Iterable[torch.nn.Parameter], **settings: Any) -> torch.optim.Optimizer:
    rank = int(os.environ.get("RANK", "0"))
    torch.manual_seed(1000 + rank)
    made = torch.optim.AdamW(parameters, **settings)
    if "ZEROSTART_RECORD" in os.environ:
        made.register_step_post_hook(lambda *_: _record(rank))
    return made


def _record(rank: int) -> None:
    """Seconds since the launch, and the most memory that this process has had, at the end of a step."""
    _steps.append({"seconds": time.time() - float(os.environ["ZEROSTART_BEGUN"]), "peak": peak()})
    Path(os.environ["ZEROSTART_RECORD"], f"steps-{rank}.json").write_text(json.dumps(_steps))
