"""Check the arguments of a load, and derive its engine and read settings."""

from __future__ import annotations

import numbers
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from zerostart import engines
from zerostart.checkpoint.catalog import Catalog
from zerostart.checkpoint.paths import shown_record
from zerostart.distributed.world import default_device
from zerostart.engines import Engine
from zerostart.errors import ConfigError, ZerostartError
from zerostart.geometry.layout import Mesh
from zerostart.recipe import main_dtype
from zerostart.transfer import MIN_CHUNK, Tuning, tune

if TYPE_CHECKING:
    from zerostart.checkpoint.source import WeightFiles
    from zerostart.models import ModelLike as ModelLike

    Source: TypeAlias = str | os.PathLike[str] | WeightFiles | Mapping[str, torch.Tensor] | None
    Converter: TypeAlias = (
        Callable[[dict[str, torch.Tensor]], Mapping[str, torch.Tensor]] | Sequence[object] | None
    )
    EngineConfig: TypeAlias = Mapping[str, object] | str | os.PathLike[str]

_NUMBERS = ("expert_parallel", "tensor_parallel", "sequence_parallel", "memory_limit", "chunk_size")
_SWITCHES = ("strict", "progress", "fp32_masters", "exchange", "trust_remote_code")


@dataclass(frozen=True)
class Request:
    """Arguments of ``zerostart.load``, ``plan`` and ``enabled``; see there."""

    source: Any = None
    model: Any = None
    #: Name; None for the engine of the launcher, otherwise the first one installed.
    engine: str | None = None
    #: None in ``enabled``: use the stage of the active configuration.
    zero_stage: int | None = 3
    #: Engine settings, or the path of their JSON file; ``read`` replaces a path with the content.
    engine_config: Any = None
    expert_parallel: int = 1
    tensor_parallel: int = 1
    sequence_parallel: int = 1
    #: A dtype or its name; ``read`` replaces a name with the dtype.
    dtype: Any = None
    converter: Any = None
    memory_limit: int | None = None
    chunk_size: int | None = None
    strict: bool = True
    progress: bool = True
    fp32_masters: bool = True
    exchange: bool | None = None
    trust_remote_code: bool = False
    #: Treat a tensor with another shape in the checkpoint as missing, and initialise it.
    reinitialise_mismatched: bool = False
    #: Reason for the choice of ``engine``, for reports.
    engine_reason: str = ""

    __repr__ = shown_record

    def read(self) -> Request:
        """Check the argument types, and read dtype and configuration. Raises ConfigError."""
        for name in _NUMBERS:
            value, minimum = getattr(self, name), 1 if name.endswith("parallel") else MIN_CHUNK
            if value is None and name in ("memory_limit", "chunk_size"):
                continue
            if not _is_integer(value):
                raise ConfigError(f"{name}={value!r} is not accepted; give a whole number")
            if value < minimum and minimum == MIN_CHUNK:
                raise ConfigError(f"{name}={value} must be a number of bytes, at least {MIN_CHUNK}")
        for name in _SWITCHES:
            value = getattr(self, name)
            if not isinstance(value, bool) and not (name == "exchange" and value is None):
                raise ConfigError(f"{name}={value!r} is not accepted; give True or False")
        if self.zero_stage is not None and not _is_integer(self.zero_stage):
            raise ConfigError(f"zero_stage={self.zero_stage!r} is not accepted; give a whole number")
        return replace(self, dtype=dtype_of(self.dtype), engine_config=config_of(self.engine_config))

    @property
    def device(self) -> torch.device:
        """Device of this rank's shards; the CPU if the configured mesh is on it."""
        mesh = self.engine_config.get("mesh") if isinstance(self.engine_config, Mapping) else None
        return torch.device("cpu") if getattr(mesh, "device_type", None) == "cpu" else default_device()

    def with_engine(self) -> Request:
        """Read the request and choose the engine, with a reason. Raises ConfigError."""
        name, reason = engines.choose_engine(self.engine)
        return replace(self.read(), engine=name, engine_reason=self.engine_reason or reason)

    def resolve(self, world_size: int, rank: int | None = None) -> Engine:
        """Return the engine of this load for ``world_size`` ranks.

        Raises ConfigError if ``rank`` is not one of them, and ConfigError or EngineError for arguments that
        no load supports.
        """
        request = self.with_engine()
        stage = 3 if request.zero_stage is None else request.zero_stage
        family = engines.check_choice(str(request.engine), stage)
        if world_size < 1:
            raise ConfigError(f"world_size={world_size} must be at least 1")
        if rank is not None and not 0 <= rank < world_size:
            raise ConfigError(f"rank={rank} is not one of the {world_size} ranks")
        tensors, experts = self.tensor_parallel, self.expert_parallel
        # 1 is the default: use the value of the engine configuration then.
        if config := request.engine_config:
            tensors = family.configured_tensor_parallel(config) if tensors == 1 else tensors
            experts = family.configured_expert_parallel(config) if experts == 1 else experts
        mesh = Mesh(world_size, experts, tensors, self.sequence_parallel)
        return engines.resolve_engine(str(request.engine), stage, config, mesh, self.exchange)

    def exchange_of_reads(self, engine: Engine) -> bool | None:
        """Return True if ranks exchange the bytes they read; None to estimate it."""
        # An engine that replicates parameters gathers them from flat buffers. `exchange=True` selects that
        # gather, and each rank reads a share that no other rank needs.
        return None if engine.replicates_parameters and self.exchange else self.exchange

    def tuning(
        self,
        engine: Engine,
        catalog: Catalog,
        device: torch.device,
        computes: bool,
        ranks: int | None = None,
    ) -> Tuning:
        """Choose threads and buffers to read ``catalog`` into memory of ``device``.

        ``ranks`` is the number of ranks on this machine. If ``computes``, each thread has a scratch buffer of
        one chunk in addition to its staging buffers. Without ``chunk_size``, the engine configuration sets
        the chunk.
        """
        chunk = self.chunk_size
        elements = engine.chunk_elements
        if chunk is None and elements > 0:
            stored = main_dtype(catalog.weights.values())
            # Convert elements to bytes by the checkpoint's main dtype; 4 bytes if none is floating.
            chunk = max(MIN_CHUNK, elements * (stored.itemsize if stored is not None else 4))
        return tune(catalog.storage, device.type != "cpu", computes, self.memory_limit, chunk, ranks)


