"""DeepSpeed engines: ZeRO-3, and whole parameters in flat buffers (stages 0 to 2)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from zerostart.distributed.world import World
from zerostart.engines.deepspeed import memory
from zerostart.engines.deepspeed.parallel import make_cutter
from zerostart.engines.deepspeed.settings import DeepSpeedSettings
from zerostart.engines.deepspeed.training import (
    HOST_BACKEND,
    MODEL_DTYPES,
    accelerate_setup,
    training_config,
)
from zerostart.engines.engine import Engine, MasterReader, ShardMaker
from zerostart.engines.flat_buffers import whole_placements
from zerostart.engines.forecast import MemoryInputs, MemoryPeak, replicated_peaks
from zerostart.engines.parallelism import check_heads, resolve
from zerostart.engines.placements import DEVICE, HOST, STORAGE, Placements
from zerostart.engines.shard import Shard
from zerostart.engines.state import (
    Counters,
    Gradient,
    Master,
    Stateful,
    TrainingState,
    check_accumulation,
    members_of,
)
from zerostart.engines.training import AccelerateSetup, EngineConfig, TrainingJob
from zerostart.errors import ConfigError, EngineError
from zerostart.geometry.layout import Layout, Mesh, Parallelism, Ranges, flat_partition
from zerostart.geometry.layout.layout import FlatRules
from zerostart.upstream.deepspeed import engine as editing
from zerostart.upstream.deepspeed import engine as upstream
from zerostart.upstream.deepspeed import steps as optimizers
from zerostart.upstream.deepspeed.zero3_partitions import is_gathered

if TYPE_CHECKING:
    from deepspeed.runtime.engine import DeepSpeedEngine

#: Sections of the configuration that all ranks must have in common.
_COMMON = (
    "bf16",
    "expert_parallel",
    "fp16",
    "sequence_parallel_size",
    "tensor_parallel",
    "zero_optimization",
)


def _without_path(value: object) -> object:
    return {k: v for k, v in value.items() if k != "nvme_path"} if isinstance(value, Mapping) else value


class DeepSpeedState(TrainingState):
    """The state of a model inside a ``DeepSpeedEngine``."""

    owns_optimizer = True

    def __init__(self, engine: DeepSpeedEngine) -> None:
        """Raises ConfigError or EngineError for a state that cannot be read now."""
        optimizers.check_movable(engine)
        self._engine = engine
        self.steps = optimizers.steps_of(engine)

    def counters(self) -> Counters:
        engine = self._engine
        counters = {"name": "deepspeed", "stage": upstream.engine_stage(engine), **upstream.counters(engine)}
        # The key exists only while a window of accumulated gradients is open.
        if upstream.is_window_open(engine):
            counters["window"] = upstream.window(engine)
        return counters

    def restore_counters(self, saved: Counters) -> None:
        upstream.set_counters(self._engine, saved)
        if "window" in saved:
            upstream.set_window(self._engine, saved["window"])

    def components(self) -> Mapping[str, Stateful]:
        schedule = getattr(self._engine, "lr_scheduler", None)
        return {"schedule": schedule} if isinstance(schedule, Stateful) else {}

    def gradients(self, is_replicated: Callable[[torch.Tensor], bool]) -> Sequence[Gradient]:
        """Return the gradients of an open window, as runs that this rank steps."""
        if not upstream.is_window_open(self._engine):
            return []
        gradients = optimizers.gradients(self._engine, self.steps)
        # None: each rank's buffers hold unreduced gradients, which have no other layout.
        if gradients is None:
            raise ConfigError(
                "the engine is in the middle of gradient accumulation, and its gradients are not reduced "
                "yet (below ZeRO stage 2, and at stage 2 when they are offloaded): save after an "
                "optimizer step"
            )
        return list(zip(members_of(self.steps), gradients, strict=True))

    def make_gradients(self, parameter_ids: Collection[int], saved: Counters) -> Sequence[Gradient] | None:
        # Without requested gradients none are made, whatever was saved.
        if not parameter_ids:
            return []
        room = optimizers.gradients(self._engine, self.steps, make=True) if "window" in saved else None
        return None if room is None else list(zip(members_of(self.steps), room, strict=True))

    def check_window(self, saved: Counters, with_gradients: bool, source: str) -> None:
        if "window" in saved:
            now = self._engine.gradient_accumulation_steps()
            check_accumulation(saved["window"].get("accumulation"), now, "the engine", source)


class DeepSpeed(Engine):
    """Common part of all stages; ``config`` is DeepSpeed's own configuration."""

    name = "deepspeed"
    library = "deepspeed"
    stages = (0, 1, 2, 3)
    owns_optimizer = True
    precisions = tuple(MODEL_DTYPES)
    launcher_variable = "ACCELERATE_USE_DEEPSPEED"
    host_backend = HOST_BACKEND

    @classmethod
    def for_stage(
        cls, zero_stage: int, config: EngineConfig | None, mesh: Mesh, exchange: bool | None
    ) -> Engine:
        """Stage 3 partitions parameters; the others keep them whole."""
        return (ZeroThree if zero_stage == 3 else FlatBuffers)(zero_stage, config, mesh, exchange)

    @classmethod
    def title_of(cls, zero_stage: int) -> str:
        """DeepSpeed's stage, in words."""
        return f"DeepSpeed ZeRO-{zero_stage}"

    @classmethod
    def configured_stage(cls, config: EngineConfig) -> int | None:
        return DeepSpeedSettings.of(config).stage

    @classmethod
    def configured_expert_parallel(cls, config: EngineConfig) -> int:
        # The key ``autoep_size`` of an enabled section ``expert_parallel``.
        return DeepSpeedSettings.of(config).autoep_size or 1

    @cached_property
    def settings(self) -> DeepSpeedSettings:
        """The configuration, read."""
        return DeepSpeedSettings.of(self.config)

    @property
    def common_config(self) -> EngineConfig:
        # Log settings may differ, and a rank may have another path on its disk.
        config = self.config or {}
        common = {name: config[name] for name in _COMMON if name in config}
        zero = common.get("zero_optimization")
        if isinstance(zero, Mapping):
            common["zero_optimization"] = {name: _without_path(value) for name, value in zero.items()}
        return common

    def check(self) -> None:
        self.settings.check(self.zero_stage, self.mesh)

    @classmethod
    def configured_tensor_parallel(cls, config: EngineConfig) -> int:
        # The key ``autotp_size``.
        return DeepSpeedSettings.of(config).autotp_size or 1

    def compile_operations(self) -> None:
        from zerostart.upstream.deepspeed.zero3_partitions import OPERATIONS, load_operations

        load_operations(OPERATIONS if self.settings.offload == "nvme" else OPERATIONS[:1])

    def parallelism(self, model: nn.Module) -> Parallelism:
        # DeepSpeed decides the cuts over ranks that share tensors. Imports are in the methods: settings can
        # be read without DeepSpeed, which takes seconds to import and which the planning machine may lack.
        if self.mesh.tensor_parallel == 1:
            return super().parallelism(model)
        from zerostart.engines.deepspeed.parallel import tensor_cuts

        size, settings = self.mesh.tensor_parallel, self.settings
        cuts = functools.partial(tensor_cuts, model, size, settings.tensors, settings.tp_plan)
        return resolve(model, self.mesh, settings.ep_plan, decide=cuts)

    @property
    def parameter_dtype(self) -> torch.dtype | None:
        return self.settings.dtype

    @property
    def chunk_elements(self) -> int:
        # The key ``stage3_partition_stream_chunk_size``.
        return self.settings.stream_elements

    @property
    def configured_optimizer(self) -> str | None:
        # The section ``optimizer``.
        return self.settings.optimizer

    def check_sequence_parallel(self, model: nn.Module) -> None:
        # Ulysses divides the heads.
        check_heads(model, self.mesh.sequence_parallel)

    def enable_sequence_parallel(self, model: nn.Module) -> None:
        # The caller that starts DeepSpeed's engine registers Ulysses.
        from zerostart.upstream.deepspeed.ulysses import mask_sequences
        from zerostart.upstream.deepspeed.zero3_partitions import join_group

        if self.mesh.sequence_parallel > 1:
            join_group()  # which Ulysses makes its groups of
            mask_sequences(model)

    def parallel_plans(self) -> tuple[Mapping[str, str] | None, Mapping[str, str] | None]:
        return self.settings.ep_plan, self.settings.tp_plan

    def training_dtype(self, mixed_precision: str) -> torch.dtype | None:
        # DeepSpeed copies the masters.
        return MODEL_DTYPES[mixed_precision]

    def training_config(self, job: TrainingJob, user_config: EngineConfig) -> dict[str, Any]:
        return training_config(self.zero_stage, job, user_config)

    def accelerate_setup(self, mixed_precision: str) -> AccelerateSetup:
        ranks = self.mesh.sequence_parallel, self.mesh.world_size
        return accelerate_setup(mixed_precision, self.config or {}, *ranks)

    def adopt_expert(
        self, parameter: nn.Parameter, like: nn.Parameter, ranges: Ranges, shape: tuple[int, ...]
    ) -> nn.Parameter:
        from zerostart.upstream.deepspeed.experts import mark_like

        mark_like(parameter, like)
        return parameter

    def exempt_unreached(self, model: nn.Module) -> None:
        # Their gradients are zero in flat tensors.
        from zerostart.engines.deepspeed.training import exempt_unreached

        exempt_unreached(model)

    @classmethod
    def find_shards(cls, model: nn.Module, world: World) -> dict[str, Shard]:
        """ZeRO-3 partitions; the other stages keep parameters whole."""
        from zerostart.engines.deepspeed.partitioning import current_shards

        return current_shards(model)

    @classmethod
    def has_own_values(cls, parameter: torch.Tensor) -> bool:
        """True for the experts of DeepSpeed's MoE."""
        return editing.has_own_values(parameter)

    @classmethod
    def training_state(cls, model: nn.Module, optimizer: object) -> TrainingState | None:
        engine = upstream.engine_of(model)
        if engine is None:
            upstream.check_engine_given(model.parameters())
            return None
        return DeepSpeedState(engine)

    @classmethod
    def drop_gathered(cls, parameters: Iterable[torch.Tensor]) -> None:
        upstream.drop_gathered(parameters)

    @classmethod
    def is_gathered(cls, parameter: torch.Tensor) -> bool:
        """True inside ``GatheredParameters``, with or without a modifier rank."""
        return is_gathered(parameter)

    @classmethod
    def check_editable(cls, parameter: torch.Tensor, name: str) -> None:
        editing.check_editable(parameter, name)

    @classmethod
    def master_of(cls, parameter: torch.Tensor) -> AbstractContextManager[Master | None]:
        """Gathered copies of a changed partition are gone afterwards. Raises UnsupportedVersionError."""
        return editing.master_of(parameter)

    @classmethod
    def check_replaceable(cls, model: nn.Module, parameter: torch.Tensor, action: str) -> None:
        if editing.optimizer_of(parameter) is not None:
            raise EngineError(
                f"{action} after DeepSpeed has made an optimizer for them; resize them before "
                "deepspeed.initialize"
            )


