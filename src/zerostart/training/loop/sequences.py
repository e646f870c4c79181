"""A rank's part of a batch whose sequences several ranks share.

All of them collate the whole batch. Labels are shifted before anything is cut, for the last token of a part
predicts the first one of the next; positions are those in the whole sequence.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import pad

from zerostart.training.tasks.language import IGNORED_LABEL


@dataclass(frozen=True)
class Sharing:
    """Sequences are cut into ``count`` chunks of equal length, of which a rank has ``chunks``, in order.

    Every batch has ``rows`` sequences; to one of fewer such are added as predict nothing.
    """

    chunks: tuple[int, ...]
    count: int
    rows: int

    def part(self, batch: dict[str, torch.Tensor], predicted: int) -> tuple[dict[str, torch.Tensor], int]:
        """This rank's part of ``batch`` ([rows, length]), and how many of its ``predicted`` tokens are there.

        Sequences are padded to what ``count`` divides. A part that predicts nothing gets one label, so that
        its mean loss is a number, and the weight 0.
        """
        held, length = batch["labels"].shape
        more, rows = -length % self.count, self.rows - held
        labels = pad(batch["labels"], (0, more + 1, 0, rows), value=IGNORED_LABEL)[:, 1:]
        positions = torch.arange(length + more, device=labels.device).expand_as(labels)
        whole = {key: pad(batch[key], (0, more, 0, rows)) for key in ("input_ids", "attention_mask")}
        part = {
            key: torch.cat([value.chunk(self.count, dim=1)[chunk] for chunk in self.chunks], dim=1)
            for key, value in {**whole, "labels": labels, "position_ids": positions}.items()
        }
        weight = int((part["labels"] != IGNORED_LABEL).sum())
        if weight == 0:
            part["labels"][0, 0] = part["input_ids"][0, 0]
        return {**part, "shift_labels": part["labels"]}, weight if predicted else 0
