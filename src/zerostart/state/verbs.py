"""Verbs that save, resume and compare. They import heavy modules when called."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zerostart.errors import ConfigError

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping, Sequence
    from typing import TypeAlias

    import torch
    from torch import nn

    from zerostart.checkpoint.verifying import Verified
    from zerostart.state.comparing.diff import Difference
    from zerostart.state.converting.convert import Converted
    from zerostart.state.resuming.background import Saving
    from zerostart.state.saving.save import SaveReport

    #: Any JSON value with tensors in it.
    Extra: TypeAlias = (
        bool | int | float | str | torch.Tensor | Sequence["Extra"] | Mapping[str, "Extra"] | None
    )


def save_state(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    extra: Extra = None,
    wait: bool = True,
) -> Saving:
    """Write a training checkpoint; each rank writes its own share. Collective.

    The checkpoint holds everything that a run needs to continue: parameters, persistent buffers, fp32
    masters, the optimizer's state and settings, the engine's counters, loss scale and schedule, accumulated
    gradients, the random states of every rank, and ``extra``. ``path`` appears whole or not at all and
    replaces an older checkpoint. Its subdirectory ``model/`` is a Hugging Face directory. See
    ``docs/resuming.md``.

    Args:
        path: a directory on storage that all ranks share, or a URL; the same on all ranks.
        model: the result of ``load``, ``deepspeed.initialize`` or ``accelerator.prepare``, or any model that
            DeepSpeed's ZeRO or FSDP2 shards, also inside PEFT, DistributedDataParallel or ``torch.compile``.
        optimizer: the torch optimizer if no DeepSpeed engine steps, or accelerate's wrapper of it.
        extra: any JSON value with tensors in it, the same on all ranks. For other objects pass their state,
            such as ``scheduler.state_dict()``.
        wait: if False, copy the shares to host memory and write them in the background. The ``wait()`` of the
            returned object, or the next save, raises the error of a failed write. Calls that read ``path`` in
            this process, and the destruction of the process group, wait for the write. A process that ends
            before an error was raised ends with exit code 1.

    Returns:
        Saving: ``done()``, ``wait()``, and ``seconds`` with ``blocked`` and ``written``.

    Raises:
        ZerostartError: the same type and text on every rank; ``path`` is then unchanged. ConfigError for an
            optimizer state that has another shape than its parameter, and in the middle of an accumulation
            window if the engine has not reduced its gradients.

    Example:
        >>> import tempfile, torch, zerostart
        >>> weights = {"weight": torch.eye(2), "bias": torch.zeros(2)}
        >>> model = zerostart.load(weights, lambda: torch.nn.Linear(2, 2), engine="fsdp2", progress=False)
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> folder = tempfile.mkdtemp()
        >>> saving = zerostart.save_state(folder + "/state", model, optimizer, extra={"step": 7})
        >>> saving.done(), zerostart.load_state(folder + "/state", model, optimizer)
        (True, {'step': 7})
    """
    from zerostart.state.resuming.save_state import write_state

    return write_state(path, model, optimizer, extra, wait)


def load_state(
    path: str | os.PathLike[str], model: nn.Module, optimizer: torch.optim.Optimizer | None = None
) -> Extra:
    """Load a training checkpoint into a model and its optimizer; return ``extra``. Collective.

    Each rank reads its own shards. The number of ranks, the ZeRO stage, expert and tensor parallel degrees,
    offloading and the engine may differ from those of the save. No step is taken: optimizer states are
    created or deleted to match the checkpoint. ``model`` and ``optimizer`` are as in ``save_state``.
    Parameters are matched by name, and parameter groups by their parameters.

    With the same number of ranks each rank gets its own random states. Otherwise each gets new ones that
    depend only on the saved ones and the rank.

    Raises:
        ZerostartError: the same on every rank; do not use the model afterwards. CheckpointNotFoundError for a
            directory without a complete checkpoint, CoverageError for a checkpoint of another model,
            CheckpointError for groups or numbers that do not fit the running optimizer.

    Example:
        >>> import tempfile, torch, zerostart
        >>> weights = {"weight": torch.eye(2), "bias": torch.zeros(2)}
        >>> model = zerostart.load(weights, lambda: torch.nn.Linear(2, 2), engine="fsdp2", progress=False)
        >>> folder = tempfile.mkdtemp()
        >>> _ = zerostart.save_state(folder + "/state", model, extra=[1, "two"])
        >>> zerostart.load_state(folder + "/state", model)
        [1, 'two']
    """
    from zerostart.state.resuming.load_state import restore_state

    extra: Extra = restore_state(path, model, optimizer)
    return extra


def save(
    model: nn.Module,
    path: str | os.PathLike[str],
    max_shard_size: int | str = "5GB",
    dtype: torch.dtype | str | None = None,
    trainable_only: bool = False,
    adapters_only: bool = False,
    merge_adapters: bool = False,
    *,
    per_expert: bool = False,
    memory_limit: int | None = None,
    push_to_hub: str | None = None,
    hub_private: bool | None = None,
) -> SaveReport:
    """Save a sharded model as an ordinary checkpoint. Collective.

    Each rank writes its own bytes; nothing is gathered. A loaded model is saved in the layout of its
    checkpoint: names, shapes and order of elements, with conversions reversed and tied tensors once. The
    configuration, generation configuration, tokenizer or processor and code files are written next to the
    weights, so that plain transformers or diffusers opens the directory. A tensor that cannot be converted
    back (computed during the load, or initialised, if the library has no way back) keeps the model's own
    name; the report names it. See ``docs/saving.md``.

    Args:
        model: the result of ``load``, also wrapped by an engine, accelerate, PEFT or ``torch.compile``, or
            any model that DeepSpeed (ZeRO) or FSDP2 shards or that every rank holds whole.
        path: a directory that all ranks see, or the URL of one in a store (``docs/stores.md``). The new
            checkpoint appears whole or not at all. It replaces weights in the directory; files that zerostart
            has not written stay.
        max_shard_size: maximum size of a file, as in ``save_pretrained``: bytes, or a string with a unit.
        dtype: floating dtype of the tensors in the files, or its name; None keeps the dtype of each. With
            fp32 the masters of a DeepSpeed engine are saved.
        trainable_only: leave out frozen parameters and buffers.
        adapters_only: save only PEFT's adapters, in PEFT's format.
        merge_adapters: save the model with LoRA adapters merged into its weights, as ``merge_and_unload``
            does. The model itself is unchanged.
        per_expert: with ``adapters_only``, save the adapters of experts one by one, under the checkpoint's
            names, as vLLM and SGLang load them.
        memory_limit: maximum bytes that a rank allocates in addition to its shards; None: 32 MiB. Factors of
            merged adapters are not counted.
        push_to_hub: id of a hub repository, such as ``"me/my-model"``. Rank 0 uploads the saved files, with a
            model card that names the source (unless ``path`` has a ``README.md``). If the upload fails, the
            saved directory stays, and the error says so.
        hub_private: True makes the repository private and refuses an existing public one; None uses the
            account's default.

    Returns:
        The files and tensors, and the tensors with another name than in the source checkpoint.

    Raises:
        ZerostartError: the same type and text on every rank; ``path`` is then unchanged.

    Example:
        >>> import tempfile, torch, zerostart
        >>> weights = {"weight": torch.eye(2), "bias": torch.zeros(2)}
        >>> model = zerostart.load(weights, lambda: torch.nn.Linear(2, 2), engine="fsdp2", progress=False)
        >>> zerostart.save(model, tempfile.mkdtemp()).tensors
        ('bias', 'weight')
    """
    from zerostart.distributed.world import current_world

    with current_world().phase("arguments"):
        from zerostart.checkpoint.paths import scheme_of
        from zerostart.loading.request import dtype_of
        from zerostart.state.saving.adapters import AdapterFormat
        from zerostart.state.saving.save import SaveRequest, save_model

        if hub_private is not None and push_to_hub is None:
            raise ConfigError("hub_private needs push_to_hub: name a repository there")
        if push_to_hub is not None and scheme_of(path):
            raise ConfigError(f"push_to_hub uploads files of a directory, and not {path}; save to one first")
        if per_expert and not adapters_only:
            raise ConfigError("per_expert=True is about adapters; pass adapters_only=True, too")
        request = SaveRequest(
            model,
            max_shard_size,
            dtype_of(dtype),
            trainable_only,
            adapters_only,
            merge_adapters,
            memory_limit,
            adapter_format=AdapterFormat(per_expert=per_expert),
        )
    report = save_model(request, path)
    if push_to_hub is not None:
        from zerostart.live.model import find_record
        from zerostart.state.saving.hub import push

        record = find_record(model)
        root = "" if record is None else record.catalog.root
        push(path, push_to_hub, root, current_world(), hub_private)
    return report


def digest(model: nn.Module) -> dict[str, str]:
    """Compute the digest of each tensor of ``model`` by state-dict name. Collective.

    A digest is 34 hexadecimal digits of dtype, shape and bits. It is the same for every layout, engine, stage
    and number of ranks, and for files with the same tensors; tied names have equal digests. ``model`` is as
    in ``save``. Each rank reads its own share in place; the ranks exchange one message. See
    ``docs/saving.md``.

    Raises:
        ZerostartError: the same type and text on every rank; EngineError for experts of DeepSpeed's own MoE.

    Example:
        >>> import tempfile, torch, zerostart
        >>> weights = {"weight": torch.eye(2), "bias": torch.zeros(2)}
        >>> model = zerostart.load(weights, lambda: torch.nn.Linear(2, 2), engine="fsdp2", progress=False)
        >>> digests = zerostart.digest(model)
        >>> sorted(digests), len(digests["weight"])
        (['bias', 'weight'], 34)
    """
    from zerostart.state.comparing.digest import digest_model

    return digest_model(model)


def verify(path: str | os.PathLike[str]) -> Verified:
    """Check a saved directory against its recorded files, sizes and tensor digests.

    Reads all files once, in one process, in bounded memory; needs no process group.

    Returns:
        The numbers of ``files``, ``tensors`` and ``bytes`` that were checked.

    Raises:
        VerifyError: names of missing or changed files and tensors; also for a directory without
            ``zerostart.json`` (of ``save_state``: ``state.json``), which records the save.

    Example:
        >>> import tempfile, torch, zerostart
        >>> weights = {"weight": torch.eye(2), "bias": torch.zeros(2)}
        >>> model = zerostart.load(weights, lambda: torch.nn.Linear(2, 2), engine="fsdp2", progress=False)
        >>> folder = tempfile.mkdtemp()
        >>> _ = zerostart.save(model, folder)
        >>> zerostart.verify(folder).tensors
        2
    """
    from zerostart.checkpoint.verifying import verify as verify_path

    return verify_path(path)


def convert(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    to: str,
    *,
    dtype: torch.dtype | str | None = None,
    max_shard_size: int | str = "5GB",
) -> Converted:
    """Write the weights of a checkpoint in another format, in bounded memory.

    One process converts, or the ranks of a job together. No model is loaded. ``out`` appears whole or not at
    all. See ``docs/saving.md``.

    Args:
        source: a directory, a file, a hub id or a URL, of a model, a training checkpoint or a run.
        out: an empty or new directory; for "hf" and "original" also the URL of one in a store.
        to: "hf", "dcp" or "original".
        dtype: floating type of the weights; None keeps the type of each.
        max_shard_size: maximum size of one file of "hf" and "original", in bytes.

    Returns:
        ``path``, its ``files`` of tensors, and the numbers of ``tensors`` and ``bytes``.

    Raises:
        ZerostartError: the same type and text on every rank. ConfigError for a directory that is not empty,
            and for weights that ``to`` cannot hold; WriteError and ReadError.

    Example:
        >>> import tempfile, torch, zerostart
        >>> weights = {"weight": torch.eye(2), "bias": torch.zeros(2)}
        >>> model = zerostart.load(weights, lambda: torch.nn.Linear(2, 2), engine="fsdp2", progress=False)
        >>> folder = tempfile.mkdtemp()
        >>> _ = zerostart.save(model, folder)
        >>> zerostart.convert(folder, folder + "-dcp", "dcp").tensors
        2
    """
    from zerostart.distributed.world import current_world

    with current_world().phase("arguments"):
        from zerostart.loading.request import dtype_of
        from zerostart.state.converting.convert import convert as convert_files

        floating = dtype_of(dtype)
    return convert_files(source, out, to, dtype=floating, max_shard_size=max_shard_size)


def diff(a: str | os.PathLike[str] | nn.Module, b: str | os.PathLike[str] | nn.Module) -> Difference:
    """Compare two checkpoints or live models, tensor by tensor and bit by bit, in bounded memory.

    A path is any source of ``load``; names are those in the files. With a model the call is collective: the
    model is saved to a temporary directory first (``TMPDIR``; on several hosts one that they share).

    Returns:
        ``equal`` names; ``differing``, by name the ``largest`` absolute difference and the number of
        ``elements`` that differ; ``only_a`` and ``only_b``, names; and ``same``.

    Raises:
        ZerostartError: an error of opening, reading or saving a checkpoint; the same on every rank.

    Example:
        >>> import tempfile, torch, zerostart
        >>> weights = {"weight": torch.eye(2), "bias": torch.zeros(2)}
        >>> model = zerostart.load(weights, lambda: torch.nn.Linear(2, 2), engine="fsdp2", progress=False)
        >>> folder, other = tempfile.mkdtemp(), tempfile.mkdtemp()
        >>> _ = zerostart.save(model, folder), zerostart.save(model, other)
        >>> zerostart.diff(folder, other).same
        True
    """
    from zerostart.state.comparing.diff import compare

    return compare(a, b)
