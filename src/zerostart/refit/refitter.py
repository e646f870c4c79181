"""Push the weights of a live model into a target, from all ranks."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress

from torch import nn

from zerostart.distributed.machine import machine_name
from zerostart.distributed.world import World, current_world, default_device
from zerostart.errors import ConfigError
from zerostart.live.report import Clock
from zerostart.refit.image import Image, SetDigests, SharedImage, Sums, combine_sums
from zerostart.refit.pushes import (
    ModelWrites,
    PushReport,
    PushTargets,
    RefitSettings,
    WorkerReport,
    prepare_model,
)
from zerostart.refit.receiver import Receiver
from zerostart.refit.server import Worker, WorkerServer
from zerostart.refit.wire import Driver, socket_path
from zerostart.refit.within import WithinRanks
from zerostart.transfer.meter import PeakMeter
from zerostart.transfer.tuning import push_threads
from zerostart.transfer.writing import write_out


class Refitter:
    """Push new versions of a model's weights into a target.

    Every rank creates one. As a context manager it calls ``close`` at the end. After an error, workers keep
    waiting for another trainer at the same address.
    """

    def __init__(self, model: nn.Module, target: object, settings: RefitSettings) -> None:
        """Connect with the target; collective. Raises the errors of ``zerostart.refit``."""
        self._world = world = current_world()
        self._model, self._settings, self.version = model, settings, 0
        self._image: Image | None = None
        self._targets: PushTargets | None = None
        self._transport: WithinRanks | WorkerProcesses | None = None
        by_rank = world.all_gather_object(settings, "comparing the arguments")
        with world.phase("inspecting the target"):
            if (rank := next((r for r, other in enumerate(by_rank) if other != by_rank[0]), 0)) != 0:
                raise ConfigError(
                    f"zerostart.refit has {by_rank[0]} on rank 0, but {by_rank[rank]} on rank {rank}: call "
                    "it with the same arguments on every rank"
                )
            settings.check()
            driver, local = _inspect(target)
            is_valid = target is None or isinstance(target, str) or driver is not None or local is not None
            if target is model or not is_valid:
                raise ConfigError(
                    f"target is {'the model itself' if target is model else f'a {type(target).__name__}'}: "
                    "pass an address for workers to connect with by zerostart.serving.serve, vLLM's LLM, "
                    "SGLang's Engine, the http:// address of a server of either, a module with load_weights "
                    "or a zerostart.serving.Receiver of it"
                )
        kind = "none" if target is None else "other" if driver is None else "engine"
        kinds = world.all_gather_object(kind if local is None else "inside", "inspecting the target")
        is_local = "inside" in kinds
        with world.phase("starting a refit"):
            kind, leads = kinds[world.rank], kinds[0] == "engine" and not getattr(driver, "in_process", False)
            fits = kind == "none" or is_local == (kind == "inside")
            if not fits or (kind == "engine" and world.rank and not leads):
                raise ConfigError(
                    f"target is a {type(target).__name__} on rank {world.rank}, but other ranks have another "
                    "kind: pass engines that run in the ranks on every rank that has one, an engine whose "
                    "workers are other processes on rank 0 only, and None on the others"
                )
        if is_local:
            self._transport = WithinRanks(local, driver, settings.strict, world)
            self._match_target()  # trace the loader now, to fail early
        else:
            image = self._prepare_writes().image
            address = target if isinstance(target, str) and driver is None else None
            self._transport = WorkerProcesses(image, address, driver, settings, world)
        self.address = self._transport.address

    def __enter__(self) -> Refitter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self._close(kind is None)

    def push(self) -> PushReport:
        """Copy the model's current weights into the target as a new version; collective.

        All ranks raise the same error:

        - PeerError, naming the worker, if one died or does not answer, or an engine's call failed;
        - ConversionError if an engine's weight loader cannot be traced;
        - VerifyError, naming worker and tensors, if a worker's values differ from the trainer's.

        After an error the target has no valid version until the next push succeeds. That push uses the
        workers that are still connected.
        """
        world, transport = self._world, self._transport
        if transport is None:
            raise ConfigError("this refit is closed: call zerostart.refit again")
        clock = Clock("plan", "move", "fill")
        with PeakMeter(default_device()) as meter:
            with world.phase("pushing weights"):
                with clock.phase("plan"):
                    writes, targets = self._match_target()
                with clock.phase("move"), world.phase("moving weights"):
                    self._sums.begin()
                    moved_bytes = transport.move(writes, self._sums)
                expected = self._sums.summed(world)
            sums = [expected[number] for number in targets.numbers]
            self.version += 1
            with clock.phase("fill"):
                transport.serve(self.version, sums)
            phases = clock.stop()
        figures = world.all_gather_object(
            (phases, meter.host_bytes, meter.device_bytes or 0), "figures of a push"
        )
        workers = tuple(
            WorkerReport(name, self.version, wants.nbytes, combine_sums(each))
            for name, wants, each in zip(targets.names, targets.wants, sums, strict=True)
            if name is not None
        )
        return PushReport(
            version=self.version,
            transport=transport.name,
            phases={key: max(each[0][key] for each in figures) for key in phases},
            owned_bytes=writes.image.layout.total_size,
            moved_bytes=moved_bytes,
            wanted_bytes=sum(wants.nbytes for wants in targets.wants),
            peak_host_bytes=max(each[1] for each in figures),
            peak_device_bytes=max(each[2] for each in figures),
            workers=workers,
            untaken=targets.untaken,
        )

    def close(self) -> None:
        """Tell the workers that no more versions follow, and release all resources."""
        self._close(True)

    def _close(self, is_over: bool) -> None:
        transport, self._transport = self._transport, None
        if transport is not None:
            transport.close(is_over)

    def _prepare_writes(self) -> ModelWrites:
        writes = prepare_model(self._model, self._settings, self._world, self._image)
        self._image = writes.image
        return writes

    def _match_target(self) -> tuple[ModelWrites, PushTargets]:
        """Agree which worker needs which bytes; collective."""
        assert self._transport is not None, "not closed"
        writes = self._prepare_writes()
        targets = self._transport.agree_on_targets(writes)
        if targets is not self._targets:
            self._targets, self._sums = targets, SetDigests(writes.image, targets.sets)
        return writes, targets


class WorkerProcesses:
    """Transport to workers in other processes on this machine, through shared memory.

    The shared memory contains the image: the bytes of the safetensors file that a save would write. Trainer
    ranks write their elements into it, and workers read theirs from it.
    """

    name = "shared_memory"

    def __init__(
        self, image: Image, target: str | None, driver: Driver | None, settings: RefitSettings, world: World
    ) -> None:
        """Connect with the workers; collective.

        Only rank 0 uses ``driver``, the driver of the engine that has the workers.
        """
        self._image, self._world = image, world
        self._server: WorkerServer | None = None
        self._shared: SharedImage | None = None

        def listen() -> tuple[str, str, str]:
            path = None if target is None else socket_path(target)
            self._server = WorkerServer(path, image, driver, settings)
            return self._server.address, machine_name(), f"/proc/{os.getpid()}/fd/{self._server.descriptor}"

        def join() -> None:
            assert self._server is not None, "rank 0 has it"
            self._server.join()

        try:
            self.address, machine, memory = world.broadcast_object(listen, "listening for workers")
            with world.phase("mapping the image"):
                self._shared = SharedImage(image, self._open_memory(machine, memory))
            world.broadcast_slow(join, "connecting the engine")
        except BaseException:
            self.close(False)
            raise
        #: Workers of the current push, on rank 0.
        self._announced: list[Worker] = []

    def agree_on_targets(self, writes: ModelWrites) -> PushTargets:
        """Wait for the workers and agree which bytes each needs; collective."""
        with self._world.phase("comparing the model"):
            if writes.image is not self._image:
                raise ConfigError(
                    "the model's tensors have changed since zerostart.refit was called: call it again"
                )
        targets = self._world.broadcast_slow(self._find_workers, "looking for workers")
        if targets is not None:
            self._targets = targets
        return self._targets

    def move(self, writes: ModelWrites, sums: SetDigests) -> int:
        """Write this rank's elements into the image; return the bytes written by all ranks."""
        assert self._shared is not None, "not closed"
        write_out(writes.plan, writes.storages, self._shared.part, push_threads(), sums.add_rows)
        return writes.image.layout.total_size

    def serve(self, version: int, sums: Sequence[Sums]) -> None:
        """Publish the version to the workers; collective."""

        def publish() -> None:
            assert self._server is not None, "rank 0 has it"
            self._server.serve(self._announced, version, sums)

        self._world.broadcast_slow(publish, "publishing the version")

    def close(self, is_over: bool) -> None:
        """Close the connections with the workers."""
        if self._server is not None:
            self._server.close(is_over)
        if self._shared is not None:
            self._shared.close()
        self._server = self._shared = None

    def _open_memory(self, machine: str, path: str) -> int:
        """Open the image of rank 0; raise ConfigError on another machine."""
        with suppress(OSError):
            if machine == machine_name():
                return os.open(path, os.O_RDWR | os.O_CLOEXEC)
        raise ConfigError(
            f"rank {self._world.rank} cannot open the shared memory of rank 0, which works on one machine "
            "only: across machines, send the tensors of zerostart.weight_source with the engine's own weight "
            "transfer"
        )

    def _find_workers(self) -> PushTargets | None:
        """Return the workers of this push; None if they are the same as before."""
        assert self._server is not None, "rank 0 has it"
        workers = self._server.find_workers()
        if workers == self._announced:
            return None
        self._announced = workers
        return PushTargets.of(self._image, [w.name for w in workers], [w.wants for w in workers])


def _inspect(target: object) -> tuple[Driver | None, Receiver | None]:
    """Return the target's driver and its worker in this rank, if any."""
    driver = target if isinstance(target, Driver) else None
    if isinstance(target, Receiver):
        return None, target
    if driver is None and target is not None:
        from zerostart.refit import sglang, vllm

        # vLLM last: only SGLang's server has a route that identifies it.
        driver = sglang.driver_of(target) or vllm.driver_of(target)
    # Modules of an engine have `load_weights`; models for training do not.
    if driver is None and isinstance(target, nn.Module) and callable(getattr(target, "load_weights", None)):
        return None, Receiver(target)
    worker: Callable[[], Receiver | None] | None = getattr(driver, "worker", None)
    return driver, None if worker is None else worker()
