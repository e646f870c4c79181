"""What sections of a configuration are made of; the sections themselves lie beside what they configure."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import BaseModel, ConfigDict, Field

__all__ = ["Count", "Positive", "Section", "TaskConfig"]

Count = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(ge=1)]


class Section(BaseModel):
    """One section: no key that it does not know, and no change once it is read.

    ``places`` are the keys that hold paths, which may differ from rank to rank; what lies there may not.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    places: ClassVar[frozenset[str]] = frozenset()


class TaskConfig(Section):
    """What is learnt: the ``name`` of a task that is registered, or ``package.module:Class`` of one.

    The further keys are the task's own (``Task.Settings``).
    """

    name: str
