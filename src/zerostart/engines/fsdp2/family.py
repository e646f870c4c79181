"""FSDP2 engines: shards at stages 1 to 3, whole parameters at stage 0."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import nn

from zerostart.distributed.world import World, default_device
from zerostart.engines.engine import Engine, ShardMaker
from zerostart.engines.flat_buffers import FlatBufferShards, whole_placements
from zerostart.engines.forecast import MemoryInputs, MemoryPeak, replicated_peaks
from zerostart.engines.fsdp2 import memory
from zerostart.engines.fsdp2.calls import begin_batch
from zerostart.engines.fsdp2.settings import FSDP2Settings, MeshShares
from zerostart.engines.parallelism import check_ring
from zerostart.engines.placements import DEVICE, HOST, Placements
from zerostart.engines.shard import Shard
from zerostart.engines.state import OptimizerState, TrainingState
from zerostart.engines.training import AccelerateSetup, EngineConfig, TrainingJob
from zerostart.errors import ConfigError, EngineError
from zerostart.geometry.layout import Mesh, Parallelism, Ranges
from zerostart.geometry.layout.layout import FlatRules
from zerostart.models import Alias
from zerostart.upstream.accelerate.plugins import launched_fsdp_version

#: Keys that a YAML file can set.
PLAIN = ("replicate", "reshard_after_forward", "wrap")


class FSDP2State(OptimizerState):
    """An optimizer's state, and units that may hold gradients which are not reduced yet."""

    def check_reduced(self) -> None:
        from zerostart.upstream.torch.fsdp2 import has_unreduced

        if has_unreduced(self._model):
            raise ConfigError(
                "FSDP2 holds gradients that are not reduced yet (set_requires_gradient_sync(False)): save "
                "after an optimizer step"
            )


