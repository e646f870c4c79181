"""Ranks that call sharded models by themselves: the others run each call along, with its caller's inputs.

Engines gather a sharded model in the midst of a call, for which every rank has to be there. Inside
``take_turns`` no rank begins a call before all have said which one they are about to make. Where they differ,
that of the first rank comes first: who makes the same runs it with inputs of its own, the others with those
of the caller, for nothing but the gathering. So ranks may go different ways, and end at different times.
"""

from __future__ import annotations

import contextlib
import functools
import io
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from zerostart.distributed.world import World, current_world, default_device, is_lost
from zerostart.errors import ConfigError, EngineError
from zerostart.live.model import loaded_parts
from zerostart.models import library_of
from zerostart.upstream.diffusers.pipelines import Pipeline

DURING = "taking turns in zerostart.synced"
Call = Callable[..., object]


@contextlib.contextmanager
def take_turns(pipe: Pipeline | nn.Module) -> Iterator[None]:
    """See ``zerostart.synced``. Raises ConfigError where nothing of ``pipe`` is sharded by zerostart."""
    world = current_world()
    with world.phase("zerostart.synced"), contextlib.ExitStack() as hooks:
        turns = _Turns(world)
        with world.phase("zerostart.synced: its models"):
            for prefix, model in _sharded(pipe).items():
                turns.add(prefix, model, hooks)
        yield
        # Through with the block, but not gone: this rank runs the others' calls along until they are through
        # as well. Not after an error, which the phase tells them.
        turns.take(None, (), {})


def _sharded(pipe: Pipeline | nn.Module) -> dict[str, nn.Module]:
    """The sharded models of a module or of a pipeline, by the names that they have there."""
    parts = {"": pipe} if isinstance(pipe, nn.Module) else pipe.components
    modules = {name: part for name, part in parts.items() if isinstance(part, nn.Module)}
    found = {
        f"{name}.{prefix}".strip("."): model
        for name, part in modules.items()
        for prefix, model, record in loaded_parts(part)
        if not record.engine.replicates_parameters
    }
    if not found:
        raise ConfigError(
            f"zerostart.synced: no model of this {type(pipe).__name__} is sharded, so ranks need "
            "not wait for each other: call the pipeline without it"
        )
    return found


