"""What sections of a configuration are made of; the sections themselves lie beside what they configure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

from zerostart.errors import without_secrets

#: The largest integer that torch holds (int64).
_MAX_INT = 2**63 - 1
Count = Annotated[int, Field(ge=0, le=_MAX_INT)]
Positive = Annotated[int, Field(ge=1, le=_MAX_INT)]
Proportion = Annotated[float, Field(ge=0.0, lt=1.0)]
#: pathlib takes an empty path for the working directory.
PathText = Annotated[str, Field(min_length=1)]


class Section(BaseModel):
    """One section: no key that it does not know, and no change once it is read.

    The text below a key in the class describes it: its first sentence in a word or two, for a comment beside
    the key. ``path_keys`` hold paths, which may differ from rank to rank; what lies there may not.
    """

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        protected_namespaces=(),
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )

    path_keys: ClassVar[frozenset[str]] = frozenset()

    def __repr__(self) -> str:
        return without_secrets(super().__repr__())

    def __str__(self) -> str:
        return without_secrets(super().__str__())

    def comparable(self, without: frozenset[str] = frozenset()) -> dict[str, Any]:
        """Its values as JSON has them, but for paths and the keys ``without``."""
        return self.model_dump(mode="json", exclude=set(self.path_keys | without))

    @field_validator("*", mode="before")
    @classmethod
    def _no_switch(cls, value: object, info: ValidationInfo) -> object:
        """`yes` is not a number, though Python takes it for 1."""
        if isinstance(value, bool) and info.field_name is not None:
            kinds = set(_kinds(cls.model_fields[info.field_name].annotation))
            if bool not in kinds and kinds & {int, float}:
                raise ValueError("a number is wanted")
        return value


def _kinds(annotation: Any) -> Iterator[Any]:
    yield annotation
    for part in get_args(annotation):
        yield from _kinds(part)


class TaskConfig(Section):
    """What is learnt. The further keys are the task's own (``Task.Settings``)."""

    name: str
    """What is learnt: the name of a registered task, or package.module:Class of one."""