class FSDP2(Engine):
    """DTensors over the mesh; ``config`` has keyword arguments of ``fully_shard`` and zerostart's own."""

    name = "fsdp2"
    stages = (0, 1, 2, 3)
    uses_fully_shard = True
    steps_parameters = True
    launcher_variable: ClassVar[str | None] = "ACCELERATE_USE_FSDP"

    @classmethod
    def for_stage(
        cls, zero_stage: int, config: EngineConfig | None, mesh: Mesh, exchange: bool | None
    ) -> Engine:
        """Stage 0 shards nothing."""
        return (FSDP2 if zero_stage else Replicated)(zero_stage, config, mesh, exchange)

    @classmethod
    def is_launched(cls) -> bool:
        # FSDP has two versions, and accelerate's default is the first.
        if not super().is_launched():
            return False
        if (version := launched_fsdp_version()) != "2":
            raise ConfigError(
                f"accelerate launch has set up FSDP version {version}, but zerostart shards with version "
                "2; start it with --fsdp_version 2 (fsdp_version: 2), or name an engine: load(engine=...), "
                "or engine.name in a configuration"
            )
        return True

    @classmethod
    def title_of(cls, zero_stage: int) -> str:
        """The engine in words; its stages differ in how long parameters stay gathered."""
        if not zero_stage:
            return "DistributedDataParallel"
        return "FSDP2" if zero_stage == 3 else f"FSDP2 as ZeRO-{zero_stage}"

    @cached_property
    def settings(self) -> FSDP2Settings:
        """The configuration, at the stage."""
        return FSDP2Settings.of(self.config).at_stage(self.zero_stage, self.mesh.parallel)

    def check(self) -> None:
        self.settings.check_mesh(self.mesh)
        size = self.mesh.sequence_parallel
        if size > 1 and not self.uses_fully_shard:
            raise ConfigError(
                f"sequence_parallel={size} with zero_stage=0 is not available in this version; use stage 1, "
                "2 or 3"
            )

    @classmethod
    def configured_tensor_parallel(cls, config: EngineConfig) -> int:
        # The key ``autotp_size``, as in DeepSpeed's section.
        return FSDP2Settings.of(config).autotp_size

    def import_library(self) -> None:
        # Imported early, so that its time does not count as the load's.
        import zerostart.engines.fsdp2.parallel  # noqa: F401

    @property
    def compute_dtype(self) -> torch.dtype | None:
        policy = self.settings.mp_policy
        return None if policy is None else policy.param_dtype

    def check_sequence_parallel(self, model: nn.Module) -> None:
        # Torch's context parallelism needs kernels for the device.
        from zerostart.upstream.torch.context_parallel import check_kernels

        check_ring(model, self.mesh.sequence_parallel)
        if self.mesh.sequence_parallel > 1 and (kind := default_device().type) != "cpu":
            check_kernels(kind)

    def enable_sequence_parallel(self, model: nn.Module) -> None:
        # The caller of the model enters the ring.
        from zerostart.upstream.torch.context_parallel import require_version, ring_on_cpu

        if self.mesh.sequence_parallel > 1:
            require_version()
            if default_device().type == "cpu":
                ring_on_cpu(model)

    def parallel_plans(self) -> tuple[Mapping[str, str] | None, Mapping[str, str] | None]:
        return self.settings.ep_plan, self.settings.tp_plan

    def allow_cast(self, parameter: nn.Parameter, dtype: torch.dtype) -> None:
        from zerostart.engines.fsdp2.units import set_compute_dtype

        set_compute_dtype(parameter, dtype)

    def placements(self, model: nn.Module, parallelism: Parallelism) -> Placements:
        parameters = dict(model.named_parameters())
        homes = dict.fromkeys(parameters, HOST if self.settings.offloaded else DEVICE)
        shares = MeshShares.of_parameters(self.settings, parallelism, parameters)
        dims = shares.dims or {}
        return Placements(
            layout=lambda name, rank: shares.layout(name, tuple(parameters[name].shape), rank),
            alike=lambda name: (parallelism.is_expert(name), parallelism.cut(name), dims.get(name)),
            twin=shares.twin,
            homes=homes,
        )

    def shard_maker(
        self, world: World, dtype: torch.dtype | None, parallelism: Parallelism, placements: Placements
    ) -> ShardMaker:
        from zerostart.engines.fsdp2.parallel import FSDP2Shards

        return FSDP2Shards(world, self.settings, parallelism)

    def follow_aliases(self, model: nn.Module, aliases: Sequence[Alias]) -> None:
        # FSDP2 swaps parameters in their modules.
        from zerostart.engines.fsdp2.calls import update_aliases

        update_aliases(model, aliases)

    def preserve_calls(self, model: nn.Module, entries: Sequence[str]) -> None:
        from zerostart.engines.fsdp2.calls import keep_calls
        from zerostart.engines.fsdp2.edits import keep_edits

        keep_calls(model, entries)
        keep_edits(model)

    def shards_of(self, model: nn.Module, parallelism: Parallelism, rank: int) -> dict[str, Shard]:
        # Parameters that a forward left gathered are resharded.
        if parallelism.mesh.parallel:
            from zerostart.engines.fsdp2.parallel import parallel_shards

            return parallel_shards(model, self.settings, parallelism, rank)
        from zerostart.engines.fsdp2.storage import current_shards

        return current_shards(model)

    def training_config(self, job: TrainingJob, user_config: EngineConfig) -> dict[str, Any]:
        # Raises ConfigError for an unknown key.
        from torch.distributed.fsdp import MixedPrecisionPolicy

        # A YAML file has plain data only, no meshes or functions.
        if unknown := sorted(set(user_config) - set(PLAIN)):
            names = ", ".join(PLAIN)
            raise ConfigError(f"engine.config.{unknown[0]} is unknown for {self.name}; known are {names}")
        if job.mixed_precision == "no" or not self.uses_fully_shard:
            return dict(user_config)
        # The shards remain fp32, as masters; units cast gathered parameters, and reduce gradients in fp32.
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        return {**user_config, "mp_policy": policy}

    def accelerate_setup(self, mixed_precision: str) -> AccelerateSetup:
        # Units cast by their MixedPrecisionPolicy, and autocast would cast again.
        precision = "no" if self.uses_fully_shard else mixed_precision
        options: dict[str, object] = {
            "mixed_precision": precision,
            "cpu": not torch.accelerator.is_available(),
        }
        if self.replicates_parameters:
            from accelerate.utils import DistributedDataParallelKwargs

            # The last block of a two-stream transformer makes text features that nothing uses.
            options["kwargs_handlers"] = [DistributedDataParallelKwargs(find_unused_parameters=True)]
        return AccelerateSetup(
            options,
            ignored=(
                # It warns of logits changed in place; only the loss is used here.
                ("FSDP2-wrapped module .* returned a view tensor", UserWarning),
                ("find_unused_parameters=True was specified in DDP constructor", UserWarning),
            ),
        )

    def shard_added(self, model: nn.Module, mixed_precision: str) -> None:
        # As separate units. Raises EngineError for modules that cannot be one.
        from zerostart.engines.fsdp2.units import convert_to_masters, shard_added

        if self.uses_fully_shard:
            shard_added(model, self.settings.options(), mixed_precision != "no")
        else:
            convert_to_masters(model.parameters(), mixed_precision != "no")

    def synchronize_added(self, model: nn.Module, added: Sequence[nn.Parameter]) -> None:
        # A plain training loop does not reduce their gradients.
        from zerostart.engines.fsdp2.units import share_added

        if self.uses_fully_shard:
            size = self.mesh.tensor_parallel
            share_added(model, added, f"with tensor_parallel={size}" if size > 1 else "")

    def adopt_expert(
        self, parameter: nn.Parameter, like: Any, ranges: Ranges, shape: tuple[int, ...]
    ) -> nn.Parameter:
        from zerostart.engines.fsdp2.parallel import adopt_expert

        return adopt_expert(parameter, like, ranges, shape)

    def begin_batch(self, model: nn.Module, last: bool) -> None:
        from torch.distributed.fsdp import FSDPModule

        if isinstance(model, FSDPModule):
            begin_batch(model, self.zero_stage, last)

    def memory_peaks(self, model: nn.Module, inputs: MemoryInputs) -> list[MemoryPeak]:
        units = memory.Units.of(model, self.settings, inputs.shares, self.mesh.data(0)[1])
        return memory.after_load(inputs, units)

    @classmethod
    def find_shards(cls, model: nn.Module, world: World) -> dict[str, Shard]:
        """DTensors. Raises EngineError for a mesh that is not of all ranks."""
        from zerostart.engines.fsdp2.storage import current_shards

        shards = current_shards(model)
        for name, parameter in model.named_parameters(remove_duplicate=False):
            mesh = getattr(parameter, "device_mesh", None)
            if name in shards and mesh is not None and mesh.size() != world.size:
                raise EngineError(
                    f"{name} lies on {mesh.size()} of the {world.size} ranks, so what the other ranks "
                    "hold is "
                    "unknown; load the model with zerostart, or shard it over a mesh of all ranks"
                )
        return shards

    @classmethod
    def reshard_units(cls, model: nn.Module) -> None:
        from zerostart.engines.fsdp2.edits import expire_views
        from zerostart.engines.fsdp2.storage import reshard_units

        reshard_units(model)
        expire_views()  # whoever asks for the shards may write to them

    @classmethod
    def training_state(cls, model: nn.Module, optimizer: object) -> TrainingState | None:
        from torch.distributed.fsdp import FSDPModule

        sharded = any(isinstance(module, FSDPModule) for module in model.modules())
        return FSDP2State(model, optimizer) if sharded else None

    @classmethod
    def check_replaceable(cls, model: nn.Module, parameter: torch.Tensor, action: str) -> None:
        from zerostart.upstream.torch.fsdp2 import has_run

        if has_run(model):
            raise EngineError(
                f"{action} after FSDP2 has run a forward; resize them right after from_pretrained"
            )

    @classmethod
    def unshard_modules(cls, model: nn.Module, modules: Sequence[nn.Module]) -> AbstractContextManager[None]:
        from zerostart.upstream.torch.fsdp2 import unshard_modules

        return unshard_modules(model, modules)


class Replicated(FSDP2):
    """Everything whole on every rank, for DistributedDataParallel."""

    replicates_parameters = True
    uses_fully_shard = False
    launcher_variable = None

    def follow_aliases(self, model: nn.Module, aliases: Sequence[Alias]) -> None:
        """See ``Engine``; nothing is swapped."""

    def preserve_calls(self, model: nn.Module, entries: Sequence[str]) -> None:
        """See ``Engine``; nothing is gathered."""

    def placements(self, model: nn.Module, parallelism: Parallelism) -> Placements:
        return whole_placements(
            dict(model.named_parameters()), parallelism, self._rules(), self.exchange, False, 0
        )

    def shard_maker(
        self, world: World, dtype: torch.dtype | None, parallelism: Parallelism, placements: Placements
    ) -> ShardMaker:
        return FlatBufferShards(world, 0, self._rules(), self.exchange, parallelism)

    def shards_of(self, model: nn.Module, parallelism: Parallelism, rank: int) -> dict[str, Shard]:
        return {}

    def memory_peaks(self, model: nn.Module, inputs: MemoryInputs) -> list[MemoryPeak]:
        return replicated_peaks(inputs, masters=False)

    def _rules(self) -> FlatRules:
        return FlatRules(self.mesh.world_size)
