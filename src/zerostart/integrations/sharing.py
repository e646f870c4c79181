"""Sequences that ranks share in an existing script, as accelerate's ``ParallelismConfig`` says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from zerostart.engines import family_of
from zerostart.errors import ConfigError
from zerostart.loading.record import record_of
from zerostart.models import library_of
from zerostart.upstream.accelerate.plugins import parallelism


@dataclass(frozen=True)
class Sharing:
    """How many ranks share each sequence, and the attention implementation that accelerate is told of.

    ``asked``: of this very model, and not by what is set up for the script.
    """

    size: int = 1
    attention: str | None = None
    asked: bool = False

    @classmethod
    def of(cls, engine: str) -> Sharing:
        """What is active for ``engine``. Raises ConfigError for what Ulysses would refuse, or do wrong."""
        found = parallelism()
        if found is None:
            return cls()
        if not family_of(engine).owns_optimizer:
            return cls(found.cp_size, "sdpa" if found.cp_size > 1 else None)
        size, handler = found.sp_size, found.sp_handler
        if size == 1:
            return cls()
        if handler.sp_attn_implementation is None:
            raise ConfigError(
                f"ParallelismConfig(sp_size={size}) names no attention implementation; pass "
                "sp_handler=DeepSpeedSequenceParallelConfig(sp_attn_implementation='sdpa')"
            )
        length = None if handler.sp_seq_length_is_variable else handler.sp_seq_length
        if length is not None and length % size:
            raise ConfigError(
                f"ParallelismConfig(sp_size={size}) does not divide sp_seq_length={length}; pad the "
                "sequences, or use another sp_size"
            )
        return cls(size, handler.sp_attn_implementation)

    def merged(self, asked: int) -> Sharing:
        """With what ``enabled`` asks for. Raises ConfigError where both do, and differ."""
        if self.size > 1 and asked not in (1, self.size):
            raise ConfigError(
                f"sequence_parallel={asked} is asked for, and accelerate's ParallelismConfig has {self.size} "
                "ranks share sequences; leave sequence_parallel out"
            )
        return self if asked == 1 else replace(self, size=asked, asked=True)

    def unless(self, obstacle: str) -> Sharing:
        """What holds for a model with that ``obstacle``, in words, to sharing sequences; "" for none.

        A script whose ranks share sequences may load other models, such as an encoder, which each rank calls
        with sequences of its own. It is refused when it is prepared for training.
        """
        return ALONE if obstacle and not self.asked else self

    def check(self, model: nn.Module) -> None:
        """Raise ConfigError for a model whose attention Ulysses is told otherwise of."""
        known = library_of(model).attention(model)
        if self.attention not in (None, known.implementation) and not known.obstacle:
            raise ConfigError(
                f"sp_attn_implementation={self.attention!r} of ParallelismConfig, and {type(model).__name__} "
                f"has attn_implementation={known.implementation!r}; give both the same"
            )


#: Every rank has sequences of its own.
ALONE = Sharing()


def check_sharing(model: nn.Module) -> None:
    """Raise ConfigError where other ranks share sequences now than the loaded ``model`` was loaded for."""
    engine = record_of(model).engine
    loaded, now = engine.mesh.sequence_parallel, Sharing.of(engine.name).size
    if loaded == now:
        return
    key = "sp_size" if engine.owns_optimizer else "cp_size"
    if loaded == 1 and (obstacle := library_of(model).attention(model).obstacle):
        raise ConfigError(
            f"{type(model).__name__} has {obstacle}, so that no ranks can share its sequences, and "
            f"accelerate has {now} of them do so; prepare it without a ParallelismConfig, or with {key}=1"
        )
    raise ConfigError(
        f"{type(model).__name__} was loaded with sequence_parallel={loaded}, and accelerate has {now} "
        "ranks share a sequence; give the Accelerator or TrainingArguments, made before the model, "
        f"ParallelismConfig({key}={max(loaded, now)})"
    )


def check_tensors(model: nn.Module, config: Mapping[str, Any] | None = None) -> None:
    """Raise ConfigError where ranks that share tensors of the loaded ``model`` would see different batches.

    ``config`` is accelerate's of DeepSpeed. DeepSpeed itself compares the first forward's inputs alone.
    """
    loaded, shared = record_of(model).engine.mesh.tensor_parallel, parallelism()
    now = 1 if shared is None else shared.tp_size
    configured = ((config or {}).get("tensor_parallel") or {}).get("autotp_size", 0)
    if loaded > 1 and loaded not in (now, configured):
        there = (
            ""
            if config is None
            else (f', or DeepSpeed\'s configuration "tensor_parallel": {{"autotp_size": {loaded}}}')
        )
        raise ConfigError(
            f"{type(model).__name__} was loaded with tensor_parallel={loaded}, whose ranks must see one "
            "batch, and accelerate gives each rank a batch of its own; give the Accelerator or "
            f"TrainingArguments, made before the model, ParallelismConfig(tp_size={loaded}){there}"
        )
    if config is None and loaded != now:
        raise ConfigError(
            f"{type(model).__name__} was loaded with tensor_parallel={loaded}, and accelerate has {now} "
            "ranks share tensors; make the Accelerator or TrainingArguments before the model"
        )
