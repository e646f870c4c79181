"""Drawing samples between two steps: every rank its prompts, and nothing of the training is changed by it."""

from __future__ import annotations

import gc
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zerostart.training.samples.pipeline import Drawing, Prompt
from zerostart.training.samples.settings import SamplesConfig
from zerostart.training.session import Session

__all__ = ["FOLDER", "Sampler", "batches_of", "sample_path"]

#: In the output directory: what is drawn, a folder for each step.
FOLDER = "samples"


def sample_path(directory: Path, step: int, number: int, prompt: str) -> Path:
    """Where the sample of prompt ``number`` goes, but for its suffix; ``directory`` is the run's."""
    words = re.sub(r"\W+", "-", prompt).strip("-")[:40].rstrip("-")
    return directory / FOLDER / f"step-{step:08d}" / f"{number:03d}-{words}".rstrip("-")


def batches_of(prompts: Sequence[Prompt], size: int) -> list[list[int]]:
    """The numbers of ``prompts`` in batches of up to ``size``, in each of which all have the same shapes."""
    alike: dict[tuple[tuple[str, torch.Size], ...], list[int]] = {}
    for number, prompt in enumerate(prompts):
        alike.setdefault(tuple((name, row.shape) for name, row in prompt.items()), []).append(number)
    return [numbers[i : i + size] for numbers in alike.values() for i in range(0, len(numbers), size)]


class Sampler:
    """Draws the prompts of ``settings``, which ``prompts`` has encoded, with the model in training."""

    def __init__(
        self, settings: SamplesConfig, drawing: Drawing, prompts: Sequence[Prompt], negative: Prompt
    ) -> None:
        self.settings = settings
        self._drawing = drawing
        self._prompts = prompts
        self._negative = negative

    def draw(self, session: Session, dtype: torch.dtype) -> dict[int, torch.Tensor]:
        """What the model draws now in ``dtype``: this rank's share, by the numbers of the prompts; collective.

        Each is [F, 3, H, W] from 0 to 1, on the host. The batches are the same for any number of ranks. All
        ranks draw equally often, for a sharded forward is a collective: where the batches do not divide
        evenly, some are drawn again for nothing. Modes and random states stay as they were.
        """
        batches = batches_of(self._prompts, self.settings.batch_size)
        place, count = session.engine.mesh.batch(session.accelerator.process_index)
        drawn: dict[int, torch.Tensor] = {}
        with _undisturbed(session):
            own = session.accelerator.unwrap_model(session.model)
            pipe = self._drawing.opened(_InTraining(session.model, own, session.device, dtype), dtype)
            for start in range(0, len(batches), count):
                numbers = batches[start + place] if start + place < len(batches) else batches[0]
                seeds = [self.settings.seed + number for number in numbers]
                prompts = [self._prompts[number] for number in numbers]
                made = self._drawing.draw(pipe, prompts, self._negative, seeds)
                if start + place < len(batches):
                    drawn.update(zip(numbers, made, strict=True))
        del pipe
        gc.collect()  # the autoencoder: what comes next may need the room
        return drawn


@contextmanager
def _undisturbed(session: Session) -> Iterator[None]:
    """Inside nothing is learnt, and what is drawn at random is nobody's but the samples'."""
    devices = [] if session.device.type == "cpu" else [session.device]
    with torch.random.fork_rng(devices, device_type=session.device.type), torch.no_grad():
        session.model.eval()
        try:
            yield
        finally:
            session.model.train()


class _InTraining(nn.Module):
    """The model in training as a pipeline sees it: called by way of its engine, all else the model's own."""

    def __init__(self, wrapped: nn.Module, own: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        # Not as children: the pipeline must find nothing to move or to cast.
        self.__dict__.update(_wrapped=wrapped, _own=own, _device=device, _dtype=dtype)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.__dict__["_wrapped"](*args, **kwargs)

    @property
    def device(self) -> torch.device:
        """Where it computes; its shards may lie elsewhere."""
        found: torch.device = self.__dict__["_device"]
        return found

    @property
    def dtype(self) -> torch.dtype:
        """What it computes in."""
        found: torch.dtype = self.__dict__["_dtype"]
        return found

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_own"], name)
