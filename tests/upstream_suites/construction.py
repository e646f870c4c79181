"""A pytest plugin: DeepSpeed's own tests with zerostart's construction under them.

Wherever a test calls ``deepspeed.initialize`` for ZeRO 1 or 2, its model is first born again in shards by the
public way: its state dict, held by rank 0 alone, is the source, and the module, its parameters on meta,
the model of ``zerostart.load``. The module, the parameter groups and the client's optimizer then hold the new
parameters in the place of the old ones, and the test goes on.

DeepSpeed's ``DistributedTest`` runs a test in processes that it pickles the test object for. The object gets
a passenger that does the same to DeepSpeed in each of them.
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

__all__ = ["LOG", "Passenger", "born_again", "install"]

#: Environment variable with the file to which each engine that is made so adds a line.
LOG = "ZEROSTART_CONSTRUCTIONS"
#: Modules of DeepSpeed's test tree, which import ``deepspeed.initialize`` by its module.
_COMMON = "unit.common"
#: Marks of parameters that are partitioned, experts of one rank, or slices that a test has cut by hand.
_PARTED = {"ds_id", "allreduce", "tensor_model_parallel"}


def pytest_configure(config: Any) -> None:
    """Start the processes of tests from one that has imported what they all need."""
    del config
    multiprocessing.set_forkserver_preload(["torch", "deepspeed"])


def pytest_collection_finish(session: Any) -> None:
    """Give each test's object its passenger, if zerostart is to make the engines."""
    del session
    if not os.environ.get(LOG):
        return
    import importlib

    execution = importlib.import_module(_COMMON).DistributedExec
    launch = execution._launch_procs

    @functools.wraps(launch)
    def launch_procs(self: Any, *args: Any, **kwargs: Any) -> Any:
        self._zerostart = Passenger()
        return launch(self, *args, **kwargs)

    execution._launch_procs = launch_procs


class Passenger:
    """Installs the construction in the process in which it is unpickled."""

    def __reduce__(self) -> Any:
        return install, ()


@functools.cache
def install() -> None:
    """Have ``deepspeed.initialize`` go through zerostart for the stages that are asked for."""
    import deepspeed

    original = deepspeed.initialize
    signature = inspect.signature(original)

    @functools.wraps(original)
    def initialize(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        config = given.get("config") or given.get("config_params")
        kept = None
        if _flat(config) and given.get("mpu") is None and _plain(given["model"]):
            kept = born_again(given, config)
        engine = original(**given)
        del kept  # fp32 masters are read from it while the engine is made
        return engine

    deepspeed.initialize = initialize


def _stage(config: object) -> int:
    if not isinstance(config, Mapping):
        return 0
    return int((config.get("zero_optimization") or {}).get("stage") or 0)


def _plain(model: nn.Module) -> bool:
    """Whether it is a model that a checkpoint could hold: whole, alike on all ranks, in memory."""
    parameters = list(model.parameters())
    parted = any(vars(p).keys() & _PARTED for p in parameters)
    return bool(parameters) and not parted and not getattr(model, "ds_autotp_parsed", False)


def _flat(config: object) -> bool:
    """Whether parameters are whole on every rank, in flat buffers."""
    return isinstance(config, Mapping) and _stage(config) in (1, 2) and not config.get("tensor_parallel")


def born_again(given: dict[str, Any], config: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Load the model of a call of ``deepspeed.initialize`` again; returns the source, to be kept alive."""
    import deepspeed

    import zerostart

    if not dist.is_initialized():
        deepspeed.init_distributed()
    model = given["model"]
    # A list of parameters, or of groups; a generator could be read once only.
    if given.get("model_parameters") is not None:
        given["model_parameters"] = list(given["model_parameters"])
    state = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    for tensor in state.values():  # DeepSpeed gives all ranks the values of rank 0
        dist.broadcast(tensor, 0)
    training = {module: module.training for module in model.modules()}
    before = dict(model.named_parameters())
    _to_meta(model)
    # Without an mpu DeepSpeed shares no sequences, whatever the section says.
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
    if given.get("model_parameters") is not None:
        given["model_parameters"] = [_replaced(entry, new) for entry in given["model_parameters"]]
    for group in getattr(given.get("optimizer"), "param_groups", []):
        group["params"] = [new.get(id(p), p) for p in group["params"]]
    with Path(os.environ[LOG]).open("a") as log:
        log.write(f"{os.environ.get('PYTEST_CURRENT_TEST', '')}\n")
    return state


def _to_meta(model: nn.Module) -> None:
    """Parameters on meta in the places of the model's own, with their attributes; buffers stay."""
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for leaf, old in module._parameters.items():
            if old is None:
                continue
            if id(old) not in made:
                made[id(old)] = nn.Parameter(old.detach().to("meta"), requires_grad=old.requires_grad)
                made[id(old)].__dict__.update(old.__dict__)
            module._parameters[leaf] = made[id(old)]


def _replaced(entry: Any, new: Mapping[int, nn.Parameter]) -> Any:
    """A parameter, a pair of a name and one, or a group of them, with the new in the place of the old."""
    if isinstance(entry, torch.Tensor):
        return new.get(id(entry), entry)
    if isinstance(entry, tuple):
        return tuple(_replaced(item, new) for item in entry)
    if isinstance(entry, dict):
        return {**entry, "params": [_replaced(p, new) for p in entry["params"]]}
    return entry
