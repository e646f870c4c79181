"""Gradient checkpointing of a model's blocks, whose code knows nothing of it."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from zerostart.engines.activation.gradient_checkpoint import checkpointed
from zerostart.errors import ConfigError


class CheckpointedForward:
    """Stands for the ``forward`` of one module.

    Hooks stay outside: what an engine gathers before a module's forward it gathers for its backward as well,
    in which the forward runs again.
    """

    def __init__(self, module: nn.Module, offload: bool) -> None:
        functools.update_wrapper(self, module.forward)  # its signature, for whoever asks
        self.original = module.forward
        self.offload = offload

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The block's forward, as a checkpoint."""
        return checkpointed(self.original, args, kwargs, self.offload)


def checkpoint_blocks(
    model: nn.Module,
    blocks: Sequence[str | type[nn.Module]] | None = None,
    offload: bool = False,
    every: int = 1,
) -> tuple[str, ...]:
    """See ``zerostart.checkpoint_blocks``. Raises ConfigError where there is nothing to checkpoint."""
    if not all(isinstance(one, (str, type)) for one in blocks or ()):
        raise ConfigError(f"blocks={blocks!r} must be a list of classes or names, such as ['EncoderLayer']")
    if every < 1:
        raise ConfigError(f"every={every} must be 1 (each block) or more (each second, third, ...)")
    found = _blocks(model, blocks)
    if not found:
        raise ConfigError(
            f"{type(model).__name__} does not say which modules are its blocks; name them: "
            "blocks=['EncoderLayer'] (a class) or blocks=['encoder.layers.*'] (names of modules)"
        )
    chosen = dict(list(found.items())[::every])
    for module in chosen.values():
        if isinstance(module.forward, CheckpointedForward):
            module.forward = module.forward.original  # again, with other settings
        module.forward = CheckpointedForward(module, offload)
    return tuple(chosen)


def _blocks(model: nn.Module, wanted: Sequence[str | type[nn.Module]] | None) -> dict[str, nn.Module]:
    """The blocks by name: no block inside another."""
    named = dict(model.named_modules())
    if wanted is None:
        kinds = [kind for part in named.values() for kind in getattr(part, "_no_split_modules", None) or ()]
        lists = [name for name, part in named.items() if isinstance(part, nn.ModuleList)]
        wanted = kinds or [f"{name}.*" for name in lists]
    else:
        for entry in wanted:
            if not any(_matches(name, module, entry) for name, module in named.items()):
                shown = entry if isinstance(entry, str) else entry.__name__
                raise ConfigError(f"blocks has {shown!r}, which no module has as its class or name")
    found: dict[str, nn.Module] = {}
    for name, module in named.items():
        inside = any(name.startswith(f"{outer}.") for outer in found)
        if name and not inside and any(_matches(name, module, entry) for entry in wanted):
            found[name] = module
    return found


def _matches(name: str, module: nn.Module, entry: str | type[nn.Module]) -> bool:
    if isinstance(entry, type):
        return isinstance(module, entry)
    # By any base: FSDP2 gives the modules that it shards a class of its own.
    if any(kind.__name__ == entry for kind in type(module).__mro__):
        return True
    parts, patterns = name.split("."), entry.split(".")
    return len(parts) == len(patterns) and all(map(fnmatchcase, parts, patterns))
