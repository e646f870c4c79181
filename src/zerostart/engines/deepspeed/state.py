"""The training state that a DeepSpeed engine keeps: masters, moments, counters, the loss scale, its window."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch

from zerostart.engines.training_state import (
    Gradient,
    Stateful,
    TrainingState,
    check_accumulation,
    members_of,
)
from zerostart.errors import ConfigError
from zerostart.upstream.deepspeed.state import engine as upstream
from zerostart.upstream.deepspeed.state import steps as optimizers


class DeepSpeedState(TrainingState):
    """The state of a model inside a ``DeepSpeedEngine``."""

    owns_optimizer = True

    def __init__(self, engine: Any) -> None:
        """Raises ConfigError or EngineError for a state that cannot be read where the engine has it now."""
        optimizers.check_movable(engine)
        self._engine = engine
        self.steps = optimizers.steps_of(engine)

    def counters(self) -> dict[str, Any]:
        engine = self._engine
        found = {"name": "deepspeed", "stage": upstream.engine_stage(engine), **upstream.counters(engine)}
        if upstream.is_window_open(engine):
            found["window"] = upstream.window(engine)
        return found

    def restore_counters(self, saved: Mapping[str, Any]) -> None:
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
        if found is None:
            raise ConfigError(
                "the engine is in the middle of a window of gradient accumulation, and its gradients are not "
                "yet reduced (below ZeRO stage 2, and where stage 2 offloads them): save after an optimizer "
                "step"
            )
        return list(zip(members_of(self.steps), found, strict=True))

    def make_gradients(self, wanted: Collection[int], saved: Mapping[str, Any]) -> Sequence[Gradient] | None:
        if not wanted:
            return []
        room = optimizers.gradients(self._engine, self.steps, make=True) if "window" in saved else None
        return None if room is None else list(zip(members_of(self.steps), room, strict=True))

    def check_window(self, saved: Mapping[str, Any], with_gradients: bool, source: str) -> None:
        if "window" in saved:
            now = self._engine.gradient_accumulation_steps()
            check_accumulation(saved["window"].get("accumulation"), now, "the engine", source)
