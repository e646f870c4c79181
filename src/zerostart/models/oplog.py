"""A log of what happened to tensors without data, and giving them their values afterwards.

A model is built, and initialised, on the meta device, where a tensor of any size costs nothing. The log
notes each operator. The value of a tensor that the checkpoint does not supply is then had by running just
the operators that lead to it, for real: a rotary table, a mask, a missing head. An initialiser that works
element by element is run in chunks, so that not even one whole parameter needs to exist.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from zerostart.errors import BuildError

__all__ = ["Op", "OpLog"]


@dataclass(frozen=True)
class Op:
    """One operator call: its arguments, and the meta tensors that it made or changed."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any

    @property
    def writes(self) -> list[torch.Tensor]:
        """Meta tensors that the call made or changed."""
        made = [t for t in tree_leaves(self.result) if _is_meta(t)]
        for argument, value in zip(self.func._schema.arguments, self.args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                made += [t for t in tree_leaves(value) if _is_meta(t)]
        return made

    @property
    def reads(self) -> list[torch.Tensor]:
        """Meta tensors among the arguments."""
        return [t for t in tree_leaves((self.args, self.kwargs)) if _is_meta(t)]

    @property
    def is_view(self) -> bool:
        """Whether the result only looks at an argument's storage, and nothing is computed."""
        results = [t for t in tree_leaves(self.result) if isinstance(t, torch.Tensor)]
        mutable = any(a.alias_info is not None and a.alias_info.is_write for a in self.func._schema.arguments)
        given = {storage_key(t) for t in self.reads}
        return not mutable and bool(results) and all(_is_meta(t) and storage_key(t) in given for t in results)


def _is_meta(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == "meta"


def storage_key(tensor: torch.Tensor) -> int:
    """Identity of the storage that ``tensor`` looks at."""
    key: int = tensor.untyped_storage()._cdata
    return key


class _RealConstants(TorchFunctionMode):
    """Lets ``torch.tensor([...])`` keep its numbers: made on the CPU, then moved where the log sees it."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        building = torch.get_default_device().type == "meta"
        constant = func in (torch.tensor, torch.as_tensor, torch.from_numpy)
        if building and constant and kwargs.get("device") is None:
            if func is not torch.from_numpy:
                kwargs["device"] = "cpu"
            value = func(*args, **kwargs)
            return value if value.device.type == "meta" else value.to("meta")
        return func(*args, **kwargs)


class OpLog(TorchDispatchMode):
    """Context that logs operators on meta tensors; may be entered several times."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ops: list[Op] = []
        self._constants: list[_RealConstants] = []

    def __enter__(self) -> OpLog:
        constants = _RealConstants()
        constants.__enter__()  # type: ignore[no-untyped-call]  # torch's modes are untyped
        self._constants.append(constants)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
        self._constants.pop().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operator on meta and note it, if a meta tensor comes out of it or is changed by it."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        op = Op(func, tuple(args), dict(kwargs), result)
        if op.writes and not op.is_view:
            # A real argument may be reused and changed by the caller before the log is run.
            kept = tree_map(
                lambda v: v.clone() if isinstance(v, torch.Tensor) and not _is_meta(v) else v, args
            )
            self.ops.append(Op(func, tuple(kept), dict(kwargs), result))
        return result

    def values(self, wanted: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
        """The real values of meta tensors, by running what leads to them on ``device``.

        Raises BuildError for a tensor that nothing in the log makes.
        """
        needed = {storage_key(t) for t in wanted}
        steps: list[Op] = []
        for op in reversed(self.ops):
            if any(storage_key(t) in needed for t in op.writes):
                steps.append(op)
                needed |= {storage_key(t) for t in op.reads}
        replay = _Replay(device)
        for op in reversed(steps):
            replay.run(op)
        return [replay.real(t) for t in wanted]

    def writers(self, tensor: torch.Tensor) -> Iterator[Op]:
        """The calls that made or changed the storage of ``tensor``, in order."""
        key = storage_key(tensor)
        return (op for op in self.ops if any(storage_key(t) == key for t in op.writes))


class _Replay:
    """Runs logged calls on real storages; a meta tensor stands for the same view of the real storage."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._storages: dict[int, torch.UntypedStorage] = {}

    def real(self, tensor: torch.Tensor) -> torch.Tensor:
        """The real tensor that ``tensor`` stands for."""
        storage = self._storages.get(storage_key(tensor))
        if storage is None:
            raise BuildError(
                f"a tensor of shape {tuple(tensor.shape)} has no known value: it was made before the model's "
                "construction could be followed. Pass a callable that builds the whole model"
            )
        view = torch.empty(0, dtype=tensor.dtype, device=self._device)
        return view.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())

    def run(self, op: Op) -> None:
        """Run one call for real."""
        args, kwargs = tree_map(self._argument, (op.args, op.kwargs))
        result = op.func(*args, **kwargs)
        for meta, made in zip(tree_leaves(op.result), tree_leaves(result), strict=True):
            if _is_meta(meta):
                self._storages[storage_key(meta)] = made.untyped_storage()

    def _argument(self, value: Any) -> Any:
        if _is_meta(value):
            return self.real(value)
        if isinstance(value, torch.device):
            return self._device
        return value
