"""What is used of torch's objects that torch itself does not name."""

from __future__ import annotations

from typing import Any, TypeAlias

#: An item of an optimizer's ``param_groups``: its ``params``, and the optimizer's own settings.
ParameterGroup: TypeAlias = dict[str, Any]
#: What an operator is called with: tensors, numbers, dtypes, devices, and lists of these, by its schema.
Arguments: TypeAlias = tuple[Any, ...]
Keywords: TypeAlias = dict[str, Any]
