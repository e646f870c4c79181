"""What is learnt: the model class of a task, and how its batches are made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zerostart.checkpoint.source import resolve_source
from zerostart.errors import CheckpointError, ConfigError
from zerostart.training.config import TaskConfig, TrainConfig

__all__ = [
    "IGNORED_LABEL",
    "Collator",
    "load_tokenizer",
    "make_collator",
    "model_builder",
    "predicted_tokens",
    "weighed",
]

#: The label that the loss of transformers' models leaves out.
IGNORED_LABEL = -100

#: From items of :class:`~zerostart.training.data.Sequences` to the keyword arguments of the model.
Collator = Callable[[Sequence[dict[str, torch.Tensor]]], dict[str, torch.Tensor]]


def read_settings(config: TrainConfig) -> Any:
    """The checkpoint's own configuration, a transformers ``PretrainedConfig``.

    Raises :class:`CheckpointNotFoundError` or :class:`CheckpointError` when there is none to read.
    """
    from transformers import AutoConfig

    directory = _directory_of(config.model.source)
    try:
        return AutoConfig.from_pretrained(directory)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{directory}: no readable model configuration: {error}") from error


def model_builder(task: TaskConfig, settings: Any) -> Callable[[], nn.Module]:
    """A callable that builds the task's model class; ``zerostart.load`` calls it on the meta device.

    It raises :class:`ConfigError` when models of this type have no head for the task.
    """
    from transformers import AutoModelForCausalLM, AutoModelForMaskedLM

    automatic = AutoModelForCausalLM if task.name == "causal-lm" else AutoModelForMaskedLM

    def build() -> nn.Module:
        try:
            model: nn.Module = automatic.from_config(settings)
        except ValueError as error:
            message = f"task {task.name} has no model of type {settings.model_type}"
            raise ConfigError(f"{message}: {error}") from error
        return model

    return build


def load_tokenizer(config: TrainConfig) -> Any:
    """The transformers tokenizer that the data or the model names.

    Raises :class:`CheckpointNotFoundError` or :class:`ConfigError` when there is none.
    """
    from transformers import AutoTokenizer

    directory = _directory_of(config.data.tokenizer or config.model.source)
    try:
        return AutoTokenizer.from_pretrained(directory)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"no tokenizer at {directory} (data.tokenizer can name another): {error}"
        ) from error


def _directory_of(source: str) -> Path:
    """Where the files beside the weights are: a directory, that of a file, or an id's cached snapshot."""
    path = resolve_source(source)
    return path.parent if path.is_file() else path


def make_collator(task: TaskConfig, tokenizer: Any, seed: int) -> Collator:
    """How a list of sequences becomes ``input_ids``, ``attention_mask`` and ``labels``, each [batch, length].

    ``seed`` fixes which tokens a masked task hides. Raises :class:`ConfigError` when the tokenizer has no
    mask token for such a task.
    """
    if task.name == "causal-lm":
        padding = tokenizer.pad_token_id
        return lambda items: _collate_causal(items, 0 if padding is None else padding)
    from transformers import DataCollatorForLanguageModeling

    if tokenizer.mask_token is None:
        raise ConfigError("task masked-lm needs a tokenizer with a mask token; data.tokenizer can name one")
    collator = DataCollatorForLanguageModeling(tokenizer, mlm=True, mlm_probability=task.mask_probability)
    # Not its argument `seed`: that refuses to work in a process that multiprocessing has started.
    collator.generator = collator.get_generator(seed)
    collate: Collator = collator
    return collate


def _collate_causal(items: Sequence[dict[str, torch.Tensor]], padding: int) -> dict[str, torch.Tensor]:
    """Pad on the right. Not transformers' collator: it takes the padding token out of the labels by its id,
    which is the end-of-text token in many models, and that one has to be learnt."""
    length = max(2, *(len(item["input_ids"]) for item in items))  # room for `weighed` to predict something
    shape = (len(items), length)
    input_ids = torch.full(shape, padding, device="cpu")
    labels = torch.full(shape, IGNORED_LABEL, device="cpu")
    attention_mask = torch.zeros(shape, dtype=torch.int64, device="cpu")
    for row, item in enumerate(items):
        tokens = item["input_ids"]
        input_ids[row, : len(tokens)] = tokens
        labels[row, : len(tokens)] = tokens
        attention_mask[row, : len(tokens)] = 1
    return {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels}


def predicted_tokens(task: TaskConfig, labels: torch.Tensor) -> int:
    """How many labels ([batch, length]) the loss of a batch is the mean of."""
    # A causal model predicts each token from those before it, so the first has no prediction.
    counted = labels[:, 1:] if task.name == "causal-lm" else labels
    return int((counted != IGNORED_LABEL).sum())


def weighed(task: TaskConfig, batch: dict[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], int]:
    """``batch`` in a form whose mean loss is a number, and its weight: how many tokens it predicts.

    Loss and gradients of a step are means over the predicted tokens of all its batches on all ranks (what
    transformers calls ``num_items_in_batch``), and a batch counts for as many as it has. Where it has none
    its own mean would be 0 / 0, which spoils a sum even with weight 0; then one label is filled in.
    """
    labels = batch["labels"]
    predicted = predicted_tokens(task, labels)
    if predicted == 0:
        labels, column = labels.clone(), int(task.name == "causal-lm")
        labels[0, column] = batch["input_ids"][0, column]
    return {**batch, "labels": labels}, predicted
