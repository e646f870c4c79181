"""What ``zerostart train`` runs: tasks, data, loop and export.

For tasks of one's own: the class ``Task``, and ``register_task``, by which a configuration knows it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zerostart.training.config.sections import TaskConfig
    from zerostart.training.loop.task import Batch, Collator, Items, Task, register_task

__all__ = ["Batch", "Collator", "Items", "Task", "TaskConfig", "register_task"]


#: Where each is. Not imported before they are asked for: ``import zerostart`` is to be quick.
_PLACES = {"TaskConfig": "config.sections"}


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(importlib.import_module(f"{__name__}.{_PLACES.get(name, 'loop.task')}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
