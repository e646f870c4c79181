"""The trainer behind ``zerostart train``: tasks, data, loop and export.

Extend it with a class derived from ``Task``, named by ``register_task``, and with optimizers of your own
(``register_elementwise_optimizer``).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zerostart.engines.optimizers import register_elementwise_optimizer
    from zerostart.training.config.sections import TaskConfig
    from zerostart.training.loop.task import Batch, Collator, Items, Task, register_task

__all__ = [
    "Batch",
    "Collator",
    "Items",
    "Task",
    "TaskConfig",
    "register_elementwise_optimizer",
    "register_task",
]


#: Module of each name, imported on first use so that ``import zerostart`` stays quick.
_PLACES = {
    "TaskConfig": "zerostart.training.config.sections",
    "register_elementwise_optimizer": "zerostart.engines.optimizers",
}


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(importlib.import_module(_PLACES.get(name, "zerostart.training.loop.task")), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
