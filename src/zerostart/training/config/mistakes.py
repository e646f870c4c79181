"""What is wrong with a configuration, in words that name the key and the nearest valid one."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from zerostart.training.config.sections import Section, TaskConfig


class TaskMistake(ValueError):
    """What is wrong within the section ``task``, as pydantic tells it, and the section's class."""

    def __init__(self, problems: Sequence[Any], settings: type[Section]) -> None:
        super().__init__("task")
        self.problems = problems
        self.settings = settings


def told(error: ValidationError, root: type[BaseModel]) -> Iterator[str]:
    """Each mistake that ``error`` found in a ``root``; in the section ``task`` by the task's settings."""
    for problem in error.errors():
        inner = problem.get("ctx", {}).get("error")
        if not isinstance(inner, TaskMistake):
            yield _explain(dict(problem), root, TaskConfig)
            continue
        for one in inner.problems:
            yield _explain({**one, "loc": (*problem["loc"], *one["loc"])}, root, inner.settings)


def _explain(problem: dict[str, Any], root: type[BaseModel], task: type[Section]) -> str:
    location = [str(part) for part in problem["loc"]]
    key = ".".join(location)
    if problem["type"] == "extra_forbidden":
        near = difflib.get_close_matches(location[-1], _fields(location[:-1], root, task), n=1, cutoff=0.5)
        hint = f"; did you mean {'.'.join([*location[:-1], near[0]])}?" if near else ""
        return f"unknown key {key}{hint}"
    if problem["type"] == "missing":
        return f"{key} is required"
    message = str(problem["msg"]).removeprefix("Value error, ")
    if not key:
        return message
    given = "" if isinstance(problem["input"], dict) else f", not {problem['input']!r}"  # a section is long
    return f"{key}: {message}{given}"


def _fields(location: Sequence[str], root: type[BaseModel], task: type[Section]) -> list[str]:
    """Names of the keys that the section at ``location`` knows; ``task`` is the class of the section task."""
    section = root
    for part in location:
        annotation = section.model_fields[part].annotation
        kinds = (task,) if annotation is TaskConfig else (annotation, *get_args(annotation))
        found = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)]
        if not found:
            return []
        section = found[0]
    return list(section.model_fields)