class ZeroThree(DeepSpeed):
    """ZeRO-3: parameters partitioned over their ranks by runs of the row-major order."""

    def import_library(self) -> None:
        # Also imports of the end of a load, whose memory would otherwise count as the load's.
        from zerostart.engines.deepspeed import calls, partitioning  # noqa: F401
        from zerostart.upstream.deepspeed import construction  # noqa: F401
        from zerostart.upstream.deepspeed.zero3_optimizer import require_stage3

        require_stage3()

    @property
    def adopted_dtype(self) -> torch.dtype | None:
        # ``zero.Init`` makes parameters in fp32 unless another dtype is enabled.
        return self.parameter_dtype or torch.float32

    @property
    def building_dtype(self) -> torch.dtype | None:
        # ``zero.Init`` computes in the parameters' dtype.
        return self.adopted_dtype

    def placements(self, model: nn.Module, parallelism: Parallelism) -> Placements:
        shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        # Rank 0 has as many experts as any rank.
        sizes = {
            name: (
                prod(parallelism.section(name, shapes[name], 0).shape),
                parallelism.owners(name, 0)[1],
                parameter.dtype.itemsize,
            )
            for name, parameter in model.named_parameters()
        }
        homes = self.settings.homes(sizes, self.mesh.world_size)
        # Homes of shards for DeepSpeed's values of ``offload_param.device``.
        names = {"none": DEVICE, "cpu": HOST, "nvme": STORAGE}
        lying = {name: names[home] for name, home in homes.items()}

        def layout(name: str, rank: int) -> Layout:
            section = parallelism.section(name, shapes[name], rank)
            return section.expand(flat_partition(section.shape, *parallelism.owners(name, rank)))

        return Placements(
            layout=layout,
            alike=lambda name: (parallelism.is_expert(name), parallelism.cut(name)),
            twin=lambda rank: rank,
            homes=lying,
        )

    def shard_maker(
        self, world: World, dtype: torch.dtype | None, parallelism: Parallelism, placements: Placements
    ) -> ShardMaker:
        from zerostart.engines.deepspeed.partitioning import PartitionMaker

        cut, owners = make_cutter(world, self.settings, parallelism, partitioned=True)
        return PartitionMaker(world, dtype, self.config, self.settings, placements, cut, owners)

    def preserve_calls(self, model: nn.Module, entries: Sequence[str]) -> None:
        # ``entries`` need nothing, as each module gathers its parameters.
        from zerostart.engines.deepspeed.calls import keep_calls
        from zerostart.upstream.deepspeed.construction import keep_edits, keep_stage

        keep_calls(model)
        keep_edits(model)
        keep_stage(model, self.title, {3}.__contains__)

    def synchronize_added(self, model: nn.Module, added: Sequence[nn.Parameter]) -> None:
        # ``deepspeed.initialize`` partitions them, and each rank provides its part.
        from zerostart.engines.training import broadcast_added

        # Slices of tensors differ between ranks, so rank 0's values are not valid for all.
        if self.mesh.tensor_parallel == 1:
            broadcast_added(lambda: added)

    def offer_masters(self, model: nn.Module, rounded: Collection[str], reader: MasterReader | None) -> None:
        from zerostart.engines.deepspeed.partitioning import mark_parameters

        mark_parameters(model, rounded, reader.read if reader else None)

    def shards_of(self, model: nn.Module, parallelism: Parallelism, rank: int) -> dict[str, Shard]:
        from zerostart.engines.deepspeed.parallel import expert_shards
        from zerostart.engines.deepspeed.partitioning import current_shards

        return expert_shards(model, parallelism, rank) if parallelism.mesh.parallel else current_shards(model)

    def make_callable(self, model: nn.Module) -> None:
        # ``deepspeed.initialize`` registers the hooks that gather partitions.
        from zerostart.engines.deepspeed.calls import start_inference

        start_inference(model, self.config)

    def memory_peaks(self, model: nn.Module, inputs: MemoryInputs) -> list[MemoryPeak]:
        return memory.stage3_peaks(inputs, self.settings)


