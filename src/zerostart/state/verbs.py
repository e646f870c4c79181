"""The verbs of the front door that save, resume and compare; ``zerostart`` has them under its own name.

Nothing heavy is imported before one is called.
"""

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

    Comparable: TypeAlias = str | os.PathLike[str] | nn.Module
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
    """Write a training checkpoint; collective, each rank its own share, nothing gathered.

    It has all that a run goes on from: parameters, persistent buffers, fp32 masters, the optimizer's state
    and settings, the engine's counters, loss scale and schedule, gradients that are there to be added to,
    the random states of every rank, and ``extra``. ``path`` appears whole or not at all, in the place of an
    older checkpoint. In it ``model/`` is a Hugging Face directory. See ``docs/resuming.md``.

    Args:
        path: the directory to be, on storage that all ranks share, or a URL; the same on all ranks.
        model: what ``load``, ``deepspeed.initialize`` or ``accelerator.prepare`` returned, or any model that
            DeepSpeed's ZeRO or FSDP2 shards, inside PEFT, DistributedDataParallel, ``torch.compile`` or not.
        optimizer: the torch optimizer where no DeepSpeed engine steps, or accelerate's wrapper of it.
        extra: any JSON value with tensors in it, the same on all ranks; of other objects pass what describes
            them, such as ``scheduler.state_dict()``.
        wait: if False, return when the shares are copied to host memory, and write them in the background; an
            error is then told by ``wait()`` of what is returned, or by the next save. Whoever loads, verifies
            or compares ``path`` in this process, or destroys the process group, waits for it; a process that
            ends before anybody was told of an error ends with exit code 1.

    Returns:
        Saving: ``done()``, ``wait()``, and ``seconds`` with ``blocked`` and ``written``.

    Raises:
        ZerostartError: the same type and text on every rank; what was at ``path`` is then as it was.
            ConfigError for a state of the optimizer that has not the shape of its parameter, and in the
            middle of an accumulation window where the engine has not reduced its gradients.

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
    """Load a training checkpoint into a model, its optimizer and its engine; returns ``extra``. Collective.

    Each rank reads what it holds, so that the number of ranks, the ZeRO stage, expert and tensor parallel
    degrees, offloading and the engine may be others than when it was saved. No step is taken: an optimizer
    without state gets the saved one, and one whose parameters had none yet has none. ``model`` and
    ``optimizer`` are as in ``save_state``; parameters are matched by name, and groups by their parameters.

    Random states are each rank's own where the ranks are as many, else new ones that follow from the saved.

    Raises:
        ZerostartError: the same on every rank; the model is then of no use. CheckpointNotFoundError for a
            directory that is not a complete checkpoint, CoverageError for one of another model,
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

    found: Extra = restore_state(path, model, optimizer)
    return found


