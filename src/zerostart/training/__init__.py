"""The runner: from a configuration to a trained model in a directory; tasks, data and export.

For tasks of one's own: the class ``Task``, and ``register_task``, by which a configuration knows it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from zerostart.training.registry import register_task

if TYPE_CHECKING:
    from zerostart.training.sections import TaskConfig
    from zerostart.training.tasks.base import Batch, Collator, Items, Task

__all__ = ["Batch", "Collator", "Items", "Task", "TaskConfig", "register_task"]


def __getattr__(name: str) -> Any:
    # Not imported before they are asked for: ``import zerostart`` is to be quick.
    if name == "TaskConfig":
        from zerostart.training import sections

        return sections.TaskConfig
    if name in __all__:
        from zerostart.training.tasks import base

        return getattr(base, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
