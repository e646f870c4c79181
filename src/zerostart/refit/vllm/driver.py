"""On the trainer's side: having vLLM's workers connect, and telling them of each push.

A target is vLLM's ``LLM``, the address of its server (``http://...``), or any object with the four calls of
vLLM's ``VLLMWeightSyncClient``.
"""

from __future__ import annotations

import inspect
import logging
import os
from typing import Any

from zerostart.errors import ConfigError, PeerError
from zerostart.refit.drivers import Server
from zerostart.refit.receiver import Receiver
from zerostart.refit.vllm import worker as workers_side

logger = logging.getLogger("zerostart")
#: The name under which ``register`` has the engine.
BACKEND = "zerostart"
#: Seconds for what a server answers at once.
ANSWER_TIMEOUT_S = 60.0
_CALLS = ("init_weight_transfer_engine", "start_weight_update", "update_weights", "finish_weight_update")
_CONFIG = f'{{"backend": "{BACKEND}"}}'


def register() -> None:
    """Register the engine with vLLM, in each process of vLLM; nothing of it is imported before its use."""
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory

    try:
        WeightTransferEngineFactory.register_engine(BACKEND, "zerostart.refit.vllm.engine", "WeightTransfer")
    except ValueError as error:  # vLLM runs plugins more than once in a process
        logger.debug("%s", error)


def driver_of(target: object) -> VLLMDriver | EngineDriver | None:
    """Return the driver of a vLLM engine; None for any other target."""
    if isinstance(target, str) and target.startswith(("http://", "https://")):
        return VLLMDriver(_Server(target))
    if not all(callable(getattr(target, name, None)) for name in _CALLS):
        return None
    if callable(getattr(target, "collective_rpc", None)) and hasattr(target, "llm_engine"):
        return EngineDriver(target)
    return VLLMDriver(target)


def _check_emptied(answer: object) -> None:
    """Raise PeerError if vLLM has kept its prefix cache, as it does while requests run."""
    if answer is False:
        raise PeerError(
            "vLLM has not emptied its prefix cache, whose keys and values are of the version before, since "
            "requests are running: wait for them, or pause generation, before a push; then push again"
        )


class VLLMDriver:
    """Anything with the four calls of ``VLLMWeightSyncClient``; its ``workers`` counts the workers."""

    def __init__(self, client: Any) -> None:
        if inspect.iscoroutinefunction(client.update_weights):
            raise ConfigError(
                f"the calls of this {type(client).__name__} are coroutines: give zerostart.refit the address "
                "of its server, or an object whose four calls return when they are done"
            )
        self._client = client
        self.workers = int(getattr(client, "workers", 1))

    def join(self, address: str, timeout: float) -> None:
        self._client.init_weight_transfer_engine({"address": address, "timeout": timeout})

    def follow(self, version: int) -> None:
        self._client.start_weight_update()
        finished = ""
        try:
            self._client.update_weights({"version": version})
            finished = str(version)
        finally:  # workers that took it are still within the update
            self._client.finish_weight_update(finished)

    def served(self, version: int) -> None:
        """Have a server drop what it has cached of prompts."""
        if isinstance(self._client, _Server):
            _check_emptied(self._client.post("reset_prefix_cache").get("success"))

    def leave(self) -> None:
        try:
            self._client.shutdown_weight_transfer_engine()
        except Exception as error:  # of an engine that may be gone
            logger.warning("vLLM's workers have not left: %s", error)


class _Server(Server):
    """The routes of vLLM's server."""

    def __init__(self, address: str) -> None:
        super().__init__(
            address, f"start it with VLLM_SERVER_DEV_MODE=1 and --weight-transfer-config '{_CONFIG}'"
        )
        self.workers = int(self.get("get_world_size", ANSWER_TIMEOUT_S)["world_size"])

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.post("init_weight_transfer_engine", {"init_info": init_info})

    def start_weight_update(self) -> None:
        self.post("start_weight_update")

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.post("update_weights", {"update_info": update_info})

    def finish_weight_update(self, weight_version: str) -> None:
        self.post("finish_weight_update", {"weight_version": weight_version})

    def shutdown_weight_transfer_engine(self) -> None:
        self.post("shutdown_weight_transfer_engine", timeout=ANSWER_TIMEOUT_S)


class _LLM:
    """The calls of an ``LLM``, which takes dictionaries of dictionaries."""

    def __init__(self, engine: Any, workers: int) -> None:
        self._engine, self.workers = engine, workers
        self.start_weight_update = engine.start_weight_update
        self.finish_weight_update = engine.finish_weight_update

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._engine.init_weight_transfer_engine({"init_info": init_info})

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self._engine.update_weights({"update_info": update_info})

    def shutdown_weight_transfer_engine(self) -> None:
        self._engine.shutdown_weight_transfer_engine()


class EngineDriver(VLLMDriver):
    """vLLM's ``LLM`` in this process, with its workers here or in processes of their own."""

    in_process = True

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        config = engine.llm_engine.vllm_config
        parallel = config.parallel_config
        # Of an engine that several processes make up, each by an LLM of its own, one worker is here.
        apart = parallel.distributed_executor_backend == "external_launcher"
        super().__init__(_LLM(engine, 1 if apart else int(parallel.world_size_across_dp)))
        transfer = config.weight_transfer_config
        self._is_configured = transfer is not None and transfer.backend == BACKEND

    def join(self, address: str, timeout: float) -> None:
        if not self._is_configured:
            raise ConfigError(
                "the workers of this LLM are other processes, which have not been told of zerostart: make it "
                f"with weight_transfer_config={_CONFIG}"
            )
        super().join(address, timeout)

    def served(self, version: int) -> None:
        """Have the engine drop what it has cached of prompts, and say which version it has."""
        tell = getattr(self._engine.llm_engine, "set_weight_version", None)  # newer ones count
        if tell is not None:
            tell(str(version))
        _check_emptied(self._engine.reset_prefix_cache())

    def worker(self) -> Receiver | None:
        """Return the one worker, if it runs in this process."""
        if self.workers != 1:
            return None
        try:
            found = self._engine.collective_rpc(workers_side.receiver, kwargs={"process": os.getpid()})
        except TypeError as error:  # vLLM sends no functions to other processes
            logger.debug("%s", error)
            return None
        assert found[0] is None or isinstance(found[0], Receiver), "of ours"
        return found[0]

    def leave(self) -> None:
        if self._is_configured:
            super().leave()