class _Turns:
    """What ranks may call, by names that are the same on all of them, and how deep this rank is in a call."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._calls: dict[str, Call] = {}
        self._modules: dict[str, nn.Module] = {}
        self._depth = 0

    def add(self, name: str, model: nn.Module, hooks: contextlib.ExitStack) -> None:
        """Have calls of ``model``, and of any module in it, wait for their turns until ``hooks`` close."""
        for path, module in model.named_modules():
            place = f"{name}.{path}".strip(".") or type(model).__name__
            self._calls[place] = self._modules[place] = module
            before = functools.partial(self._before, place)
            # Before all other hooks, the engine's among them, which gather at once.
            handle = module.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
            hooks.callback(handle.remove)
            hooks.callback(module.register_forward_hook(self._after, always_call=True).remove)
        for entry in library_of(model).entries(model):
            # Methods by which pipelines call a model past its forward (``encode`` of an autoencoder) have no
            # hooks: they are replaced on the object.
            place, plain, own = f"{name}.{entry}()".strip("."), getattr(model, entry), vars(model).get(entry)
            self._calls[place], self._modules[place] = plain, model
            setattr(model, entry, functools.wraps(plain)(functools.partial(self._run, place, plain)))
            hooks.callback(_restore, model, entry, own)

    def take(self, call: str | None, args: tuple[object, ...], kwargs: Mapping[str, object]) -> None:
        """Run the calls of other ranks along until it is the turn of ``call``; None: until none has any."""
        pack = functools.partial(_packed, (args, dict(kwargs), _autocasts()))
        while True:
            # Every rank says which call it is about to make, None for one that is through with the block. The
            # first rank's call that is not None is next: all ranks take part in it.
            wanted = self._world.all_gather_object(call, DURING)
            chosen = next((one for one in wanted if one is not None), None)
            if chosen is None:
                return
            if any(one != chosen for one in wanted):
                sent = self._world.broadcast_object(pack, DURING, wanted.index(chosen))
                # The others' call stays to be made: this loop asks again until it is the one that is chosen.
                if call != chosen:
                    self._along(chosen, sent)
            if call == chosen:
                return

    def _along(self, call: str, sent: bytes) -> None:
        args, kwargs, autocasts = torch.load(io.BytesIO(sent), map_location=_here, weights_only=False)
        device = default_device()
        drawing: Any = {"devices": []}
        if device.type != "cpu":
            drawing = {"devices": [device.index], "device_type": device.type}
        self._depth += 1
        try:
            with contextlib.ExitStack() as stack:
                stack.enter_context(torch.no_grad())
                stack.enter_context(torch.random.fork_rng(**drawing))  # this rank draws what it would alone
                for autocast in autocasts:
                    stack.enter_context(torch.autocast(**autocast))
                self._calls[call](*args, **kwargs)
        finally:
            self._depth -= 1

    def _before(
        self, call: str, module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> None:
        self._begin(call, args, kwargs)

    def _after(self, module: nn.Module, args: object, output: object) -> None:
        self._depth -= 1  # after a beginning that has failed as well

    def _run(self, call: str, plain: Call, *args: object, **kwargs: object) -> object:
        try:
            self._begin(call, args, kwargs)
            return plain(*args, **kwargs)
        finally:
            self._depth -= 1

    def _begin(self, call: str, args: tuple[object, ...], kwargs: Mapping[str, object]) -> None:
        self._depth += 1
        # A module inside a call that has had its turn: all ranks are in it together.
        if self._depth > 1:
            return
        values = [*args, *kwargs.values(), *self._modules[call].parameters()]
        if torch.is_grad_enabled() and any(isinstance(v, torch.Tensor) and v.requires_grad for v in values):
            raise EngineError(
                f"{call} has an argument or a weight that needs a gradient inside zerostart.synced, "
                "where the other ranks run no backward; call it under torch.no_grad()"
            )
        self.take(call, args, kwargs)


def explain_waiting(name: str, model: nn.Module) -> None:
    """Have the time-out of a rank that waits for the others in the sharded ``model`` say what to do."""

    def after(path: str, module: nn.Module, args: object, output: object) -> None:
        error = sys.exception()
        # Modules are left from the inside to the outside: the innermost adds the note, the others find it
        # there.
        if isinstance(error, RuntimeError) and is_lost(error) and not getattr(error, "__notes__", None):
            error.add_note(
                f"This rank was in {path} of the sharded component {name}, for which all ranks have to be "
                "there: make the same calls on each, or make them inside zerostart.synced(pipe), or place "
                f"{name} 'replicate' or 'offload'"
            )

    for path, module in model.named_modules():
        module.register_forward_hook(functools.partial(after, path or type(model).__name__), always_call=True)


def _restore(model: nn.Module, entry: str, own: object) -> None:
    if own is None:
        delattr(model, entry)
    else:
        setattr(model, entry, own)


def _packed(given: tuple[object, ...]) -> bytes:
    """The arguments of a call as bytes. Raises EngineError for what cannot be sent."""
    buffer = io.BytesIO()
    try:
        torch.save(given, buffer)
    except Exception as error:
        raise EngineError(
            f"an argument of a sharded model cannot be sent to the other ranks ({error}); make the "
            "same calls on all ranks, without zerostart.synced"
        ) from error
    return buffer.getvalue()


def _autocasts() -> list[dict[str, object]]:
    """The arguments of ``torch.autocast`` that are in force for a call, of each type of device."""
    return [
        {
            "device_type": kind,
            "dtype": torch.get_autocast_dtype(kind),
            "enabled": torch.is_autocast_enabled(kind),
        }
        for kind in {"cpu", default_device().type}
    ]


def _here(storage: Any, location: str) -> Any:
    """What lay on the caller's device lies on this rank's own."""
    return storage if location == "cpu" else storage.to(device=default_device())
