"""Base classes and types of the sections of a configuration."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field

from zerostart.errors import without_secrets

#: The largest integer that torch holds (int64).
_MAX_INT = 2**63 - 1
# Strict: YAML's `yes` is not the number 1.
Count = Annotated[int, Field(ge=0, le=_MAX_INT, strict=True)]
Positive = Annotated[int, Field(ge=1, le=_MAX_INT, strict=True)]
Proportion = Annotated[float, Field(ge=0.0, lt=1.0)]
#: pathlib takes an empty path for the working directory.
PathText = Annotated[str, Field(min_length=1)]


class ConfigSection(BaseModel):
    """One immutable section, which refuses unknown keys.

    The text below a key in the class is its description; its first sentence becomes a comment in templates.
    ``path_keys`` hold paths, which may differ between ranks; their contents may not.
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
        """Return the JSON values of the keys, except paths and the keys ``without``."""
        return self.model_dump(mode="json", exclude=set(self.path_keys | without))


class TaskConfig(ConfigSection):
    """The task. Its further keys are those of ``Task.Settings``."""

    name: str
    """Name of a registered task, or package.module:Class of one."""
