"""What is used of torch's objects that torch itself does not name."""

from __future__ import annotations

from typing import Any

#: An item of an optimizer's ``param_groups``: its ``params``, and the optimizer's own settings.
ParameterGroup = dict[str, Any]
