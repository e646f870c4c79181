"""The way of a load: catalog, model, recipes, shards, plan, transfer. Read from the top."""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from zerostart import engines, models
from zerostart.checkpoint.catalog import Catalog
from zerostart.engines import Shard
from zerostart.engines.deepspeed.flat import offer_runs
from zerostart.engines.deepspeed.settings import configured_dtype
from zerostart.engines.fsdp2.units import let_cast
from zerostart.equality import equal_in
from zerostart.errors import ConfigError
from zerostart.forecast import WorldPlan, forecast_ranks
from zerostart.foreseen import RANKS_OF_A_MACHINE, Foreseen
from zerostart.layout import Mesh, Parallelism, replicated
from zerostart.masters import masters_of
from zerostart.models import Built, Program, Settled
from zerostart.planning import Destination, Plan, PlanOptions, Sharing, join
from zerostart.recipe import Coverage, Recipe, Recipes, Target, main_dtype, torch_dtype, trace
from zerostart.reporting import Clock, Report, keep
from zerostart.serving import Moved, Wants, agree_on_sharing, execute_together
from zerostart.sources import check_model, described, open_source
from zerostart.transfer import MIN_CHUNK, PeakMeter, Progress, Tuning, tune
from zerostart.world import World, current_world, default_device

__all__ = [
    "Prepared",
    "Request",
    "collector_paused",
    "forecast",
    "initialise_missing",
    "place_buffers",
    "prepare",
    "reported",
    "run",
    "transfer",
    "wanted_of",
]


@dataclass(frozen=True)
class Request:
    """The arguments of a load, as ``zerostart.load`` documents them."""

    source: Any
    model: Any = None
    engine: str = "deepspeed"
    zero_stage: int = 3
    engine_config: Mapping[str, Any] | None = None
    expert_parallel: int = 1
    tensor_parallel: int = 1
    dtype: torch.dtype | None = None
    converter: Any = None
    memory_limit: int | None = None
    chunk_size: int | None = None
    exchange: bool | None = None
    strict: bool = True
    progress: bool = False
    fp32_masters: bool = True
    #: Takes names and shapes of what has another shape in the checkpoint, which is then initialised as if it
    #: were missing; None: a mismatch is an error.
    reinitialised: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] | None = None

    def check(self) -> None:
        """Raise ConfigError for arguments that no load can serve."""
        engines.check_choice(self.engine, self.zero_stage)
        engines.settings_of(self.engine, self.engine_config)
        engines.check_settings(
            self.engine,
            self.zero_stage,
            self.engine_config,
            self.expert_parallel > 1,
            self.tensor_parallel > 1,
        )
        if self.dtype is not None and not (
            isinstance(self.dtype, torch.dtype) and self.dtype.is_floating_point
        ):
            raise ConfigError(f"dtype={self.dtype!r} is not a floating torch.dtype")
        if self.exchange not in (None, True, False):
            raise ConfigError(f"exchange={self.exchange!r} must be True, False, or None to have it chosen")
        for name in ("memory_limit", "chunk_size"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < MIN_CHUNK):
                raise ConfigError(f"{name}={value!r} must be a number of bytes, at least {MIN_CHUNK}")

    @property
    def flat(self) -> bool:
        """Whether parameters stay whole, in flat buffers: stage 0, and on DeepSpeed stages 1 and 2."""
        return engines.keeps_whole(self.engine, self.zero_stage)

    @property
    def forced_exchange(self) -> bool | None:
        """Whether bytes that several ranks want must be read once, as ``serving`` takes it.

        In flat buffers an exchange that is asked for is the engine's: it has each rank want a share alone.
        """
        return None if self.flat and self.exchange else self.exchange

    def mesh(self, world_size: int) -> Mesh:
        """The ranks as a mesh. Raises ConfigError where they do not fit, or the engine cannot train it so."""
        mesh = Mesh(world_size, self.expert_parallel, self.tensor_parallel)
        engines.settings_of(self.engine, self.engine_config).check_mesh(mesh)
        return mesh

    def tuning(
        self, catalog: Catalog, device: torch.device, computes: bool, ranks: int | None = None
    ) -> Tuning:
        """How the catalog's bytes are read into memory of ``device``, with ``ranks`` ranks on the machine.

        A thread that also ``computes`` has a chunk of scratch beside its staging buffers. DeepSpeed's own
        ``stage3_partition_stream_chunk_size`` counts elements, and is followed where no chunk is given here.
        """
        files = catalog.files if catalog.memory is None else ()
        chunk = self.chunk_size
        elements = getattr(engines.settings_of(self.engine, self.engine_config), "stream_elements", 0)
        if chunk is None and elements > 0:
            stored = main_dtype(catalog.tensors.values())
            chunk = max(MIN_CHUNK, elements * (stored.itemsize if stored is not None else 4))
        return tune(files, device.type != "cpu", computes, self.memory_limit, chunk, ranks)