def save(
    model: nn.Module,
    path: str | os.PathLike[str],
    max_shard_size: int | str = "5GB",
    dtype: torch.dtype | str | None = None,
    trainable_only: bool = False,
    adapters_only: bool = False,
    merge_adapters: bool = False,
    *,
    memory_limit: int | None = None,
    push_to_hub: str | None = None,
    hub_private: bool | None = None,
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
        path: a directory that all ranks see, or the URL of one in a store (``docs/stores.md``), which appears
            whole or not at all. Weights there are replaced;
            files that zerostart has not written stay.
        max_shard_size: most bytes of a file, as in ``save_pretrained``: a number, or with a unit.
        dtype: floating dtype of the tensors in the files, or its name; None: the one in which the model holds
            each. In fp32 the engine of ``deepspeed.initialize`` gives its masters.
        trainable_only: leave out frozen parameters, and buffers.
        adapters_only: save only PEFT's adapters, in PEFT's format.
        merge_adapters: save the model with LoRA's adapters in its weights, as ``merge_and_unload`` has it.
            The model itself stays as it is.
        memory_limit: most bytes that a rank takes beside its shards; None: 32 MiB. Factors of adapters that
            are merged come to that.
        push_to_hub: the id of a repository of the hub, such as ``"me/my-model"``, to which rank 0 uploads
            what was saved, with a model card that says what it was trained from (unless ``path`` has a
            ``README.md``). Where that fails the model is saved all the same, and the error says so.
        hub_private: True: that repository is private, and one that is there and public is refused; None: what
            the account's settings say.

    Returns:
        What was written, and what has another name than in the checkpoint that it came from.

    Raises:
        ZerostartError: the same type and text on every rank; what was at ``path`` is then as before.

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
        from zerostart.state.saving.save import SaveRequest, save_model

        if hub_private is not None and push_to_hub is None:
            raise ConfigError("hub_private is of push_to_hub, which was not passed; name a repository there")
        if push_to_hub is not None and scheme_of(path):
            raise ConfigError(f"push_to_hub uploads files of a directory, and not {path}; save to one first")
        request = SaveRequest(
            model,
            max_shard_size,
            dtype_of(dtype),
            trainable_only,
            adapters_only,
            merge_adapters,
            memory_limit,
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
    """The digest of each tensor of ``model``, by its state-dict name; tied names have the same.

    Collective. 34 hexadecimal digits of dtype, shape and bits that are the same for every layout, engine,
    stage and number of ranks, experts whole, and those that files of the same tensors have. ``model`` is as
    in ``save``. Each rank reads its own share, where it lies, and one message goes round. See
    ``docs/saving.md``.

    Raises:
        ZerostartError: the same type and text on every rank; EngineError for experts of DeepSpeed's own MoE.

    Example:
        >>> import tempfile, torch, zerostart
        >>> weights = {"weight": torch.eye(2), "bias": torch.zeros(2)}
        >>> model = zerostart.load(weights, lambda: torch.nn.Linear(2, 2), engine="fsdp2", progress=False)
        >>> found = zerostart.digest(model)
        >>> sorted(found), len(found["weight"])
        (['bias', 'weight'], 34)
    """
    from zerostart.state.comparing.digest import digest_model

    return digest_model(model)


def verify(path: str | os.PathLike[str]) -> Verified:
    """Check that a directory is what zerostart saved, by files, bytes and digests of tensors.

    Reads all of it once, in one process and without one of ``torch.distributed``, in bounded memory.

    Returns:
        How many ``files``, ``tensors`` and ``bytes`` were found as they were saved.

    Raises:
        VerifyError: files and tensors that are missing or have other contents, by name; or there is no
            ``zerostart.json`` (of ``save_state``: ``state.json``), which says what was saved.

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
    """Write the weights of a checkpoint of any readable format in another one, in bounded memory.

    One process does it, or the ranks of a job together. No model is loaded. ``out`` appears whole or not at
    all. See ``docs/saving.md``.

    Args:
        source: a directory, a file, a hub id or a URL, of a model, a training checkpoint or a run.
        out: an empty or new directory; for "hf" and "original" also the URL of one in a store.
        to: "hf", "dcp" or "original".
        dtype: floating type of the weights; None keeps that of each.
        max_shard_size: maximum size of one file of "hf" and "original", in bytes.

    Returns:
        ``path``, its ``files`` of tensors, and how many ``tensors`` and ``bytes``.

    Raises:
        ZerostartError: the same type and text on every rank. ConfigError for a directory that is not empty,
            and for what ``to`` cannot hold; WriteError and ReadError.

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


def diff(a: Comparable, b: Comparable) -> Difference:
    """Compare two checkpoints, or a live model and a checkpoint, tensor by tensor and bit by bit.

    A path is whatever ``load`` takes for one; names are those in the files. A live model is as in ``save``,
    and the call then collective: it is compared in the layout in which it would be saved, but under its
    state-dict names where the files have only those. Memory is bounded: each rank reads what it holds itself.

    Returns:
        ``equal`` names; ``differing``, by name the ``largest`` absolute difference and the number of
        ``elements`` that differ; ``only_a`` and ``only_b``, names; and ``same``. The same on every rank.

    Raises:
        ZerostartError: what opening and reading a checkpoint raises, the same on every rank; ConfigError for
            two live models (compare what ``digest`` gives for each).

    Example:
        >>> import tempfile, torch, zerostart
        >>> weights = {"weight": torch.eye(2), "bias": torch.zeros(2)}
        >>> model = zerostart.load(weights, lambda: torch.nn.Linear(2, 2), engine="fsdp2", progress=False)
        >>> folder = tempfile.mkdtemp()
        >>> _ = zerostart.save(model, folder)
        >>> zerostart.diff(folder, model).same
        True
    """
    from zerostart.state.comparing.diff import compare

    return compare(a, b)
