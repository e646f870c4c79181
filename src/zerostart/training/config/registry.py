"""Tasks by name: ours, those that another package registers, and classes named by where they are."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

from zerostart.errors import ConfigError
from zerostart.training.loop.task import Task

#: Where the class of each task is; a module is imported when its task is first asked for.
_TASKS: dict[str, str | type[Task]] = {
    "causal-lm": "zerostart.training.tasks.language:CausalLanguage",
    "masked-lm": "zerostart.training.tasks.language:MaskedLanguage",
    "flow-matching": "zerostart.training.diffusion.flow:FlowMatching",
}


def register_task(name: str, task: type[Task]) -> None:
    """Register ``task`` as the class that ``task.name: NAME`` of a configuration means.

    Raises :class:`ConfigError` for a name that is taken by another class, or one with a colon in it.
    """
    if ":" in name or not name:
        raise ConfigError(
            f"register_task: {name!r} is not a valid name for a task: it must have no colon in it"
        )
    if _TASKS.get(name, task) is not task:
        raise ConfigError(f"register_task: {name!r} is the name of another task already")
    _TASKS[name] = task


def known_tasks() -> tuple[str, ...]:
    """The names that are registered."""
    return tuple(_TASKS)


def task_class(name: str) -> type[Task]:
    """The task that is registered as ``name``, or the class that ``package.module:Class`` names.

    Modules beside which the run was started are found, too. Raises :class:`ConfigError` if there is none.
    """
    found = _TASKS.get(name)
    if isinstance(found, type):
        return found
    path = found or name
    module, colon, attribute = path.partition(":")
    if not colon:
        known = ", ".join(sorted(_TASKS))
        raise ConfigError(f"{name!r} is unknown; choose one of {known}, or package.module:Class of your own")
    return _checked(name, getattr(_imported(name, module), attribute, None))


def _imported(name: str, module: str) -> Any:
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(f"{name!r}: the module {module} cannot be imported: {error}") from error


def _checked(name: str, found: Any) -> type[Task]:
    if not (isinstance(found, type) and issubclass(found, Task)):
        raise ConfigError(f"{name!r} does not name a class derived from zerostart.training.Task")
    return found
