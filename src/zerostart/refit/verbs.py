"""Public functions ``zerostart.refit`` and ``zerostart.weight_source``."""

from __future__ import annotations

import sys
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
    """Connect ``model`` with an inference engine, to push its weights; collective.

    ``push()`` of the result copies the current weights into the target, and ``close()`` ends the connection.
    Nothing is gathered: ranks send workers exactly the bytes that they need. See ``docs/refit.md``.

    Args:
        model: result of ``load``, ``deepspeed.initialize`` or ``accelerator.prepare``, or any model that
            DeepSpeed's ZeRO or FSDP2 shards. PEFT's adapters are merged on the way, or pushed separately.
        target: one of these:

            - vLLM's ``LLM``, SGLang's ``Engine``, the ``http://...`` of a server of either on this machine,
              or a ``zerostart.serving.Driver`` of another engine;
            - ``unix:///path``, a socket for workers of this machine and user, which connect with
              ``zerostart.serving.serve``; None chooses a path, see ``address`` of the result;
            - a module with ``load_weights`` in this rank, or a ``zerostart.serving.Receiver`` of one; every
              rank passes its own, or None.
        workers: number of workers that the first push waits for; None means those of the engine, or one.
        dtype: floating dtype of the pushed weights; None keeps the parameters' dtypes.
        merge_adapters: False pushes only the model's adapter, under the names of
            ``save(adapters_only=True)``.
        timeout: seconds for workers to connect, and to load a version.
        strict: True refuses an engine with parameters that no tensor of the model fills.

    Returns:
        Refitter: ``push()``, ``close()``, ``address`` and ``version``; a context manager.

    Raises:
        ZerostartError: the same type and text on every rank. ConfigError for invalid arguments.

    Example:
        >>> import threading, torch, zerostart
        >>> from zerostart import serving
        >>> weights = {"weight": torch.ones(2, 3), "bias": torch.zeros(2)}
        >>> model = zerostart.load(weights, lambda: torch.nn.Linear(3, 2), engine="fsdp2", progress=False)
        >>> engine = torch.nn.Linear(3, 2)  # usually in another process
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
    """Stream the checkpoint of ``model`` as whole tensors, for engines that need whole tensors.

    The result has ``metadata()`` (name, dtype and whole shape of each tensor, in order) and iterates over
    ``(name, tensor)``. If vLLM is imported, it is a ``WeightSource`` for any backend of vLLM's
    ``WeightTransferTrainerFactory``, and the backend ``zerostart`` is registered there. Each iteration is
    collective: every rank must run it to its end. Names and tensors are those that ``save`` writes: single
    experts, merged adapters. A rank needs about 100 MiB in addition to the current tensor. ``refit`` moves
    fewer bytes.

    Args:
        model: as for ``save``.
        rank: rank that receives the tensors, in host memory; None means all. Other ranks receive tensors on
            the meta device.
        dtype: floating dtype of the tensors; None keeps the parameters' dtypes.
        merge_adapters: False streams only the model's adapter, as ``save(adapters_only=True)`` writes it.

    Returns:
        WeightSource: the stream. The model may be trained between two iterations.

    Raises:
        ZerostartError: the same type and text on every rank. ConfigError for invalid arguments.

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
        kind = WeightSource
        if "vllm.distributed.weight_transfer" in sys.modules:
            from zerostart.refit.vllm import register
            from zerostart.refit.vllm_engine import VLLMSource as kind  # vLLM's as well

            register()
    return kind(model, rank, settings)
