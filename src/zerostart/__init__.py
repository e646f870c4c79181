"""zerostart: a pretrained checkpoint straight into a sharded model that is ready to train.

    import torch.distributed as dist, zerostart
    dist.init_process_group()
    model = zerostart.load("path/or/hub-id", engine="deepspeed", zero_stage=3)

Imports of torch and of the engines wait until a verb is called, so that the command line starts at once.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from zerostart import errors
from zerostart.activation import checkpoint_blocks, gradient_checkpoint
from zerostart.errors import ZerostartError
from zerostart.loading.placement import Placement
from zerostart.pipelines import drop_components, load_pipeline
from zerostart.refit.verbs import refit, weight_source
from zerostart.state.verbs import (
    convert,
    diff,
    digest,
    load_state,
    save,
    save_state,
    verify,
)

if TYPE_CHECKING:
    import torch
    from torch import nn

    from zerostart.live.report import Report
    from zerostart.loading.forecast import WorldPlan
    from zerostart.loading.request import Converter, EngineConfig, ModelLike, Source

__all__ = [
    "load",
    "plan",
    "report",
    "full_tensors",
    "gathered",
    "save",
    "save_state",
    "load_state",
    "digest",
    "diff",
    "verify",
    "convert",
    "refit",
    "weight_source",
    "enable",
    "enabled",
    "disable",
    "errors",
    # Also in ``errors``, and under short names in ``zerostart.pipelines`` and ``zerostart.activation``.
    "ZerostartError",
    "Placement",
    "load_pipeline",
    "drop_components",
    "gradient_checkpoint",
    "checkpoint_blocks",
]
__version__ = "0.1.0.dev0"
logging.getLogger("zerostart").addFilter(errors.printable_record)


def load(
    source: Source,
    model: ModelLike = None,
    *,
    engine: str | None = None,
    zero_stage: int = 3,
    engine_config: EngineConfig | None = None,
    expert_parallel: int = 1,
    tensor_parallel: int = 1,
    sequence_parallel: int = 1,
    dtype: torch.dtype | str | None = None,
    converter: Converter = None,
    memory_limit: int | None = None,
    chunk_size: int | None = None,
    strict: bool = True,
    progress: bool = True,
    fp32_masters: bool = True,
    exchange: bool | None = None,
    trust_remote_code: bool = False,
) -> nn.Module:
    """Load a checkpoint into a sharded model; every rank reads only the bytes that it will own.

    Collective: call it on every rank of an initialised ``torch.distributed`` process group, or alone with
    none. The result goes unchanged to ``deepspeed.initialize``, ``accelerator.prepare``, the HF ``Trainer``,
    or a plain FSDP2 loop. Like ``from_pretrained`` it is in evaluation mode.

    Args:
        source: a directory, a ``.safetensors`` file, a file of ``torch.save`` (weights are read as data, no
            code in it is run), a directory that DeepSpeed, ``torch.distributed.checkpoint`` or accelerate
            saved while training, a hub id (fetched where the local cache has it not), the URL of a file or a
            directory (``docs/stores.md``), or a mapping of name to tensor. Of a diffusers pipeline it is the
            component of the class of ``model``. A file with no configuration and a mapping need ``model``; a
            mapping is held by every rank, and must not change during the load. None on every rank: there is
            no checkpoint, see ``docs/starting.md``.
        model: a module on the meta device, a class, or a callable that builds one; without it, the class that
            the checkpoint's configuration names. Without a source a configuration too, initialised as the
            unsharded model from the same seed; or a module with values, the same on every rank, which
            is sharded itself.
        engine: ``"deepspeed"`` or ``"fsdp2"``; None for the one that ``accelerate launch`` has set up, else
            DeepSpeed where it is installed, else FSDP2; the report says which it is, and why.
        zero_stage: 3 shards parameters. At 1 and 2 on DeepSpeed, and at 0, they are whole on every rank:
            views into a flat buffer, which DeepSpeed's optimizer takes as its own, in the dtype to which
            DeepSpeed casts them; 0 on FSDP2 is for DistributedDataParallel. At 1 and 2 FSDP2 shards them at
            rest, and gathers them less often. See ``docs/placements.md``.
        engine_config: a mapping, or the path of a JSON file that holds it. For DeepSpeed its configuration;
            for FSDP2 keyword arguments of ``fully_shard`` (``mesh``, ``reshard_after_forward``,
            ``shard_placement_fn``, ``mp_policy``, ``offload_policy``), ``replicate``, the number of replicas
            (HSDP), and ``wrap``, the units: classes, their names, or names of modules such as
            ``model.layers.*``. For both, ``ep_plan`` and ``tp_plan`` in the place of the plans that the model
            declares. See ``docs/placements.md``.
        expert_parallel: ranks that share the experts of a mixture: each holds its own alone, and tokens
            travel to them. Divides the number of ranks; where tensors are shared too, ``docs/parallelism.md``
            says how the two go together.
        tensor_parallel: ranks that share tensors and see one batch: by the model's tensor-parallel plan, or
            on DeepSpeed as its section ``tensor_parallel`` says, whose ``autotp_size`` counts where this is
            1. Divides the number of ranks. See ``docs/parallelism.md``.
        sequence_parallel: ranks that share each sequence of a batch: attention heads travel between them
            (DeepSpeed's Ulysses, stages 1 to 3) or keys and values do (context parallelism, FSDP2). It cuts
            no parameter. Divides the number of ranks; see ``docs/parallelism.md``.
        dtype: floating dtype of the model, or its name (``"bfloat16"``); None keeps the checkpoint's own (its
            configuration's, else the stored one), or the one that ``engine_config`` asks for.
        converter: None for the conversions that transformers or diffusers registers for the model, a callable
            from state dict to state dict, or a list of transformers conversions.
        memory_limit: most bytes of staging buffers on this rank.
        chunk_size: most bytes of one read.
        strict: raise on missing, unexpected and mismatched tensors before weights are read; if False,
            initialise what is missing, ignore what is unexpected, and still raise on a mismatch.
        progress: show a progress bar on rank 0 where a terminal is attached.
        fp32_masters: where parameters hold less than the checkpoint stores (bf16 from fp32), have fp32 master
            weights start from the stored values and not from their rounding. With DeepSpeed the masters are
            read when ``deepspeed.initialize`` makes them, so that the source must still be there, unchanged
            (a mapping too, which is not kept alive for it). With FSDP2 and an ``mp_policy`` that computes in
            ``dtype``, the sharded parameters are the masters, and are held in fp32.
        exchange: True: replicas read a share each and exchange it (at stages 1 and 2 the whole parameters);
            False: each rank reads all that it needs; None: exchange where ranks do not share a page cache,
            at stages 1 and 2 on accelerators only.
        trust_remote_code: run the code that lies beside the checkpoint (transformers' ``auto_map``), where
            the model's class is there. Without it none is run, and nobody is asked.

    Raises:
        ZerostartError: the same type and text on every rank; see ``zerostart.errors`` for the leaves.

    Example:
        >>> import torch, zerostart
        >>> weights = {"weight": torch.ones(2, 3), "bias": torch.zeros(2)}
        >>> model = zerostart.load(weights, lambda: torch.nn.Linear(3, 2), engine="fsdp2", progress=False)
        >>> model(torch.ones(1, 3)).tolist()
        [[3.0, 3.0]]
    """
    arguments = locals()
    from zerostart.integrations.later_calls import serve
    from zerostart.loading.request import Request
    from zerostart.loading.run import run

    return run(Request(**arguments), serve)


def plan(
    source: Source,
    world_size: int = 8,
    engine: str | None = "deepspeed",
    zero_stage: int = 3,
    expert_parallel: int = 1,
    tensor_parallel: int = 1,
    dtype: torch.dtype | str | None = None,
    converter: Converter = None,
    model: ModelLike = None,
    rank: int | None = None,
    *,
    engine_config: EngineConfig | None = None,
    sequence_parallel: int = 1,
    exchange: bool | None = None,
    memory_limit: int | None = None,
    chunk_size: int | None = None,
    device_memory: int | None = None,
    host_memory: int | None = None,
    storage_rate: float | None = None,
    interconnect_rate: float | None = None,
    optimizer: str | None = None,
    trust_remote_code: bool = False,
) -> WorldPlan:
    """Forecast what every rank of ``world_size`` would read and hold; reads headers, needs no process group.

    All other arguments are those of ``load``. An ``engine_config`` that keeps shards on the host or on NVMe,
    makes replicas, or shards along another dimension is followed. Each rank reads its own bytes in a
    forecast: replicas that exchange what they read need fewer. ``rank`` plans only that rank, which is
    quicker. See ``docs/forecast.md`` for what is counted.

    Args:
        device_memory: bytes of one accelerator; given, ranks compute on accelerators wherever the plan is
            made. Without it and ``host_memory``, the limits of a job of up to eight ranks are this machine's.
        host_memory: bytes of one machine, which up to eight ranks share.
        storage_rate: bytes a second that one machine gets from its disk or over its link to storage; None:
            2 GB/s, or no limit for a checkpoint that is in the page cache.
        interconnect_rate: bytes a second that one rank sends or receives; None: 1 GB/s.
        optimizer: ``"adamw"``, ``"adam"``, ``"momentum"`` and ``"sgd"`` are torch's,
            ``"fused_adamw"`` is one in fused kernels; None: the one that a DeepSpeed configuration names,
            else AdamW.

    Returns:
        WorldPlan: ``ranks`` with bytes, operations, peaks of the load, seconds, and ``memory`` by phase and
        component; ``fits``. All sizes are bytes, all times seconds.

    Raises:
        ZerostartError: what ``load`` with ``strict=False`` would raise before reading weights.

    Example:
        >>> import torch, zerostart
        >>> weights = {"weight": torch.ones(1000, 3)}
        >>> made = zerostart.plan(weights, 4, model=lambda: torch.nn.Linear(3, 1000, bias=False))
        >>> [rank.read_bytes for rank in made.ranks]
        [3000, 3000, 3000, 3000]
    """
    arguments = locals()
    from zerostart.loading.forecast.job import Machine, forecast
    from zerostart.loading.request import Request

    del arguments["world_size"], arguments["rank"]
    machine = Machine(**{field: arguments.pop(field) for field in Machine.__dataclass_fields__})
    return forecast(Request(**arguments), world_size, rank, machine)


def report(model: nn.Module) -> Report:
    """Report what the load of ``model`` (or of the model inside an engine's wrapper) did on this rank.

    Of a module that was put together out of several loads it is what they did together: names with their
    prefixes, and seconds, bytes and peaks summed up. Raises ConfigError for a model that was not loaded here.

    Example:
        >>> import torch, zerostart
        >>> weights = {"weight": torch.ones(2, 3)}
        >>> make = lambda: torch.nn.Linear(3, 2)
        >>> model = zerostart.load(weights, make, engine="fsdp2", strict=False, progress=False)
        >>> found = zerostart.report(model)
        >>> found.missing, found.read_bytes
        (('bias',), 24)
    """
    from zerostart.live.model import get_report

    return get_report(model)


def full_tensors(model: nn.Module, rank: int | None = 0) -> Iterator[tuple[str, torch.Tensor | None]]:
    """Iterate over the unsharded model, one whole CPU tensor at a time, by its own state-dict names.

    Collective: every rank must run through the whole iteration. ``rank`` gets the tensors and the others
    None; with ``rank=None`` all get them. Parameters and persistent buffers, tied names included. Raises
    ConfigError for a rank that is not there, and for a model that was not loaded here.

    Example:
        >>> import torch, zerostart
        >>> weights = {"weight": torch.eye(2), "bias": torch.zeros(2)}
        >>> model = zerostart.load(weights, lambda: torch.nn.Linear(2, 2), engine="fsdp2", progress=False)
        >>> {name: tuple(tensor.shape) for name, tensor in zerostart.full_tensors(model)}
        {'weight': (2, 2), 'bias': (2,)}
    """
    from zerostart.live.full_tensors import full_tensors as gather

    return gather(model, rank)


def gathered(
    model: nn.Module, name: str, modifier_rank: int | None = None
) -> AbstractContextManager[torch.Tensor]:
    """Context manager that gives one whole parameter as a CPU tensor on every rank, experts included.

    Collective, with the same arguments on every rank; ``name`` is a state-dict name of the unsharded model,
    or a name that ``model`` itself shows, as PEFT's models have others.
    ``model`` may be inside wrappers (an engine, DDP, PEFT, ``torch.compile``). With ``modifier_rank`` the
    elements that that rank has changed go back to what every rank holds, and to DeepSpeed's fp32 masters
    where there are some; masters of all other elements keep their bits. Raises ConfigError at the end, on
    every rank, if another rank (or, without ``modifier_rank``, any) has changed its tensor, or if one has
    another shape or dtype then; the shards are then as they were.

    Example:
        >>> import torch, zerostart
        >>> weights = {"weight": torch.eye(2), "bias": torch.zeros(2)}
        >>> model = zerostart.load(weights, lambda: torch.nn.Linear(2, 2), engine="fsdp2", progress=False)
        >>> with zerostart.gathered(model, "weight", modifier_rank=0) as weight:
        ...     _ = weight.mul_(3)
        >>> model(torch.ones(1, 2)).tolist()
        [[3.0, 3.0]]
    """
    from zerostart.state.editing import gathered as gather

    return gather(model, name, modifier_rank)


def enabled(
    engine: str | None = None,
    zero_stage: int | None = None,
    engine_config: EngineConfig | None = None,
    expert_parallel: int = 1,
    tensor_parallel: int = 1,
    sequence_parallel: int = 1,
    memory_limit: int | None = None,
    chunk_size: int | None = None,
    progress: bool = True,
    fp32_masters: bool = True,
) -> AbstractContextManager[None]:
    """Context manager in which ``from_pretrained`` loads models in shards, where ranks are to share them.

    That is wherever a DeepSpeed ZeRO or accelerate FSDP2 configuration is active when it is called (of the
    launcher, an ``Accelerator``, ``TrainingArguments``, ``HfDeepSpeedConfig`` or ``zero.Init``), or where
    ``engine`` is named; any other call is left alone. All ranks must call it. What ``from_pretrained`` does
    otherwise (files, dtype, generation configuration, adapters, warnings of missing and unexpected weights)
    it does; ``distributed_config``, ``tp_plan`` and ``device_mesh`` become the axes of the load, quantised
    weights are dequantised; ``device_map`` (unless it names the host where there is nothing else) and
    ``gguf_file`` are refused, with a reason. ``resize_token_embeddings`` of a model
    that FSDP2 has sharded is collective then, and works until the first forward.

    Args:
        engine: None for the active configuration's, ``"deepspeed"`` or ``"fsdp2"``.
        engine_config: with ``engine``, as in ``load``, in the place of the active configuration's.
        zero_stage: with ``engine``, as in ``load``; None for the configuration's own, or 3.
        expert_parallel: as in ``load``, and so are the arguments that follow.

    Raises:
        ZerostartError: inside, at ``from_pretrained`` and ``accelerator.prepare``, the same on every rank.

    Example:
        >>> import tempfile, transformers, zerostart
        >>> config = transformers.GPT2Config(vocab_size=8, n_embd=4, n_layer=1, n_head=1)
        >>> folder = tempfile.TemporaryDirectory()
        >>> transformers.GPT2Model(config).save_pretrained(folder.name)
        >>> with zerostart.enabled(engine="fsdp2", progress=False):
        ...     model = transformers.GPT2Model.from_pretrained(folder.name)
        >>> zerostart.report(model).engine
        'fsdp2'
    """
    arguments = locals()
    from zerostart.loading.request import Request
    from zerostart.refit.trl import adoption

    return adoption.enabled(Request(**arguments))


def enable(
    engine: str | None = None,
    zero_stage: int | None = None,
    engine_config: EngineConfig | None = None,
    expert_parallel: int = 1,
    tensor_parallel: int = 1,
    sequence_parallel: int = 1,
    memory_limit: int | None = None,
    chunk_size: int | None = None,
    progress: bool = True,
    fp32_masters: bool = True,
) -> None:
    """Turn ``enabled`` on until ``disable`` is called; takes the same arguments, and raises the same.

    Example:
        >>> import zerostart
        >>> zerostart.enable(engine="deepspeed", zero_stage=2)
        >>> zerostart.disable()
    """
    arguments = locals()
    from zerostart.loading.request import Request
    from zerostart.refit.trl import adoption

    adoption.enable(Request(**arguments))


def disable() -> None:
    """Undo the last ``enable``. Raises ConfigError where nothing is enabled.

    Example:
        >>> import zerostart
        >>> zerostart.disable()  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        zerostart.errors.ConfigError: zerostart is not enabled; call zerostart.enable() before ...
    """
    from zerostart.integrations import adoption

    adoption.disable()