def _is_integer(value: object) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def dtype_of(dtype: object) -> torch.dtype | None:
    """Convert a dtype or its name to a floating dtype. Raises ConfigError."""
    found = getattr(torch, dtype.removeprefix("torch."), None) if isinstance(dtype, str) else dtype
    if found is None and dtype is None:
        return None
    if not isinstance(found, torch.dtype):
        raise ConfigError(f"dtype={dtype!r} is not a torch dtype; try float32, bfloat16 or float16")
    if not found.is_floating_point:
        raise ConfigError(f"dtype={dtype!r} must be a floating torch.dtype")
    return found


def config_of(config: object) -> Mapping[str, object] | None:
    """Return ``config`` itself, or the content of the JSON file at that path.

    Raises ConfigError, naming the file, if it cannot be read or does not contain a JSON object.
    """
    if config is None or isinstance(config, Mapping):
        return config
    if not isinstance(config, str | os.PathLike):
        raise ConfigError(
            f"engine_config={config!r} is not accepted; give a dictionary or the path of a JSON file"
        )
    from zerostart.checkpoint.strict_json import DAMAGED, MAX_CONFIG_BYTES, read_json

    hint = "give a JSON file; an accelerate configuration (YAML) names it as deepspeed_config_file"
    try:
        return read_json(Path(config), "configuration", MAX_CONFIG_BYTES)
    except (ZerostartError, OSError, TypeError, ValueError) as error:
        raise ConfigError(f"engine_config: {str(error).replace(DAMAGED, hint)}") from error
