"""The state side of DeepSpeed: masters, moments, counters, loss scale and window of an engine."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import torch
from torch import nn

from zerostart.distributed.world import World
from zerostart.engines.shard import Shard
from zerostart.engines.state import (
    Counters,
    Gradient,
    Master,
    StateEngine,
    Stateful,
    TrainingState,
    check_accumulation,
    members_of,
)
from zerostart.errors import ConfigError, EngineError
from zerostart.upstream.deepspeed.state import editing
from zerostart.upstream.deepspeed.state import engine as upstream
from zerostart.upstream.deepspeed.state import steps as optimizers
from zerostart.upstream.deepspeed.zero3.partitions import is_gathered

if TYPE_CHECKING:
    from deepspeed.runtime.engine import DeepSpeedEngine


class DeepSpeedState(TrainingState):
    """The state of a model inside a ``DeepSpeedEngine``."""

    owns_optimizer = True

    def __init__(self, engine: DeepSpeedEngine) -> None:
        """Raises ConfigError or EngineError for a state that cannot be read where the engine has it now."""
        optimizers.check_movable(engine)
        self._engine = engine
        self.steps = optimizers.steps_of(engine)

    def counters(self) -> Counters:
        engine = self._engine
        found = {"name": "deepspeed", "stage": upstream.engine_stage(engine), **upstream.counters(engine)}
        # A window of accumulated gradients is written only where one is open; the key's absence says that
        # none was.
        if upstream.is_window_open(engine):
            found["window"] = upstream.window(engine)
        return found

    def restore_counters(self, saved: Counters) -> None:
        upstream.set_counters(self._engine, saved)
        if "window" in saved:
            upstream.set_window(self._engine, saved["window"])

    def components(self) -> Mapping[str, Stateful]:
        schedule = getattr(self._engine, "lr_scheduler", None)
        return {"schedule": schedule} if isinstance(schedule, Stateful) else {}

    def gradients(self, is_replicated: Callable[[torch.Tensor], bool]) -> Sequence[Gradient]:
        """Those of an open window, of which every rank has the run that its optimizer steps."""
        if not upstream.is_window_open(self._engine):
            return []
        found = optimizers.gradients(self._engine, self.steps)
        # None: gradients lie unreduced in buffers of each rank's own, which no other layout could be made of.
        if found is None:
            raise ConfigError(
                "the engine is in the middle of gradient accumulation, and its gradients are not reduced "
                "yet (below ZeRO stage 2, and at stage 2 when they are offloaded): save after an "
                "optimizer step"
            )
        return list(zip(members_of(self.steps), found, strict=True))

    def make_gradients(self, wanted: Collection[int], saved: Counters) -> Sequence[Gradient] | None:
        # Nobody asks for gradients: then none are made, whatever was saved.
        if not wanted:
            return []
        room = optimizers.gradients(self._engine, self.steps, make=True) if "window" in saved else None
        return None if room is None else list(zip(members_of(self.steps), room, strict=True))

    def check_window(self, saved: Counters, with_gradients: bool, source: str) -> None:
        if "window" in saved:
            now = self._engine.gradient_accumulation_steps()
            check_accumulation(saved["window"].get("accumulation"), now, "the engine", source)


class DeepSpeedStateEngine(StateEngine):
    """The state side of DeepSpeed as an engine, at every stage."""

    @classmethod
    def find_shards(cls, model: nn.Module, world: World) -> dict[str, Shard]:
        """ZeRO-3 partitions; the other stages keep parameters whole."""
        from zerostart.engines.deepspeed.partitioning import current_shards

        return current_shards(model)

    @classmethod
    def has_own_values(cls, parameter: torch.Tensor) -> bool:
        """Of the experts of DeepSpeed's MoE."""
        return editing.has_own_values(parameter)

    @classmethod
    def training_state(cls, model: nn.Module, optimizer: object) -> TrainingState | None:
        engine = upstream.engine_of(model)
        if engine is None:
            upstream.check_engine_given(model.parameters())
            return None
        return DeepSpeedState(engine)

    @classmethod
    def drop_gathered(cls, parameters: Iterable[torch.Tensor]) -> None:
        upstream.drop_gathered(parameters)

    @classmethod
    def is_gathered(cls, parameter: torch.Tensor) -> bool:
        """Inside ``GatheredParameters``, whose modifier's values are kept, or nobody's."""
        return is_gathered(parameter)

    @classmethod
    def check_editable(cls, parameter: torch.Tensor, name: str) -> None:
        editing.check_editable(parameter, name)

    @classmethod
    def master_of(cls, parameter: torch.Tensor) -> AbstractContextManager[Master | None]:
        """Gathered copies of a changed partition are gone afterwards. Raises UnsupportedVersionError."""
        return editing.master_of(parameter)

    @classmethod
    def check_replaceable(cls, model: nn.Module, parameter: torch.Tensor, action: str) -> None:
        if editing.optimizer_of(parameter) is not None:
            raise EngineError(
                f"{action} after DeepSpeed has made an optimizer for them; resize them before "
                "deepspeed.initialize"
            )
