"""Batches and reference training for sequence parallelism."""

from collections.abc import Iterator
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy

from tests.parity import STEPS, VOCABULARY, Trace, optimizer

ROWS, LENGTH = 4, 12
IGNORED = -100
#: Lengths of the documents of each row.
PACKED = ((5, 7), (12,), (3, 4, 5), (9, 3))
PADDED = ((12,), (4,), (9,), (1,))

Batch = dict[str, torch.Tensor]


def steps(kind: str) -> Iterator[Batch]:
    """Yield whole batches, each tensor [ROWS, LENGTH].

    No token is predicted from another document; padding predicts nothing.
    """
    generator = torch.Generator().manual_seed(7)
    for _ in range(STEPS):
        tokens = torch.randint(3, VOCABULARY, (ROWS, LENGTH), generator=generator)
        labels, mask = tokens.clone(), torch.zeros_like(tokens)
        positions = torch.arange(LENGTH).repeat(ROWS, 1)
        for row, documents in enumerate(PACKED if kind == "packed" else PADDED):
            start = 0
            for length in documents:
                labels[row, start] = IGNORED
                mask[row, start : start + length] = 1
                if kind == "packed":
                    positions[row, start : start + length] = torch.arange(length)
                start += length
            labels[row, start:] = IGNORED
        yield {"input_ids": tokens, "position_ids": positions, "labels": labels, "attention_mask": mask}


def summed_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the summed loss of the predicted tokens."""
    return cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum")


def shift(labels: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(labels, (0, 1), value=IGNORED)[:, 1:]


def part_of(batch: Batch, index: int, size: int) -> Batch:
    """Return one rank's part of every sequence."""
    whole = {**batch, "labels": shift(batch["labels"])}
    return {key: value.chunk(size, dim=1)[index] for key, value in whole.items()}


def train_alone(path: Path, kind: str) -> Trace:
    """Train one process with only transformers and torch."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path).train()
    optim, trace = optimizer(model), Trace()
    for batch in steps(kind):
        # Without a mask, transformers masks packed documents by their positions.
        mask = None if kind == "packed" else batch["attention_mask"]
        logits = model(
            batch["input_ids"], attention_mask=mask, position_ids=batch["position_ids"], use_cache=False
        ).logits
        labels = shift(batch["labels"])
        trace.step(model, optim, summed_loss(logits, labels) / (labels != IGNORED).sum())
    trace.weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    return trace
