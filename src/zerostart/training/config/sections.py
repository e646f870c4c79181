"""What sections of a configuration are made of; the sections themselves lie beside what they configure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

Count = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(ge=1)]
Proportion = Annotated[float, Field(ge=0.0, lt=1.0)]
#: The most that a number in torch holds (int64, float32).
_MOST_INT, _MOST_FLOAT = 2**63 - 1, 3.4028234663852886e38


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

    @field_validator("*", mode="after")
    @classmethod
    def _holds(cls, value: Any, info: ValidationInfo) -> Any:
        for one in value if isinstance(value, list | tuple) else (value,):
            if isinstance(one, int) and abs(one) > _MOST_INT:
                raise ValueError("Input should be a number that fits into 64 bits")
            if isinstance(one, float) and abs(one) > _MOST_FLOAT:
                raise ValueError("Input should be a number that fits into float32, up to 3.4e38")
            if isinstance(one, str) and "\0" in one:
                raise ValueError("Input should have no NUL character")
        if value == "" and info.field_name in cls.path_keys:  # pathlib takes it for the working directory
            raise ValueError("Input should be a path")
        return value


def _kinds(annotation: Any) -> Iterator[Any]:
    yield annotation
    for part in get_args(annotation):
        yield from _kinds(part)


class TaskConfig(Section):
    """What is learnt. The further keys are the task's own (``Task.Settings``)."""

    name: str
    """What is learnt: the name of a registered task, or package.module:Class of one."""