class FlatBuffers(DeepSpeed):
    """Whole parameters in flat buffers for the optimizers of stages 0 to 2."""

    replicates_parameters = True

    def check(self) -> None:
        super().check()
        if self.exchange and self.mesh.tensor_parallel > 1:
            raise ConfigError(
                f"exchange=True with tensor_parallel={self.mesh.tensor_parallel} is not available on "
                f"{self.title} in this version, where each rank reads its slices; leave exchange out, or use "
                "zero_stage=3"
            )

    def preserve_calls(self, model: nn.Module, entries: Sequence[str]) -> None:
        # No parameters are gathered. Stage 3 would partition shared parameters in another way.
        from zerostart.upstream.deepspeed.construction import keep_stage

        if self.mesh.parallel:
            # Stages that can train the loaded model: DeepSpeed reduces gradients of experts from stage 1 on.
            stages = {1, 2} if self.mesh.expert_parallel > 1 else {0, 1, 2}
            keep_stage(model, self.title, stages.__contains__)

    @property
    def gradient_divisor(self) -> int:
        # Ranks that share sequences count as one. Stage 3 counts all.
        return self.mesh.world_size // self.mesh.sequence_parallel

    def import_library(self) -> None:
        from zerostart.upstream.deepspeed.zero3_partitions import check_sections
        from zerostart.upstream.deepspeed.zero12_optimizers import is_known

        if is_known():
            check_sections(self.config)

    @property
    def cast_dtype(self) -> torch.dtype | None:
        return self.parameter_dtype

    def placements(self, model: nn.Module, parallelism: Parallelism) -> Placements:
        parameters = dict(model.named_parameters())
        return whole_placements(parameters, parallelism, self._rules(), self.exchange, True, self.zero_stage)

    def shard_maker(
        self, world: World, dtype: torch.dtype | None, parallelism: Parallelism, placements: Placements
    ) -> ShardMaker:
        from zerostart.engines.deepspeed.flat import FlatShards

        cut, _ = make_cutter(world, self.settings, parallelism, partitioned=False)
        return FlatShards(world, self.zero_stage, self._rules(), self.exchange, parallelism, cut)

    def offer_masters(self, model: nn.Module, rounded: Collection[str], reader: MasterReader | None) -> None:
        from zerostart.engines.deepspeed.flat import offer_runs

        if reader is not None and self.zero_stage > 0:
            offer_runs(model, rounded, reader.read_runs)

    def shards_of(self, model: nn.Module, parallelism: Parallelism, rank: int) -> dict[str, Shard]:
        # This rank's experts or slices; other parameters are whole.
        from zerostart.engines.deepspeed.parallel import flat_expert_shards

        return flat_expert_shards(model, parallelism, rank)

    def memory_peaks(self, model: nn.Module, inputs: MemoryInputs) -> list[MemoryPeak]:
        if self.zero_stage == 0:
            return replicated_peaks(inputs, masters=True)
        return memory.flat_peaks(inputs, self.settings, self.zero_stage)

    def _rules(self) -> FlatRules:
        return self.settings.flat_rules(self.zero_stage, self.mesh.data(0)[1])