def run(request: Request) -> nn.Module:
    """Load, collectively; see ``zerostart.load``."""
    clock = Clock()
    with collector_paused(), engines.contexts_aside():
        return _load(request, clock)


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """Planning makes many objects and no cycles; a full collection amid them costs more than the plan."""
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()


def _load(request: Request, clock: Clock) -> nn.Module:
    world = _world(request)
    with world.phase("arguments"):
        request.check()
        mesh = request.mesh(world.size)
    with PeakMeter(default_device()) as meter:
        with clock.phase("plan"):
            catalog = open_source(request.source, world, request.model)
        with clock.phase("build"), world.phase("building the model"):
            check_model(request.model, catalog)
            with meter.paused():
                engines.require(request.engine, request.zero_stage)
                models.require(request.model, catalog.root)
            built = _build(request, catalog)
            parallelism = engines.resolve(built.model, request.engine, mesh, request.engine_config)
        with clock.phase("plan"), world.phase("planning"):
            recipes = _recipes(request, catalog, built)
            coverage = models.tie_names(built.model, recipes, equal_in(catalog, world))
            coverage.check(described(request.source, catalog), type(built.model).__name__, request.strict)
        with clock.phase("build"), world.phase("sharding the model"):
            settled = models.initialise_rest(built, recipes)
            engine = engines.make_engine(
                request.engine,
                world,
                built.dtype,
                request.engine_config,
                parallelism,
                request.zero_stage,
                request.exchange,
            )
        with clock.phase("build"):
            tier = engines.settle(engine, built.model, list(settled.parameters))
        with clock.phase("build"), world.phase("sharding the model"):
            shards = engine.shard(built.model, list(settled.parameters))
            buffers = place_buffers(built.model, settled, engine.device)
        with clock.phase("plan"), world.phase("planning"):
            tuning = request.tuning(catalog, engine.device, bool(recipes.computed))
            wanted = wanted_of(settled, shards, buffers)
            plan = join(catalog, wanted, PlanOptions(tuning.chunk_size))
            own = Wants.of(plan, tuning, request.forced_exchange)
        with clock.phase("plan"):
            sharing = agree_on_sharing(own, plan, world)
            if sharing is not None and sharing.once:
                with world.phase("planning"):
                    plan = join(catalog, wanted, PlanOptions(sharing.chunk_size))
        with clock.phase("read"), world.phase("reading"):
            shown = request.progress and world.rank == 0
            moved = transfer(plan, settled, shards, buffers, tuning, sharing, shown, world)
        with clock.phase("read"), world.phase("initialising"):
            initialise_missing(world, settled, shards)
        with clock.phase("build"), world.phase("handing over"):
            gathered = engine.finish(built.model)
            if gathered:
                moved = replace(
                    moved,
                    received=moved.received + gathered,
                    how=f"{moved.how}; each rank a share of the flat buffers, gathered from all",
                )
            _offer_masters(built.model, catalog, request, settled, shards, tuning)
            _finish(built, recipes, request, catalog)
    made = reported(
        Prepared(catalog, built, parallelism, recipes, coverage, settled),
        request,
        (world.rank, world.size),
        clock,
        moved,
        meter,
    )
    keep(built.model, replace(made, tier=tier))
    return built.model


def reported(
    known: Prepared,
    request: Request,
    place: tuple[int, int],
    clock: Clock,
    moved: Moved,
    meter: PeakMeter,
) -> Report:
    """The report of the rank ``place`` (rank, world size)."""
    return Report(
        missing=known.coverage.missing,
        unexpected=known.coverage.unexpected,
        mismatched=tuple(known.coverage.mismatched),
        ignored=known.coverage.ignored,
        initialised=known.settled.initialised,
        initialised_whole=_whole(known.settled),
        converted=known.recipes.converted,
        computed=known.recipes.computed,
        computed_whole=known.recipes.computed_whole,
        phases=clock.stop(),
        read_bytes=moved.read,
        planned_bytes=moved.planned,
        exchanged_bytes=moved.received,
        reading=moved.how,
        peak_host_bytes=meter.host_bytes,
        peak_device_bytes=meter.device_bytes,
        rank=place[0],
        world_size=place[1],
        engine=request.engine,
        parallelism=known.parallelism,
    )


def forecast(request: Request, world_size: int, rank: int | None = None) -> WorldPlan:
    """The plan of every rank, or of one, without a process group; see ``zerostart.plan``."""
    with collector_paused(), engines.contexts_aside():
        return _forecast(request, world_size, rank)


