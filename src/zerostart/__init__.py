"""Load pretrained checkpoints already sharded into models that are ready to train.

    import torch.distributed as dist, zerostart
    dist.init_process_group()
    model = zerostart.load("path/or/hub-id", engine="deepspeed", zero_stage=3)

torch and the engines are imported at the first call, so the command line starts quickly.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from zerostart import errors
from zerostart.activation import checkpoint_blocks, gradient_checkpoint
from zerostart.distributed.machine import no_garbage_collection
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
    """Load a checkpoint into a sharded model; each rank reads only its own bytes.

    Collective: call it on every rank of an initialised ``torch.distributed`` process group, or in one process
    without a group. The result goes unchanged to ``deepspeed.initialize``, ``accelerator.prepare``, the HF
    ``Trainer`` or a plain FSDP2 loop. It is in evaluation mode, like the result of ``from_pretrained``.

    Args:
        source: a directory, a ``.safetensors`` file, a file of ``torch.save`` (read as data: no code in it is
            run), a directory that DeepSpeed, ``torch.distributed.checkpoint`` or accelerate saved in
            training, a hub id (downloaded if the local cache lacks it), the URL of a file or directory
            (``docs/stores.md``), or a mapping of name to tensor. In a diffusers pipeline the component with
            the class of ``model`` is loaded. A mapping, or a file without a configuration, needs ``model``.
            Every rank passes the same mapping, and does not change it during the load. None on every rank: no
            checkpoint, see ``docs/starting.md``.
        model: a module on the meta device, a class, or a callable that builds a module; None: the class that
            the checkpoint's configuration names. Without a source also a configuration, initialised as the
            unsharded model with the same seed, or a module with values, equal on every rank.
        engine: ``"deepspeed"`` or ``"fsdp2"``. None: the engine of ``accelerate launch``, otherwise DeepSpeed
            if it is installed, otherwise FSDP2. The report has the engine and the reason.
        zero_stage: 3 shards parameters. On DeepSpeed at 1 and 2, and at 0, parameters are whole on every
            rank: views of a flat buffer, which DeepSpeed's optimizer takes over, in the dtype of DeepSpeed's
            cast. 0 on FSDP2 is for DistributedDataParallel. At 1 and 2 FSDP2 shards parameters between steps,
            and gathers them less often. See ``docs/placements.md``.
        engine_config: a mapping, or the path of its JSON file. For DeepSpeed: its configuration. For FSDP2:
            keyword arguments of ``fully_shard`` (``mesh``, ``reshard_after_forward``, ``shard_placement_fn``,
            ``mp_policy``, ``offload_policy``), ``replicate``, the number of replicas (HSDP), and ``wrap``,
            the units: classes, class names, or module names such as ``model.layers.*``. For both: ``ep_plan``
            and ``tp_plan`` to replace the model's own plans. See ``docs/placements.md``.
        expert_parallel: number of ranks over which the experts are divided; tokens are sent to them. Divides
            the number of ranks. See ``docs/parallelism.md``, also for experts together with tensors.
        tensor_parallel: number of ranks that slice tensors and see one batch, by the model's tensor-parallel
            plan or DeepSpeed's section ``tensor_parallel`` (its ``autotp_size`` counts if this is 1). Divides
            the number of ranks.
        sequence_parallel: number of ranks that share each sequence of a batch. They exchange attention heads
            (DeepSpeed's Ulysses, stages 1 to 3) or keys and values (context parallelism, FSDP2). Divides the
            number of ranks.
        dtype: floating dtype of the model, or its name (``"bfloat16"``). None: the dtype of
            ``engine_config``, otherwise of the checkpoint's configuration, otherwise the stored one.
        converter: a callable from state dict to state dict, or a list of transformers conversions. None: the
            conversions that transformers or diffusers registers for the model.
        memory_limit: maximum size of the staging buffers of this rank, in bytes.
        chunk_size: maximum size of one read, in bytes.
        strict: raise on missing, unexpected and mismatched tensors before weights are read. If False,
            initialise missing tensors, ignore unexpected ones, and still raise on a mismatch.
        progress: show a progress bar on rank 0 if a terminal is attached.
        fp32_masters: start fp32 master weights from the stored values if parameters have a smaller dtype
            (bf16 from fp32). ``deepspeed.initialize`` reads DeepSpeed's masters from the source; keep it
            unchanged until then. With FSDP2 and an ``mp_policy`` that computes in ``dtype``, the shards are
            the masters, in fp32.
        exchange: True: each replica reads a part and the replicas exchange it (at stages 1 and 2 whole
            parameters). False: each rank reads all bytes that it needs. None: exchange if ranks share no page
            cache, at stages 1 and 2 only on accelerators.
        trust_remote_code: run the model code of the checkpoint's directory (transformers' ``auto_map``).

    Raises:
        ZerostartError: the same type and text on every rank; see ``zerostart.errors``.

    Example:
        >>> import torch, zerostart
        >>> weights = {"weight": torch.ones(2, 3), "bias": torch.zeros(2)}
        >>> model = zerostart.load(weights, lambda: torch.nn.Linear(3, 2), engine="fsdp2", progress=False)
        >>> model(torch.ones(1, 3)).tolist()
        [[3.0, 3.0]]
    """
    arguments = locals()
    # A fifth of the time of imports is garbage collection, which finds nothing.
    with no_garbage_collection():
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
    """Forecast reads and memory of each rank from file headers, in one process.

    All other arguments are those of ``load``. An ``engine_config`` that keeps shards on the host or on NVMe,
    makes replicas, or shards along another dimension is followed. Each rank reads its own bytes in a
    forecast: replicas that exchange what they read need fewer. ``rank`` plans only that rank, which is
    quicker. See ``docs/forecast.md`` for what is counted.

    Args:
        device_memory: memory of one accelerator, in bytes; ranks then compute on accelerators. Without it and
            ``host_memory``, jobs of up to eight ranks are compared with this machine.
        host_memory: memory of one machine for up to eight ranks, in bytes.
        storage_rate: bytes a second from storage to one machine; None: 2 GB/s, or no limit for a checkpoint
            in the page cache.
        interconnect_rate: bytes a second that one rank sends or receives; None: 1 GB/s.
        optimizer: ``"adamw"``, ``"adam"``, ``"momentum"`` and ``"sgd"`` are torch's, ``"fused_adamw"`` has
            fused kernels; None: the optimizer of a DeepSpeed configuration, otherwise AdamW.

    Returns:
        WorldPlan: ``ranks`` with bytes, operations, peaks of the load, seconds, and ``memory`` by phase and
        component; ``fits``. All sizes are bytes, all times seconds.

    Raises:
        ZerostartError: the errors of ``load(strict=False)`` before weights are read.

    Example:
        >>> import torch, zerostart
        >>> weights = {"weight": torch.ones(1000, 3)}
        >>> plan = zerostart.plan(weights, 4, model=lambda: torch.nn.Linear(3, 1000, bias=False))
        >>> [rank.read_bytes for rank in plan.ranks]
        [3000, 3000, 3000, 3000]
    """
    arguments = locals()
    from zerostart.loading.forecast.job import Machine, forecast
    from zerostart.loading.request import Request

    del arguments["world_size"], arguments["rank"]
    machine = Machine(**{field: arguments.pop(field) for field in Machine.__dataclass_fields__})
    return forecast(Request(**arguments), world_size, rank, machine)


def report(model: nn.Module) -> Report:
    """Return this rank's report of the load of ``model``, which may be inside wrappers.

    For a module of several loads the report joins them: names get prefixes, and seconds, bytes and peaks are
    summed. Raises ConfigError if zerostart did not load the model.

    Example:
        >>> import torch, zerostart
        >>> weights = {"weight": torch.ones(2, 3)}
        >>> make = lambda: torch.nn.Linear(3, 2)
        >>> model = zerostart.load(weights, make, engine="fsdp2", strict=False, progress=False)
        >>> report = zerostart.report(model)
        >>> report.missing, report.read_bytes
        (('bias',), 24)
    """
    from zerostart.live.model import get_report

    return get_report(model)


def full_tensors(model: nn.Module, rank: int | None = 0) -> Iterator[tuple[str, torch.Tensor | None]]:
    """Iterate over whole CPU tensors of the unsharded model by state-dict name.

    Collective: every rank must run the whole iteration. ``rank`` gets the tensors and other ranks get None;
    with ``rank=None`` all ranks get them. Includes parameters, persistent buffers and tied names. Raises
    ConfigError if there is no such rank, or if zerostart did not load the model.

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
    """Gather a whole parameter on every rank as a CPU tensor; a context manager.

    Collective, with the same arguments on every rank. ``name`` is a state-dict name of the unsharded model or
    of ``model`` itself (PEFT's differ). ``model`` may be inside wrappers (an engine, DDP, PEFT,
    ``torch.compile``). Experts are included.

    With ``modifier_rank``, elements that this rank changes are written back to all shards and to DeepSpeed's
    fp32 masters; masters of other elements keep their bits. At the end every rank raises ConfigError if
    another rank has changed its tensor, or if a tensor has another shape or dtype. The shards are then
    unchanged.

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
    """Let ``from_pretrained`` load sharded models, in a context manager.

    It does so if a DeepSpeed ZeRO or accelerate FSDP2 configuration is active at the call (of the launcher,
    an ``Accelerator``, ``TrainingArguments``, ``HfDeepSpeedConfig`` or ``zero.Init``), or with ``engine``.
    Other calls are unchanged. All ranks must call ``from_pretrained``. Files, dtype, generation
    configuration, adapters and warnings are as without zerostart. ``distributed_config``, ``tp_plan`` and
    ``device_mesh`` become axes of the load, and quantised weights are dequantised. ``gguf_file`` and
    ``device_map`` (other than the host without an accelerator) are refused with a reason.
    ``resize_token_embeddings`` of a model on FSDP2 is collective, and works until the first forward.

    Args:
        engine: ``"deepspeed"`` or ``"fsdp2"``; None: the engine of the active configuration.
        engine_config: with ``engine``, as in ``load``; replaces the active configuration.
        zero_stage: with ``engine``, as in ``load``; None: the configuration's, or 3.
        expert_parallel: as in ``load``, like the arguments that follow.

    Raises:
        ZerostartError: in ``from_pretrained`` and ``accelerator.prepare``, the same on every rank.

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
    """Turn ``enabled`` on until ``disable`` is called; takes the same arguments.

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
    """Undo the last ``enable``. Raises ConfigError without one.

    Example:
        >>> import zerostart
        >>> zerostart.enable(engine="fsdp2")
        >>> zerostart.disable()
    """
    from zerostart.integrations import adoption

    adoption.disable()
