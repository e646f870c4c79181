"""The arguments of a load, checked, and what follows from them alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from zerostart import engines
from zerostart.checkpoint.catalog import Catalog
from zerostart.distributed.world import default_device
from zerostart.engines import Engine
from zerostart.errors import ConfigError
from zerostart.geometry.layout import Mesh
from zerostart.loading.arguments import LoadArguments
from zerostart.recipe import main_dtype
from zerostart.transfer import MIN_CHUNK, Tuning, tune


@dataclass(frozen=True, kw_only=True)
class Request(LoadArguments):
    """The arguments of a load, names and paths read, and what they are checked for."""

    dtype: torch.dtype | None = None
    engine_config: Mapping[str, object] | None = None
    #: Whether a tensor of another shape in the checkpoint is initialised as if it were missing, or an error.
    reinitialise_mismatched: bool = False
    #: Why it is this ``engine``, in a few words; "" where only its name is known.
    engine_reason: str = ""

    @property
    def device(self) -> torch.device:
        """Where this rank's shards will lie: the host, if the configuration has a mesh of the host's."""
        mesh = self.engine_config.get("mesh") if isinstance(self.engine_config, Mapping) else None
        return torch.device("cpu") if getattr(mesh, "device_type", None) == "cpu" else default_device()

    def with_engine(self) -> Request:
        """The same with an engine that is named, and the reason for it. Raises ConfigError."""
        name, reason = engines.choose_engine(self.engine)
        return replace(self, engine=name, engine_reason=self.engine_reason or reason)

    def resolve(self, world_size: int, rank: int | None = None) -> Engine:
        """The engine of this load over ``world_size`` ranks, all arguments checked.

        ``rank``, where given, must be one of them. Raises ConfigError or EngineError for arguments that no
        load can serve.
        """
        name, _ = engines.choose_engine(self.engine)
        family = engines.check_choice(name, self.zero_stage)
        self._check()
        if world_size < 1:
            raise ConfigError(f"world_size={world_size} must be at least 1")
        if rank is not None and not 0 <= rank < world_size:
            raise ConfigError(f"rank={rank} is not one of the {world_size} ranks")
        tensors, experts = self.tensor_parallel, self.expert_parallel
        # 1 stands for "not given": then what the engine's own configuration says counts.
        if self.engine_config:
            tensors = family.configured_tensor_parallel(self.engine_config) if tensors == 1 else tensors
            experts = family.configured_expert_parallel(self.engine_config) if experts == 1 else experts
        mesh = Mesh(world_size, experts, tensors, self.sequence_parallel)
        return engines.resolve_engine(name, self.zero_stage, self.engine_config, mesh, self.exchange)

    def exchange_of_reads(self, engine: Engine) -> bool | None:
        """What is asked for of the exchange between reading ranks; None leaves it to the estimate."""
        # An engine with flat buffers gathers them itself: there ``exchange`` asks for that, and each rank
        # reads a share that nobody else wants.
        return None if engine.replicates_parameters and self.exchange else self.exchange

    def _check(self) -> None:
        if self.dtype is not None and not self.dtype.is_floating_point:
            raise ConfigError(f"dtype={self.dtype!r} must be a floating torch.dtype")
        for name in ("memory_limit", "chunk_size"):
            value = getattr(self, name)
            if value is not None and value < MIN_CHUNK:
                raise ConfigError(f"{name}={value} must be a number of bytes, at least {MIN_CHUNK}")

    def tuning(
        self,
        engine: Engine,
        catalog: Catalog,
        device: torch.device,
        computes: bool,
        ranks: int | None = None,
    ) -> Tuning:
        """How the catalog's bytes are read into memory of ``device``, with ``ranks`` ranks on the machine.

        A thread that also ``computes`` has a chunk of scratch beside its staging buffers. The elements of a
        read that the engine's configuration asks for are followed where no chunk is given here.
        """
        chunk = self.chunk_size
        elements = engine.chunk_elements
        if chunk is None and elements > 0:
            stored = main_dtype(catalog.weights.values())
            # From elements to bytes, by the checkpoint's main dtype; 4 where none is floating.
            chunk = max(MIN_CHUNK, elements * (stored.itemsize if stored is not None else 4))
        return tune(catalog.storage, device.type != "cpu", computes, self.memory_limit, chunk, ranks)