def _forecast(request: Request, world_size: int, rank: int | None) -> WorldPlan:
    clock = Clock()
    known = prepare(request, world_size, rank)
    here = min(world_size, RANKS_OF_A_MACHINE)
    tuning = request.tuning(known.catalog, default_device(), bool(known.recipes.computed), here)
    of = range(world_size) if rank is None else [rank]
    catalog, model, settled = known.catalog, known.built.model, known.settled
    placed = engines.planned(
        request.engine,
        request.engine_config,
        model,
        known.parallelism,
        request.zero_stage,
        request.exchange,
    )
    ranks = forecast_ranks(catalog, model, settled, placed, of, tuning)
    made = WorldPlan.of(catalog, known.recipes, known.coverage, request.engine, world_size, ranks, 0.0)
    made = Foreseen(catalog, settled, placed, tuning).exchanged(made, request.forced_exchange)
    return replace(made, tier=placed.tier, planning_seconds=clock.stop()["total"])


@dataclass(frozen=True)
class Prepared:
    """All that is known of a load before anything is sharded; the same on every rank."""

    catalog: Catalog
    built: Built
    parallelism: Parallelism
    recipes: Recipes
    coverage: Coverage
    settled: Settled


def prepare(request: Request, world_size: int, rank: int | None = None, strict: bool = False) -> Prepared:
    """What a load over ``world_size`` ranks starts from, found out by this process alone."""
    request.check()
    if world_size < 1:
        raise ConfigError(f"world_size={world_size} must be at least 1")
    if rank is not None and not 0 <= rank < world_size:
        raise ConfigError(f"rank={rank} is not one of the {world_size} ranks")
    mesh = request.mesh(world_size)
    alone = World(0, 1, None)
    catalog = open_source(request.source, alone, request.model)
    check_model(request.model, catalog)
    built = _build(request, catalog)
    parallelism = engines.resolve(built.model, request.engine, mesh, request.engine_config)
    recipes = _recipes(request, catalog, built)
    coverage = models.tie_names(built.model, recipes, equal_in(catalog, alone))
    coverage.check(described(request.source, catalog), type(built.model).__name__, strict)
    settled = models.initialise_rest(built, recipes)
    return Prepared(catalog, built, parallelism, recipes, coverage, settled)


def _world(request: Request) -> World:
    """The process group's world; a group of one is made for a process that is alone."""
    if not dist.is_initialized():
        launched = int(os.environ.get("WORLD_SIZE", "1") or 1)
        if launched > 1:
            raise ConfigError(
                f"the launcher started {launched} ranks, but there is no process group: call "
                "torch.distributed.init_process_group() before zerostart.load"
            )
        device = default_device().type
        backend = (
            "gloo" if device == "cpu" else f"cpu:gloo,{device}:{dist.get_default_backend_for_device(device)}"
        )
        dist.init_process_group(backend, store=torch._C._distributed_c10d.HashStore(), rank=0, world_size=1)
    return current_world()


def _build(request: Request, catalog: Catalog) -> Built:
    """The model on meta, with the dtypes of the load."""
    dtype = request.dtype
    if dtype is None and request.engine == "deepspeed":
        dtype = configured_dtype(request.engine_config)
    stored = {name: torch_dtype(entry.dtype, name) for name, entry in catalog.tensors.items()}
    # Not of eight bits: a quantised checkpoint's weights are not what the model computes in.
    first = next((d for d in stored.values() if d.is_floating_point and d.itemsize > 1), None)
    built = models.build(request.model, catalog.root, dtype, first, main_dtype(catalog.tensors.values()))
    models.set_dtypes(built, stored)
    computing = engines.computing_dtype(request.engine, request.engine_config)
    if computing is not None:
        masters = request.fp32_masters and computing == built.dtype and _stored_wider(catalog, computing)
        models.let_cast(built, computing, masters, let_cast)
    return built


def _recipes(request: Request, catalog: Catalog, built: Built) -> Recipes:
    targets = models.expectations(built)
    if request.flat:
        targets = _as_cast(targets, configured_dtype(request.engine_config))
    recipes = trace(catalog, built.model, targets, request.converter, built.quantizer)
    if request.reinitialised is not None:
        request.reinitialised.update(recipes.coverage.mismatched)
        recipes = replace(recipes, coverage=replace(recipes.coverage, mismatched={}))
    return recipes


def _as_cast(targets: dict[str, Target], dtype: torch.dtype | None) -> dict[str, Target]:
    """Parameters in the dtype that DeepSpeed's stages 1 and 2 would cast all of them to."""
    if dtype is None:
        return targets
    return {
        name: t if t.buffer or not t.dtype.is_floating_point else replace(t, dtype=dtype, as_stored=False)
        for name, t in targets.items()
    }


def _stored_wider(catalog: Catalog, dtype: torch.dtype) -> bool:
    """Whether most elements of the checkpoint are stored in a floating dtype of more bytes than ``dtype``."""
    count = {True: 0, False: 0}
    for entry in catalog.tensors.values():
        stored = torch_dtype(entry.dtype, entry.name)
        count[stored.is_floating_point and stored.itemsize > dtype.itemsize] += entry.numel
    return count[True] > count[False]


