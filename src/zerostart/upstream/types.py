"""Names for objects of other libraries that these libraries do not type."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

#: Arguments of an operator of torch: tensors, numbers, dtypes, devices, and lists of these.
Arguments: TypeAlias = tuple[Any, ...]
Keywords: TypeAlias = dict[str, Any]
ParameterGroup: TypeAlias = dict[str, Any]

#: DeepSpeed's configuration or a section of it: JSON values by name.
DeepSpeedConfig: TypeAlias = Mapping[str, Any]
#: A parameter that ``zero.Init`` has converted: a torch parameter with DeepSpeed's attributes (``ds_id``).
ZeroParameter: TypeAlias = Any
#: ``parameter.ds_tensor``: this rank's elements, 1-D and padded.
ZeroPartition: TypeAlias = Any

Accelerator: TypeAlias = Any
FSDPPlugin: TypeAlias = Any
Parallelism: TypeAlias = Any
Trainer: TypeAlias = Any
Pipeline: TypeAlias = Any
ModelLogger: TypeAlias = Any
TrainingModule: TypeAlias = Any
