"""What every engine is: a name and a ZeRO stage, its configuration, and the mesh of ranks."""

from __future__ import annotations

import abc
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

from zerostart.geometry.layout import Mesh
from zerostart.upstream.accelerate.plugins import is_set

#: An engine's configuration, or a section of it: JSON values by name; for FSDP2 also objects, such as a mesh.
EngineConfig: TypeAlias = Mapping[str, Any]


@dataclass(frozen=True)
class EngineBase(abc.ABC):
    """One engine at one ZeRO stage, with its configuration, over one mesh of ranks.

    ``config`` is the ``engine_config`` of a load; ``exchange`` its argument of that name.
    """

    #: The name in ``engine=``, and the ZeRO stages that it can be asked for.
    name: ClassVar[str]
    stages: ClassVar[tuple[int, ...]] = (3,)
    #: The package that the engine needs; torch alone for most.
    library: ClassVar[str] = "torch"
    #: Whether parameters lie whole on every rank, in flat buffers.
    replicates_parameters: ClassVar[bool] = False
    #: Whether modules are units of ``fully_shard``, with DTensors as parameters.
    uses_fully_shard: ClassVar[bool] = False
    #: Whether the engine makes masters and an optimizer of its own, clips and steps itself, and writes
    #: consolidated weights itself.
    owns_optimizer: ClassVar[bool] = False
    #: Whether an optimizer steps the parameters themselves, in their own dtype: there are no other masters.
    steps_parameters: ClassVar[bool] = False
    #: The environment variable with which accelerate's launcher sets up this very engine, None for none.
    launcher_variable: ClassVar[str | None] = None

    zero_stage: int
    config: EngineConfig | None
    mesh: Mesh
    exchange: bool | None = None

    @classmethod
    def titled(cls, zero_stage: int) -> str:
        """The engine at a stage, in words."""
        return f"{cls.name} ZeRO-{zero_stage}"

    @property
    def title(self) -> str:
        """This engine in words."""
        return self.titled(self.zero_stage)

    @classmethod
    def is_sharded_at(cls, zero_stage: int) -> bool:
        """Whether ranks share anything of a model at a stage: its weights, gradients or optimizer states."""
        return zero_stage > 0

    @classmethod
    def is_launched(cls) -> bool:
        """Whether accelerate's launcher has set up this engine.

        Raises ConfigError where it has set up a version of it that is not this one.
        """
        return cls.launcher_variable is not None and is_set(cls.launcher_variable)

    @classmethod
    def configured_stage(cls, config: EngineConfig) -> int | None:
        """The ZeRO stage that a configuration itself asks for, None where it says nothing of it."""
        return None

    @classmethod
    def configured_tensor_parallel(cls, config: EngineConfig) -> int:
        """How many ranks a configuration itself has share tensors; 1 where it says nothing of it."""
        return 1

    @classmethod
    def configured_expert_parallel(cls, config: EngineConfig) -> int:
        """How many ranks a configuration itself has share experts; 1 where it says nothing of it."""
        return 1
