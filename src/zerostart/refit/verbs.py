"""The public verbs of the room: ``zerostart.refit`` and ``zerostart.weight_source``."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import nn

    from zerostart.refit.refitter import Refitter
    from zerostart.refit.within import WeightSource


def refit(
    model: nn.Module,
    target: object = None,
    *,
    workers: int | None = None,
    dtype: torch.dtype | str | None = None,
    merge_adapters: bool = True,
    timeout: float = 300.0,
    strict: bool = True,
) -> Refitter:
    """Begin to push the weights of ``model`` into an inference engine; collective.

    ``push()`` of the result brings the target to the weights as they are, ``close()`` ends it. Nothing is
    gathered: which bytes go from which rank to which worker follows from how both hold the model. See
    ``docs/refit.md``.

    Args:
        model: result of ``load``, ``deepspeed.initialize`` or ``accelerator.prepare``, or any model that
            DeepSpeed's ZeRO or FSDP2 shards. Adapters of PEFT are merged on the way, or sent alone.
        target: vLLM's ``LLM``, SGLang's ``Engine``, the ``http://...`` of a server of either on this machine,
            or another engine that is told (a ``zerostart.serving.Driver``).
            Or ``unix:///path``, a socket for workers of this machine and user, which connect by
            ``zerostart.serving.serve``; None: a socket of its own, see ``address`` of the result.
            Or a module with ``load_weights`` in this very rank, or a ``zerostart.serving.Receiver`` of one;
            every rank passes its own, or None.
        workers: number that the first push waits for; None: those of the engine, or one.
        dtype: floating dtype of what is pushed; None keeps the parameters' own.
        merge_adapters: False: push the model's one adapter alone, under the names of
            ``save(adapters_only=True)``.
        timeout: seconds within which workers have to connect, and to serve a version.
        strict: refuse an engine with parameters that no tensor of the model fills, which would go on as they
            are. False: push all the same.

    Returns:
        Refitter: ``push()``, ``close()``, ``address`` and ``version``; a context manager.

    Raises:
        ZerostartError: the same type and text on every rank. ConfigError for arguments that do not fit.

    Example:
        >>> import threading, torch, zerostart
        >>> from zerostart import serving
        >>> weights = {"weight": torch.ones(2, 3), "bias": torch.zeros(2)}
        >>> model = zerostart.load(weights, lambda: torch.nn.Linear(3, 2), engine="fsdp2", progress=False)
        >>> engine = torch.nn.Linear(3, 2)  # in a process of its own, as a rule
        >>> receiver = serving.Receiver(engine, lambda pairs: engine.load_state_dict(dict(pairs)))
        >>> with zerostart.refit(model) as refitter:
        ...     worker = threading.Thread(target=serving.serve, args=(receiver, refitter.address))
        ...     worker.start()
        ...     report = refitter.push()
        >>> worker.join()
        >>> report.version, engine.weight.tolist()
        (1, [[1.0, 1.0, 1.0], [1.0, 1.0, 1.0]])
    """
    from zerostart.distributed.world import current_world

    with current_world().phase("arguments"):
        from zerostart.loading.request import dtype_of
        from zerostart.refit.pushes import RefitSettings
        from zerostart.refit.refitter import Refitter

        settings = RefitSettings(workers, dtype_of(dtype), merge_adapters, timeout, strict)
    return Refitter(model, target, settings)


def weight_source(
    model: nn.Module,
    rank: int | None = 0,
    *,
    dtype: torch.dtype | str | None = None,
    merge_adapters: bool = True,
) -> WeightSource:
    """Give the checkpoint of ``model`` as a stream of whole tensors, for engines that take weights so.

    It has what vLLM's trainer side asks of a ``WeightSource``: ``metadata()`` (name, dtype, whole shape, in
    the order of the iteration), ``held_names()``, and iteration, each time a fresh pass over ``(name,
    tensor)``, collective, which every rank has to run to its end. Names and tensors are those that ``save``
    writes, and not the model's: experts one by one, adapters merged. In addition to the tensor that is
    yielded a rank takes about 100 MiB. If an engine can be told, ``refit`` moves less.

    Args:
        model: as for ``save``.
        rank: who gets the tensors, in host memory; the others get tensors on the meta device. None: all.
        dtype: floating dtype of the tensors; None keeps the parameters' own.
        merge_adapters: False: the model's one adapter alone, as ``save(adapters_only=True)`` writes it.

    Returns:
        WeightSource: the stream. The model may be trained between two passes.

    Raises:
        ZerostartError: the same type and text on every rank. ConfigError for arguments that do not fit.

    Example:
        >>> import torch, zerostart
        >>> weights = {"weight": torch.eye(2), "bias": torch.zeros(2)}
        >>> model = zerostart.load(weights, lambda: torch.nn.Linear(2, 2), engine="fsdp2", progress=False)
        >>> source = zerostart.weight_source(model)
        >>> [meta.name for meta in source.metadata()]
        ['weight', 'bias']
        >>> {name: tensor.tolist() for name, tensor in source}
        {'weight': [[1.0, 0.0], [0.0, 1.0]], 'bias': [0.0, 0.0]}
    """
    from zerostart.distributed.world import current_world

    with current_world().phase("arguments"):
        from zerostart.loading.request import dtype_of
        from zerostart.refit.pushes import RefitSettings
        from zerostart.refit.within import WeightSource

        settings = RefitSettings(dtype=dtype_of(dtype), merge_adapters=merge_adapters)
    return WeightSource(model, rank, settings)
