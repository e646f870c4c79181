"""A pytest plugin that runs DeepSpeed's own tests on models loaded by zerostart.

If a test calls ``deepspeed.initialize`` for ZeRO 1 or 2, its model is first loaded again with
``zerostart.load``: the source is rank 0's state dict, the model is the module with its parameters on meta.
The module, the parameter groups and the client's optimizer then get the new parameters.

DeepSpeed's ``DistributedTest`` pickles the test object for its processes. An attribute of the object, an
``Installer``, patches DeepSpeed in each process.
"""

from __future__ import annotations

import functools
import inspect
import multiprocessing
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

__all__ = ["LOG", "Installer", "install", "reload_model"]

#: Environment variable: file to which each engine on a reloaded model adds a line.
LOG = "ZEROSTART_CONSTRUCTIONS"
#: Module of DeepSpeed's test tree that starts processes.
_COMMON = "unit.common"
#: Attributes of parameters that are partitioned, experts of one rank, or slices.
_SHARDED_MARKS = {"ds_id", "allreduce", "tensor_model_parallel"}


def pytest_configure(config: Any) -> None:
    """Fork the processes of tests from one that has imported torch and DeepSpeed."""
    del config
    multiprocessing.set_forkserver_preload(["torch", "deepspeed"])


def pytest_collection_finish(session: Any) -> None:
    """Add an ``Installer`` to each test's object, if zerostart loads the models."""
    del session
    if not os.environ.get(LOG):
        return
    import importlib

    execution = importlib.import_module(_COMMON).DistributedExec
    launch = execution._launch_procs

    @functools.wraps(launch)
    def launch_procs(self: Any, *args: Any, **kwargs: Any) -> Any:
        self._zerostart = Installer()
        return launch(self, *args, **kwargs)

    execution._launch_procs = launch_procs


class Installer:
    """Calls ``install`` in the process that unpickles it."""

    def __reduce__(self) -> Any:
        return install, ()


@functools.cache
def install() -> None:
    """Make ``deepspeed.initialize`` reload models at stages 1 and 2."""
    import deepspeed

    original = deepspeed.initialize
    signature = inspect.signature(original)

    @functools.wraps(original)
    def initialize(*args: Any, **kwargs: Any) -> Any:
        arguments = signature.bind(*args, **kwargs).arguments
        config = arguments.get("config") or arguments.get("config_params")
        source = None
        if _is_flat(config) and arguments.get("mpu") is None and _is_whole(arguments["model"]):
            source = reload_model(arguments, config)
        engine = original(**arguments)
        del source  # the engine has read its fp32 masters from it
        return engine

    deepspeed.initialize = initialize


def _stage(config: object) -> int:
    if not isinstance(config, Mapping):
        return 0
    return int((config.get("zero_optimization") or {}).get("stage") or 0)


def _is_whole(model: nn.Module) -> bool:
    """Return True for a whole model in memory, equal on all ranks."""
    parameters = list(model.parameters())
    sharded = any(vars(p).keys() & _SHARDED_MARKS for p in parameters)
    return bool(parameters) and not sharded and not getattr(model, "ds_autotp_parsed", False)


def _is_flat(config: object) -> bool:
    """Return True if flat buffers keep whole parameters on every rank."""
    return isinstance(config, Mapping) and _stage(config) in (1, 2) and not config.get("tensor_parallel")


def reload_model(arguments: dict[str, Any], config: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Reload the model of a ``deepspeed.initialize`` call; return the source, to keep alive."""
    import deepspeed

    import zerostart

    if not dist.is_initialized():
        deepspeed.init_distributed()
    model = arguments["model"]
    # Parameters or groups; a generator could be read only once.
    if arguments.get("model_parameters") is not None:
        arguments["model_parameters"] = list(arguments["model_parameters"])
    state = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    for tensor in state.values():  # DeepSpeed broadcasts rank 0's values
        dist.broadcast(tensor, 0)
    training = {module: module.training for module in model.modules()}
    before = dict(model.named_parameters())
    _to_meta(model)
    # Without an mpu DeepSpeed ignores the size.
    config = {key: value for key, value in config.items() if key != "sequence_parallel_size"}
    zerostart.load(
        state,
        model,
        zero_stage=_stage(config),
        engine_config=config,
        exchange=os.environ.get("ZEROSTART_EXCHANGE", "1") == "1",
        progress=False,
    )
    for module, mode in training.items():
        module.training = mode
    new = {id(before[name]): parameter for name, parameter in model.named_parameters()}
    if arguments.get("model_parameters") is not None:
        arguments["model_parameters"] = [
            _with_new_parameters(entry, new) for entry in arguments["model_parameters"]
        ]
    for group in getattr(arguments.get("optimizer"), "param_groups", []):
        group["params"] = [new.get(id(p), p) for p in group["params"]]
    with Path(os.environ[LOG]).open("a") as log:
        log.write(f"{os.environ.get('PYTEST_CURRENT_TEST', '')}\n")
    return state


def _to_meta(model: nn.Module) -> None:
    """Move the parameters, with their attributes, to meta; buffers stay."""
    copies: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for leaf, old in module._parameters.items():
            if old is None:
                continue
            if id(old) not in copies:
                copies[id(old)] = nn.Parameter(old.detach().to("meta"), requires_grad=old.requires_grad)
                copies[id(old)].__dict__.update(old.__dict__)
            module._parameters[leaf] = copies[id(old)]


def _with_new_parameters(entry: Any, new: Mapping[int, nn.Parameter]) -> Any:
    """Replace the parameters of a parameter, a (name, parameter) pair, or a group."""
    if isinstance(entry, torch.Tensor):
        return new.get(id(entry), entry)
    if isinstance(entry, tuple):
        return tuple(_with_new_parameters(item, new) for item in entry)
    if isinstance(entry, dict):
        return {**entry, "params": [_with_new_parameters(p, new) for p in entry["params"]]}
    return entry
