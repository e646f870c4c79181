"""What is used of accelerate's and the Trainer's objects; their own classes are untyped."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import nn


class FSDPPlugin(Protocol):
    """``FullyShardedDataParallelPlugin``."""

    fsdp_version: int
    #: A policy of torch, or one of its functions.
    auto_wrap_policy: Any
    activation_checkpointing: bool
    cpu_offload: object
    ignored_modules: object
    mixed_precision_policy: object
    reshard_after_forward: object
    transformer_cls_names_to_wrap: list[str] | None

    def set_mixed_precision(self, mixed_precision: str) -> None:
        """Train in that precision."""
        ...


class SequenceHandler(Protocol):
    """``DeepSpeedSequenceParallelConfig``."""

    sp_seq_length: int | None
    sp_seq_length_is_variable: bool
    sp_attn_implementation: str | None


class Parallelism(Protocol):
    """``ParallelismConfig``: numbers of ranks."""

    tp_size: int
    cp_size: int
    sp_size: int
    dp_replicate_size: int
    sp_handler: SequenceHandler


class AcceleratorState(Protocol):
    """``AcceleratorState``."""

    fsdp_plugin: FSDPPlugin | None
    deepspeed_plugin: Any


class Accelerator(Protocol):
    """``Accelerator``."""

    is_fsdp2: bool
    state: AcceleratorState
    gradient_accumulation_steps: int
    _optimizers: Sequence[torch.optim.Optimizer]

    def unwrap_model(self, model: nn.Module, keep_torch_compile: bool = True) -> nn.Module:
        """The model in a wrapper."""
        ...


class TrainingArguments(Protocol):
    """``TrainingArguments`` of transformers."""

    output_dir: str
    save_on_each_node: bool
    push_to_hub: bool
    hub_revision: str | None


class Schedule(Protocol):
    """A schedule of learning rates."""

    def state_dict(self) -> dict[str, object]:
        """What it goes on from."""
        ...

    def load_state_dict(self, state_dict: dict[str, object]) -> None:
        """Go on from there."""
        ...


class Trainer(Protocol):
    """``Trainer`` of transformers."""

    args: TrainingArguments
    accelerator: Accelerator
    model: nn.Module
    optimizer: torch.optim.Optimizer
    lr_scheduler: Schedule
    is_deepspeed_enabled: bool

    def _save(self, output_dir: str, state_dict: dict[str, torch.Tensor]) -> None: ...

    def push_to_hub(self, *, commit_message: str, revision: str | None) -> object:
        """Upload what was saved."""
        ...
