"""What is used of the objects of DiffSynth's training scripts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import torch


class ModelLogger(Protocol):
    """``ModelLogger``: where what is trained is saved, and under which names."""

    output_path: str
    remove_prefix_in_ckpt: str | None
    #: The script's own converter.
    state_dict_converter: Callable[[dict[str, torch.Tensor]], Mapping[str, torch.Tensor]]


class TrainingModule(Protocol):
    """``DiffusionTrainingModule``."""

    def export_trainable_state_dict(
        self, state_dict: dict[str, torch.Tensor], remove_prefix: str | None
    ) -> dict[str, torch.Tensor]:
        """Of these tensors, those that are trained."""
        ...
