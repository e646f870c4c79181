"""On the trainer's rank 0: having vLLM's workers connect, and telling them of each push.

A target is vLLM's ``LLM``, the address of its server (``http://...``), or any object with the four calls of
vLLM's ``VLLMWeightSyncClient``, such as its clients for HTTP and Ray.
"""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from zerostart.checkpoint.strict_json import JsonMapping
from zerostart.errors import ConfigError, PeerError
from zerostart.integrations.http import Server
from zerostart.integrations.vllm import worker as workers_side
from zerostart.state.refitting.receiver import Receiver

logger = logging.getLogger("zerostart")

#: Under which ``register`` has the engine.
BACKEND = "zerostart"
#: Seconds for what a server answers at once.
PATIENCE = 60.0
_CALLS = ("init_weight_transfer_engine", "start_weight_update", "update_weights", "finish_weight_update")


def register() -> None:
    """Register the engine with vLLM, in a process that has it; vLLM calls this in each of its own.

    Nothing of it is imported before vLLM asks for the engine.
    """
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory

    # vLLM runs plugins more than once in a process.
    with suppress(ValueError):
        WeightTransferEngineFactory.register_engine(
            BACKEND, "zerostart.integrations.vllm.engine", "WeightTransfer"
        )


def driver_of(target: object) -> ServerDriver | ClientDriver | EngineDriver | None:
    """The driver of a vLLM engine; None for any other target."""
    if isinstance(target, str) and target.startswith(("http://", "https://")):
        return ServerDriver(target)
    if not all(callable(getattr(target, name, None)) for name in _CALLS):
        return None
    if callable(getattr(target, "collective_rpc", None)) and hasattr(target, "llm_engine"):
        return EngineDriver(target)
    return ClientDriver(target)


def _check_emptied(answer: object) -> None:
    """Raise PeerError where vLLM has kept its prefix cache, which it does while requests run."""
    if answer is False:
        raise PeerError(
            "vLLM has not emptied its prefix cache, whose keys and values are of the version before, since "
            "requests are running: wait for them, or pause generation, before a push; then push again"
        )


class ClientDriver:
    """Anything with the four calls of ``VLLMWeightSyncClient``.

    Its attribute ``workers`` says how many there are; one where it has none.
    """

    def __init__(self, client: Any) -> None:
        if inspect.iscoroutinefunction(client.update_weights):
            raise ConfigError(
                f"the calls of this {type(client).__name__} are coroutines: give zerostart.refit the address "
                "of its server, or an object whose four calls return when they are done"
            )
        self._client = client
        self.workers = int(getattr(client, "workers", 1))

    def join(self, how: JsonMapping) -> None:
        """Have the workers connect."""
        self._client.init_weight_transfer_engine(dict(how))

    def follow(self, version: int) -> None:
        """Have the workers take part in a push."""
        self._client.start_weight_update()
        try:
            self._client.update_weights({"version": version})
        except BaseException:
            with suppress(Exception):  # workers that took it are still within the update
                self._client.finish_weight_update("")
            raise
        self._client.finish_weight_update(str(version))

    def leave(self) -> None:
        """Have the workers close their connections."""
        with suppress(Exception):
            self._client.shutdown_weight_transfer_engine()


class ServerDriver(ClientDriver):
    """vLLM's server, started with ``VLLM_SERVER_DEV_MODE=1`` and ``--weight-transfer-config``."""

    def __init__(self, address: str) -> None:
        super().__init__(_Server(address))

    def follow(self, version: int) -> None:
        """Have the workers take part in a push; what the server has cached of prompts is dropped."""
        super().follow(version)
        _check_emptied(self._client.post("reset_prefix_cache").get("success"))


class _Server(Server):
    """The routes of vLLM's server."""

    def __init__(self, address: str) -> None:
        super().__init__(
            address,
            "start it with VLLM_SERVER_DEV_MODE=1 and --weight-transfer-config "
            f'\'{{"backend": "{BACKEND}"}}\'',
        )
        self.workers = int(self.get("get_world_size", PATIENCE)["world_size"])

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.post("init_weight_transfer_engine", {"init_info": init_info})

    def start_weight_update(self) -> None:
        self.post("start_weight_update")

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.post("update_weights", {"update_info": update_info})

    def finish_weight_update(self, weight_version: str) -> None:
        self.post("finish_weight_update", {"weight_version": weight_version})

    def shutdown_weight_transfer_engine(self) -> None:
        self.post("shutdown_weight_transfer_engine", timeout=PATIENCE)


class EngineDriver:
    """vLLM's ``LLM`` in this process, with its workers here or in processes of their own."""

    #: It lives in the rank that was given it.
    in_process = True

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        config = engine.llm_engine.vllm_config
        parallel = config.parallel_config
        # Of an engine that several processes make up, each by an LLM of its own, one worker is here.
        apart = parallel.distributed_executor_backend == "external_launcher"
        self.workers = 1 if apart else int(parallel.world_size_across_dp)
        transfer = config.weight_transfer_config
        self._configured = transfer is not None and transfer.backend == BACKEND
        extension = str(parallel.worker_extension_cls or "")
        self._extended = extension.startswith("zerostart.")

    def join(self, how: JsonMapping) -> None:
        """Have the workers connect."""
        if self._configured:
            self._engine.init_weight_transfer_engine({"init_info": dict(how)})
        else:
            self._call(workers_side.join, dict(how))

    def follow(self, version: int) -> None:
        """Have the workers take part in a push."""
        if self._configured:
            self._engine.start_weight_update()
            try:
                self._engine.update_weights({"update_info": {"version": version}})
            except BaseException:
                with suppress(Exception):  # workers that took it are still within the update
                    self._engine.finish_weight_update("")
                raise
            self._engine.finish_weight_update(str(version))
        else:
            self._call(workers_side.follow, {"version": version})

    def served(self, version: int) -> None:
        """Have what the engine has cached of prompts dropped, and have it say which version it has."""
        tell = getattr(self._engine.llm_engine, "set_weight_version", None)  # newer ones count
        if tell is not None:
            tell(str(version))
        _check_emptied(self._engine.reset_prefix_cache())

    def worker(self) -> Receiver | None:
        """The one worker, where it runs in this process; else None."""
        if self.workers == 1:
            with suppress(TypeError):  # see ``_call``
                found = self._engine.collective_rpc(workers_side.receiver, kwargs={"process": os.getpid()})
                assert found[0] is None or isinstance(found[0], Receiver), "of ours"
                return found[0]
        return None

    def leave(self) -> None:
        """Have the workers close their connections."""
        with suppress(Exception):
            if self._configured:
                self._engine.shutdown_weight_transfer_engine()
            else:
                self._call(workers_side.leave, {})

    def _call(self, function: Callable[..., object], arguments: JsonMapping) -> None:
        if self._extended:
            self._engine.collective_rpc(f"zerostart_{function.__name__}", kwargs=arguments)
            return
        try:
            self._engine.collective_rpc(function, kwargs=arguments)
        except TypeError as error:
            # vLLM sends no functions to other processes, unless it is told to trust what it gets.
            raise ConfigError(
                "the workers of this LLM are other processes, which have not been told of zerostart: make it "
                f'with weight_transfer_config={{"backend": "{BACKEND}"}}, or '
                'worker_extension_cls="zerostart.serving.VLLMWorkerExtension"'
            ) from error