Placed = dict[str, tuple[Recipe, torch.Tensor]]


def place_buffers(model: nn.Module, settled: Settled, device: torch.device) -> Placed:
    """Move buffers to ``device``; those that the checkpoint fills get storage of their own there."""
    moved: dict[int, torch.Tensor] = {}
    placed: Placed = {}
    for name, buffer in list(model.named_buffers(remove_duplicate=False)):
        recipe = settled.buffers.get(name)
        if id(buffer) not in moved:
            moved[id(buffer)] = (
                buffer.to(device)
                if recipe is None
                else torch.empty(buffer.shape, dtype=recipe.target.dtype, device=device)
            )
            if recipe is not None:
                placed[name] = (recipe, moved[id(buffer)])
        models.replace_tensor(model, name, moved[id(buffer)])
    return placed


def wanted_of(
    settled: Settled, shards: list[Shard], buffers: Placed
) -> list[tuple[Recipe, Any, Destination]]:
    """Recipe, layout and destination of everything that is read, in the order of ``_storages``."""
    wanted: list[tuple[Recipe, Any, Destination]] = []
    for shard in shards:
        recipe = settled.parameters[shard.name]
        if isinstance(recipe, Recipe):
            wanted.append((recipe, shard.layout, _destination(shard.name, shard.storage, shard.layout.owned)))
    for name, (recipe, buffer) in buffers.items():
        flat = buffer.view(-1)
        wanted.append((recipe, replicated(buffer.shape), _destination(name, flat, flat.numel())))
    return wanted


def _storages(settled: Settled, shards: list[Shard], buffers: Placed) -> list[torch.Tensor]:
    read = [s.storage for s in shards if isinstance(settled.parameters[s.name], Recipe)]
    return [*read, *(buffer.view(-1) for _, buffer in buffers.values())]


def _destination(name: str, storage: torch.Tensor, owned: int) -> Destination:
    return Destination(name, storage.numel(), owned, storage.dtype, storage.device.type == "cpu")


def transfer(
    plan: Plan,
    settled: Settled,
    shards: list[Shard],
    buffers: Placed,
    tuning: Tuning,
    sharing: Sharing | None,
    shown: bool,
    world: World,
) -> Moved:
    """Read what the checkpoint has, into the shards and buffers; collective."""
    storages = _storages(settled, shards, buffers)
    return execute_together(plan, storages, Progress(plan.read_bytes, shown), tuning, world, sharing)


def initialise_missing(world: World, settled: Settled, shards: list[Shard]) -> None:
    """Fill what the checkpoint lacks, from rank 0's random stream.

    Every rank's shard has to come from one stream, and nothing says that the ranks were seeded alike. On
    rank 0 the generator goes on as after ``from_pretrained``; so it does on ranks that were seeded like it.
    """
    programs = [(s, p) for s in shards if isinstance(p := settled.parameters[s.name], Program)]
    if not programs:
        return
    own = torch.get_rng_state()
    shared = world.share(torch.get_rng_state, "sharing the random stream")
    torch.set_rng_state(shared)
    try:
        models.fill_missing([(p, s.layout, s.storage) for s, p in programs], settled.start)
    finally:
        if not torch.equal(own, shared):
            torch.set_rng_state(own)


def _offer_masters(
    model: nn.Module,
    catalog: Catalog,
    request: Request,
    settled: Settled,
    shards: list[Shard],
    tuning: Tuning,
) -> None:
    """Leave with the parameters what an engine needs to make fp32 masters of what the checkpoint stores."""
    rounded: list[str] = []
    masters = None
    if request.fp32_masters:
        rounded, masters = masters_of(catalog, request.source, settled.parameters, shards, tuning)
    if not request.flat:
        engines.offer_masters(request.engine, model, rounded, masters.read if masters else None)
    elif masters is not None and request.zero_stage > 0:
        offer_runs(model, rounded, masters.read_runs)


def _whole(settled: Settled) -> tuple[str, ...]:
    return tuple(n for n, p in settled.parameters.items() if isinstance(p, Program) and p.whole)


def _finish(built: Built, recipes: Recipes, request: Request, catalog: Catalog) -> None:
    """Leave a model of transformers or diffusers as ``from_pretrained`` leaves it."""
    model: Any = built.model
    model.eval()
    named = catalog.memory is None
    if models.is_pretrained(model):
        name = described(request.source, catalog) if named else model.config.name_or_path
        models.finish_pretrained(model, recipes, name, catalog.root, built.dtype)
    elif models.is_diffusers(model) and named and str(request.source) not in catalog.files:
        models.finish_diffusers(model, described(request.source, catalog))
