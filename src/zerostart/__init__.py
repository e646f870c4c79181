"""zerostart: a pretrained checkpoint straight into a sharded model that is ready to train.

    import torch.distributed as dist, zerostart
    dist.init_process_group()
    model = zerostart.load("path/or/hub-id", engine="deepspeed", zero_stage=3)

Imports of torch and of the engines wait until a verb is called, so that the command line starts at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from zerostart import errors
from zerostart.errors import ZerostartError

if TYPE_CHECKING:
    import os

    import torch
    from torch import nn

    from zerostart.checkpoint.verifying import Verified
    from zerostart.forecast import WorldPlan
    from zerostart.loading.report import Report
    from zerostart.state.background import Saving
    from zerostart.state.comparing import Difference
    from zerostart.state.saving import SaveReport

    Source = str | os.PathLike[str] | Mapping[str, torch.Tensor] | None
    ModelLike = nn.Module | type[nn.Module] | Callable[[], nn.Module] | None
    Comparable = str | os.PathLike[str] | nn.Module
    Converter = Callable[[dict[str, torch.Tensor]], Mapping[str, torch.Tensor]] | Sequence[Any] | None

__all__ = [
    "ZerostartError",
    "diff",
    "digest",
    "disable",
    "enable",
    "enabled",
    "errors",
    "full_tensors",
    "gathered",
    "load",
    "load_state",
    "plan",
    "report",
    "save",
    "save_state",
    "verify",
]
__version__ = "0.1.0.dev0"


def load(
    source: Source,
    model: ModelLike = None,
    engine: str = "deepspeed",
    zero_stage: int = 3,
    engine_config: Mapping[str, Any] | None = None,
    expert_parallel: int = 1,
    tensor_parallel: int = 1,
    dtype: torch.dtype | None = None,
    converter: Converter = None,
    memory_limit: int | None = None,
    chunk_size: int | None = None,
    strict: bool = True,
    progress: bool = True,
    fp32_masters: bool = True,
    exchange: bool | None = None,
) -> nn.Module:
    """Load a checkpoint into a sharded model; every rank reads only the bytes that it will own.

    Collective: call it on every rank of an initialised ``torch.distributed`` process group, or alone with
    none. The result goes unchanged to ``deepspeed.initialize``, ``accelerator.prepare``, the HF ``Trainer``,
    or a plain FSDP2 loop. Like ``from_pretrained`` it is in evaluation mode.

    Args:
        source: a directory, a ``.safetensors`` file, a file of ``torch.save`` (weights are read as data, no
            code in it is run), a hub id in the local cache, a URL of a registered storage, or a mapping of
            name to tensor. Of a diffusers pipeline it is the component of the class of ``model``. A URL and
            a mapping need ``model``; a mapping is held by every rank or, with the others passing None, by
            one, and must not change during the load.
        model: a module on the meta device, a class, or a callable that builds one; without it, the class that
            the checkpoint's configuration names.
        engine: ``"deepspeed"`` or ``"fsdp2"``.
        zero_stage: 3 shards parameters. At 1 and 2 on DeepSpeed, and at 0, they are whole on every rank:
            views into a flat buffer, which DeepSpeed's optimizer takes as its own, in the dtype to which
            DeepSpeed casts them; 0 on FSDP2 is for DistributedDataParallel. At 1 and 2 FSDP2 shards them at
            rest, and gathers them less often. See ``docs/zero12.md``.
        engine_config: for DeepSpeed its configuration; for FSDP2 keyword arguments of ``fully_shard``
            (``mesh``, ``reshard_after_forward``, ``shard_placement_fn``, ``mp_policy``, ``offload_policy``),
            ``replicate``, the number of replicas (HSDP), and ``wrap``, the units: classes, their names, or
            names of modules such as ``model.layers.*``. For both, ``ep_plan`` and ``tp_plan`` in the place of
            the plans that the model declares. See ``docs/placements.md``.
        expert_parallel: ranks that share the experts of a mixture: each holds its own alone, and tokens
            travel to them. Divides the number of ranks; 1 or more, with ``tensor_parallel=1``.
        tensor_parallel: ranks that share tensors and see one batch, by the model's tensor-parallel plan;
            FSDP2 only. Divides the number of ranks; 1 or more, with ``expert_parallel=1``.
        dtype: floating dtype of the model; None keeps the checkpoint's own (its configuration's, else the
            stored one), or the one that ``engine_config`` asks for.
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
        exchange: whether bytes that several ranks want (replicas, columns of one matrix, at stages 1 and 2
            all) are read by one of them and sent to the others. None takes what is estimated to be faster,
            which the report tells; at stages 1 and 2 an exchange on accelerators, and reading on the CPU,
            where a message costs more than the page cache.

    Raises:
        ZerostartError: the same type and text on every rank; see ``zerostart.errors`` for the leaves.
    """
    from zerostart.loading.request import Request
    from zerostart.loading.run import run

    request = Request(
        source=source,
        model=model,
        engine=engine,
        zero_stage=zero_stage,
        engine_config=engine_config,
        expert_parallel=expert_parallel,
        tensor_parallel=tensor_parallel,
        dtype=dtype,
        converter=converter,
        memory_limit=memory_limit,
        chunk_size=chunk_size,
        strict=strict,
        progress=progress,
        fp32_masters=fp32_masters,
        exchange=exchange,
    )
    return run(request)


def plan(
    source: Source,
    world_size: int = 8,
    engine: str = "deepspeed",
    zero_stage: int = 3,
    expert_parallel: int = 1,
    tensor_parallel: int = 1,
    dtype: torch.dtype | None = None,
    converter: Converter = None,
    model: ModelLike = None,
    rank: int | None = None,
    *,
    engine_config: Mapping[str, Any] | None = None,
    exchange: bool | None = None,
    memory_limit: int | None = None,
    chunk_size: int | None = None,
    device_memory: int | None = None,
    host_memory: int | None = None,
    storage_rate: float | None = None,
    interconnect_rate: float | None = None,
    optimizer: str | None = None,
) -> WorldPlan:
    """What every rank of ``world_size`` would read and hold; reads headers only, and needs no process group.

    The arguments that are not told of here are those of ``load``; an ``engine_config`` that keeps shards on
    the host or on NVMe, makes replicas, or shards along another dimension is followed. Where bytes could be
    read once and exchanged, eight ranks are taken to be on one machine. ``rank`` plans that one alone, which
    is quicker. See ``docs/forecast.md`` for what is counted.

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
        The plan: ``ranks`` with bytes, operations, peaks of the load, seconds, and ``memory`` by phase and
        component; ``fits`` and ``advice`` where it does not. All sizes are bytes, all times seconds.

    Raises:
        ZerostartError: what ``load`` with ``strict=False`` would raise before reading weights.
    """
    from zerostart.forecast import Asked
    from zerostart.forecast.run import forecast
    from zerostart.loading.request import Request

    request = Request(
        source=source,
        model=model,
        engine=engine,
        zero_stage=zero_stage,
        expert_parallel=expert_parallel,
        tensor_parallel=tensor_parallel,
        dtype=dtype,
        converter=converter,
        engine_config=engine_config,
        exchange=exchange,
        memory_limit=memory_limit,
        chunk_size=chunk_size,
    )
    asked = Asked(device_memory, host_memory, storage_rate, interconnect_rate, optimizer)
    return forecast(request, world_size, rank, asked)


def report(model: nn.Module) -> Report:
    """What the load of ``model`` (or of the model inside an engine's wrapper) did on this rank.

    Raises ConfigError for a model that was not loaded here.
    """
    from zerostart.loading.record import record_of

    return record_of(model).report


def full_tensors(model: nn.Module, rank: int | None = 0) -> Iterator[tuple[str, torch.Tensor | None]]:
    """The unsharded model, one whole CPU tensor at a time, under its own state-dict names.

    Collective: every rank must run through the whole iteration. ``rank`` gets the tensors and the others
    None; with ``rank=None`` all get them. Parameters and persistent buffers, tied names included.
    """
    from zerostart.state.full_tensors import full_tensors as gather

    return gather(model, rank)


def gathered(
    model: nn.Module, name: str, modifier_rank: int | None = None
) -> AbstractContextManager[torch.Tensor]:
    """Inside, one whole parameter of a loaded model as a CPU tensor on every rank, experts whole too.

    Collective, with the same arguments on every rank; ``name`` is a state-dict name of the unsharded model.
    ``model`` may be inside wrappers (an engine, DDP, PEFT, ``torch.compile``). With ``modifier_rank`` the
    elements that that rank has changed go back to what every rank holds, and to DeepSpeed's fp32 masters
    where there are some; masters of all other elements keep their bits. Raises ConfigError at the end, on
    every rank, if another rank (or, without ``modifier_rank``, any) has changed its tensor; the shards are
    then as they were.
    """
    from zerostart.state.editing import gathered as gather

    return gather(model, name, modifier_rank)


def save_state(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Any = None,
    extra: Any = None,
    wait: bool = True,
) -> Saving:
    """Write a training checkpoint; collective, each rank its own share, nothing gathered.

    It has all that a run goes on from: parameters, persistent buffers, fp32 masters, the optimizer's state
    and settings, the engine's counters, loss scale and schedule, gradients that are there to be added to,
    the random states of every rank, and ``extra``. ``path`` appears whole or not at all, in the place of an
    older checkpoint. In it ``model/`` is a Hugging Face directory. See ``docs/resuming.md``.

    Args:
        path: the directory to be; the same on all ranks, on storage that they share.
        model: what ``load``, ``deepspeed.initialize`` or ``accelerator.prepare`` returned, or any model that
            DeepSpeed's ZeRO or FSDP2 shards, inside PEFT, DistributedDataParallel, ``torch.compile`` or not.
        optimizer: the torch optimizer where no DeepSpeed engine steps, or accelerate's wrapper of it.
        extra: any JSON value with tensors in it, the same on all ranks; of other objects pass what describes
            them, such as ``scheduler.state_dict()``.
        wait: if False, return when the shares are copied to host memory, and write them in the background; an
            error is then told by ``wait()`` of what is returned, or by the next save. Keep the process group
            until then.

    Returns:
        The save: ``done()``, ``wait()``, and ``seconds`` with ``blocked`` and ``written``.

    Raises:
        ZerostartError: the same type and text on every rank; what was at ``path`` is then as it was.
            ConfigError for a state of the optimizer that has not the shape of its parameter, and in the
            middle of an accumulation window where the engine has not reduced its gradients.
    """
    from zerostart.state.checkpointing import save_state as save

    return save(path, model, optimizer, extra, wait)


def load_state(path: str | os.PathLike[str], model: nn.Module, optimizer: Any = None) -> Any:
    """Put a training checkpoint into a model, its optimizer and its engine; gives its ``extra``. Collective.

    Each rank reads what it holds, so that the number of ranks, the ZeRO stage, expert and tensor parallel
    degrees, offloading and the engine may be others than when it was saved. No step is taken: an optimizer
    without state gets the saved one, and one whose parameters had none yet has none. ``model`` and
    ``optimizer`` are as in ``save_state``; parameters are matched by name, and groups by their parameters.

    Random states are each rank's own where the ranks are as many, else new ones that follow from the saved.

    Raises:
        ZerostartError: the same on every rank; the model is then of no use. CheckpointNotFoundError for a
            directory that is no complete checkpoint, CoverageError for one of another model, CheckpointError
            for groups or numbers that do not fit the running optimizer.
    """
    from zerostart.state.resuming import load_state as restore

    return restore(path, model, optimizer)


def save(
    model: nn.Module,
    path: str | os.PathLike[str],
    max_shard_size: int | str = "5GB",
    dtype: torch.dtype | None = None,
    trainable_only: bool = False,
    adapters_only: bool = False,
    merge_adapters: bool = False,
    *,
    memory_limit: int | None = None,
) -> SaveReport:
    """Save a sharded model as an ordinary checkpoint, each rank writing its own bytes; nothing is gathered.

    Collective, with the same arguments on every rank. What was loaded here goes back into the layout of its
    checkpoint: names, shapes and order of elements, conversions reversed; tied tensors once. Configuration,
    generation configuration, tokenizer or processor and code files are beside it, so that plain transformers
    or diffusers opens it. What cannot be put back (calculated on the way, or initialised where the library
    knows no way back) has the model's own name, which the report tells. See ``docs/saving.md``.

    Args:
        model: what ``load`` returned, or what an engine, accelerate, PEFT or ``torch.compile`` made of it, or
            any model that DeepSpeed (ZeRO) or FSDP2 shards, or that every rank has whole.
        path: a directory that all ranks see, which appears whole or not at all. Weights there are replaced;
            files that zerostart has not written stay.
        max_shard_size: most bytes of a file, as in ``save_pretrained``: a number, or with a unit.
        dtype: floating dtype of the tensors in the files; None: the one in which the model holds each. In
            fp32 the engine of ``deepspeed.initialize`` gives its masters.
        trainable_only: leave out frozen parameters, and buffers.
        adapters_only: save PEFT's adapters alone, in PEFT's format.
        merge_adapters: save the model with LoRA's adapters in its weights, as ``merge_and_unload`` has it.
            The model itself stays as it is.
        memory_limit: most bytes that a rank takes beside its shards; None: 32 MiB. Factors of adapters that
            are merged come to that.

    Returns:
        What was written, and what has another name than in the checkpoint that it came from.

    Raises:
        ZerostartError: the same type and text on every rank; what was at ``path`` is then as before.
    """
    from zerostart.state.saving import SaveRequest
    from zerostart.state.saving import save as save_model

    request = SaveRequest(max_shard_size, dtype, trainable_only, adapters_only, merge_adapters, memory_limit)
    return save_model(model, path, request)


def digest(model: nn.Module) -> dict[str, str]:
    """The digest of each tensor of ``model``, by its state-dict name; tied names have the same.

    Collective. 32 hexadecimal digits of dtype, shape and bits that are the same for every layout, engine,
    stage and number of ranks, experts whole, and those that files of the same tensors have. ``model`` is as
    in ``save``. Each rank reads its own share, where it lies, and one message goes round. See
    ``docs/verify.md``.

    Raises:
        ZerostartError: the same type and text on every rank; EngineError for experts of DeepSpeed's own MoE.
    """
    from zerostart.state.digest import digest as digest_of

    return digest_of(model)


def verify(path: str | os.PathLike[str]) -> Verified:
    """Compare a directory that zerostart saved with what was saved, in files, bytes and digests of tensors.

    Reads all of it once, in one process and without one of ``torch.distributed``, in bounded memory.

    Returns:
        How many ``files``, ``tensors`` and ``bytes`` were found as they were saved.

    Raises:
        VerifyError: files and tensors that are missing or have other contents, by name; or there is no
            ``zerostart.json`` (of ``save_state``: ``state.json``), which says what was saved.
    """
    from zerostart.checkpoint.verifying import verify as verify_path

    return verify_path(path)


def diff(a: Comparable, b: Comparable) -> Difference:
    """Compare two checkpoints, two live models, or one of each, tensor by tensor and bit by bit.

    A path is whatever ``load`` takes for one; names are those in the files. A live model is as in ``save``,
    and the call then collective: it is compared with files in the layout in which it would be saved, but
    under its state-dict names where the files have only those; with another model under those names. Memory
    is bounded: with a checkpoint each rank reads what it holds itself; of two models the tensors whose
    digests differ meet segment by segment.

    Returns:
        ``equal`` names; ``differing``, by name the ``largest`` absolute difference and the number of
        ``elements`` that differ; ``only_a`` and ``only_b``, names; and ``same``. The same on every rank.

    Raises:
        ZerostartError: what opening and reading a checkpoint raises; the same on every rank.
    """
    from zerostart.state.diff import diff as compare

    return compare(a, b)


def enabled(
    engine: str | None = None,
    zero_stage: int | None = None,
    engine_config: Mapping[str, Any] | None = None,
    expert_parallel: int = 1,
    tensor_parallel: int = 1,
    memory_limit: int | None = None,
    chunk_size: int | None = None,
    progress: bool = True,
    fp32_masters: bool = True,
) -> AbstractContextManager[None]:
    """Inside, transformers' ``from_pretrained`` loads through zerostart where ranks are to share the model.

    That is wherever a DeepSpeed ZeRO or accelerate FSDP2 configuration is active when it is called (of the
    launcher, an ``Accelerator``, ``TrainingArguments``, ``HfDeepSpeedConfig`` or ``zero.Init``), or where
    ``engine`` is named; any other call is left alone. All ranks must call it. What ``from_pretrained`` does
    otherwise (files, dtype, generation configuration, adapters, warnings of missing and unexpected weights)
    it does; ``device_map`` (unless it names the host where there is nothing else), ``distributed_config``,
    ``gguf_file`` and quantised weights are refused, with a reason. ``resize_token_embeddings`` of a model
    that FSDP2 has sharded is collective then, and works until the first forward.

    Args:
        engine: None for the active configuration's, ``"deepspeed"`` or ``"fsdp2"``.
        engine_config: with ``engine``, as in ``load``, in the place of the active configuration's.
        zero_stage: with ``engine``, as in ``load``; None for the configuration's own, or 3.
        expert_parallel: as in ``load``, and so are the arguments that follow.

    Raises:
        ZerostartError: inside, at ``from_pretrained`` and ``accelerator.prepare``, the same on every rank.
    """
    from zerostart.integrations.adoption import Settings
    from zerostart.integrations.adoption import enabled as enabled_with

    return enabled_with(
        Settings(
            engine,
            zero_stage,
            engine_config,
            expert_parallel,
            tensor_parallel,
            memory_limit,
            chunk_size,
            progress,
            fp32_masters,
        )
    )


def enable(**settings: Any) -> None:
    """``enabled`` from here on, until ``disable``; takes the same arguments."""
    from zerostart.integrations.adoption import Settings
    from zerostart.integrations.adoption import enable as enable_with

    enable_with(Settings(**settings))


def disable() -> None:
    """End what the last ``enable`` began. Raises ConfigError where nothing is enabled."""
    from zerostart.integrations.adoption import disable as end

    end()
