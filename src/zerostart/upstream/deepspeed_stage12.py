"""Private parts of DeepSpeed's ZeRO stage 1 and 2: flat buffers that parameters are born in.

Three things are done otherwise for parameters that carry a mark of zerostart, and for no others:

- Flattening. ``DeepSpeedZeroOptimizer`` and ``BF16_Optimizer`` put each parameter group into a new flat
  buffer, by way of the CPU where the device has no room for both. Here a group whose parameters lie in a
  buffer of the load is brought into the optimizer's order in place, and that buffer is taken as its own.
- The broadcast of the model. ``DeepSpeedEngine._broadcast_model`` sends every tensor from rank 0. Here the
  ranks compare sums of what they loaded, and only what differs is sent.
- Masters. They are made from the partitions; those of rounded parameters are then read from the checkpoint.

The way in is the constructors of both optimizers and that one method of the engine, replaced at the first
load for these stages. A constructor's own overrides live on the one object and end with the constructor, also
when it fails; then the hooks that it left are removed, and the client's optimizer gets its parameters back.
Known for the versions in ``zerostart.upstream.deepspeed.SUPPORTED``; others take the stock route.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
import torch.distributed as dist

from zerostart.errors import EngineError
from zerostart.upstream.deepspeed import SUPPORTED

__all__ = ["Keeper", "Mark", "RunReader", "known", "mark", "marked", "offer", "require_engine"]

logger = logging.getLogger("zerostart")

#: Fills 1-D tensors with runs of the row-major order of parameters: ``(name, first element, tensor)``.
#: Collective, with the same parameters in the same order; the runs are each rank's own.
RunReader = Callable[[Sequence[tuple[str, int, torch.Tensor]]], None]

_ATTRIBUTE = "_zerostart_flat"
#: Elements that are compared at a time.
_CHUNK = 1 << 20
_PARTS = {
    "runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer": (
        "flatten_dense_tensors_aligned",
        "_update_model_bit16_weights",
    ),
    "runtime.bf16_optimizer.BF16_Optimizer": (
        "_flatten_dense_tensors_aligned",
        "_update_storage_to_flattened_tensor",
    ),
    "runtime.engine.DeepSpeedEngine": ("_broadcast_model",),
}


class Keeper(Protocol):
    """What holds the flat buffers of one loaded model."""

    def adopt(
        self,
        groups: Sequence[Sequence[torch.Tensor]],
        partitions: int,
        round_robin: bool,
        aligned: bool,
    ) -> list[torch.Tensor | None]:
        """Of each group its flat buffer, with the parameters in it as the optimizer wants them; else None."""
        ...


@dataclass(frozen=True)
class Mark:
    """What a parameter tells the engine: its name, its keeper, and how its master is read, None if it is not.

    Pickles as None: it means nothing without the buffer.
    """

    name: str
    keeper: Keeper
    reader: RunReader | None

    def __reduce__(self) -> Any:
        return _nothing, ()


def _nothing() -> None:
    return None


def require_engine() -> None:
    """Import DeepSpeed, of any version; raises EngineError if it is absent."""
    if not torch.accelerator.is_available():
        # DeepSpeed looks for CUDA tools otherwise, and its import fails or warns on a machine without.
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    try:
        import deepspeed  # noqa: F401
    except ImportError as error:
        raise EngineError(
            f"engine='deepspeed' needs DeepSpeed, which cannot be imported ({error}); "
            "install it with `pip install zerostart[deepspeed]`"
        ) from error


@functools.cache
def known() -> bool:
    """Whether the installed DeepSpeed is as this module knows it; warns once if it is not."""
    require_engine()
    import deepspeed
    from deepspeed.runtime import bf16_optimizer, engine
    from deepspeed.runtime.zero import stage_1_and_2

    parts = (stage_1_and_2.DeepSpeedZeroOptimizer, bf16_optimizer.BF16_Optimizer, engine.DeepSpeedEngine)
    absent = [
        f"{where.rpartition('.')[2]}.{name}"
        for part, (where, names) in zip(parts, _PARTS.items(), strict=True)
        for name in names
        if not hasattr(part, name)
    ]
    version = tuple(
        int("".join(filter(str.isdigit, part)) or 0) for part in deepspeed.__version__.split(".")[:3]
    )
    if SUPPORTED[0] <= version < SUPPORTED[1] and not absent:
        return True
    low, high = (".".join(map(str, v)) for v in SUPPORTED)
    logger.warning(
        "DeepSpeed %s is installed; zerostart knows ZeRO stages 1 and 2 of versions from %s to before %s%s. "
        "deepspeed.initialize will flatten the parameters itself",
        deepspeed.__version__,
        low,
        high,
        f", and misses {', '.join(absent)}" if absent else "",
    )
    return False


def mark(parameter: torch.Tensor, name: str, keeper: Keeper) -> None:
    """Have the optimizer that gets ``parameter`` take the buffer in which it lies."""
    if known():
        _enter()
        setattr(parameter, _ATTRIBUTE, Mark(name, keeper, None))


def offer(parameter: torch.Tensor, reader: RunReader) -> None:
    """Have the fp32 master of a marked parameter read by ``reader``."""
    found = marked(parameter)
    if found is not None:
        setattr(parameter, _ATTRIBUTE, replace(found, reader=reader))


def marked(parameter: torch.Tensor) -> Mark | None:
    """The mark of a parameter, if it has one."""
    return getattr(parameter, _ATTRIBUTE, None)


@functools.cache
def _enter() -> None:
    from deepspeed.runtime import bf16_optimizer, engine
    from deepspeed.runtime.zero import stage_1_and_2

    zero, bf16 = stage_1_and_2.DeepSpeedZeroOptimizer, bf16_optimizer.BF16_Optimizer
    zero.__init__ = _constructor(zero.__init__, _Zero)
    bf16.__init__ = _constructor(bf16.__init__, _BF16)
    original = engine.DeepSpeedEngine._broadcast_model

    @functools.wraps(original)
    def broadcast_model(self: Any) -> None:
        with _spared(self):
            original(self)

    engine.DeepSpeedEngine._broadcast_model = broadcast_model


def _constructor(original: Any, kind: type[_Adoption]) -> Any:
    """The constructor of an optimizer, for parameters with our mark."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def construct(self: Any, *args: Any, **kwargs: Any) -> None:
        bound = signature.bind(self, *args, **kwargs)
        bound.apply_defaults()
        adoption = kind(self, bound.arguments)
        if not adoption.concerned:
            original(self, *args, **kwargs)
            return
        with adoption.cleaned_up(), torch.no_grad():
            adoption.adopt()
            with torch.enable_grad(), adoption.overrides():
                original(self, *args, **kwargs)
            adoption.read_masters()

    return construct


class _Adoption:
    """The construction of one optimizer over parameters of which some carry a mark."""

    flatten: str

    def __init__(self, optimizer: Any, arguments: dict[str, Any]) -> None:
        from deepspeed.runtime.utils import is_optimized_parameter

        self.optimizer = optimizer
        self.arguments = arguments
        self.client = getattr(arguments["init_optimizer"], "param_groups", [])
        self.groups = [[p for p in group["params"] if is_optimized_parameter(p)] for group in self.client]
        self.flats: list[torch.Tensor | None] = [None] * len(self.groups)
        # Expert groups are flattened over other ranks, and ZenFlow in another order.
        excluded = arguments.get("has_moe_layers") or arguments.get("zenflow_config") is not None
        self.concerned = not excluded and any(marked(p) for group in self.groups for p in group)

    def rules(self) -> tuple[bool, bool]:
        """Whether the optimizer deals parameters round robin, and aligns each of them."""
        return False, False

    def parts(self) -> list[tuple[list[Any], list[int], torch.Tensor]]:
        """Of each group of the finished optimizer: parameters, their offsets, and this rank's master."""
        raise NotImplementedError

    def adopt(self) -> None:
        """Bring the parameters into the optimizer's order, in the buffers where they lie."""
        partitions = dist.get_world_size(group=self.arguments["dp_process_group"])
        keepers: list[Keeper] = []
        for found in (marked(p) for group in self.groups for p in group):
            if found is not None and found.keeper not in keepers:
                keepers.append(found.keeper)
        for keeper in keepers:
            taken = keeper.adopt(self.groups, partitions, *self.rules())
            self.flats = [new if new is not None else old for old, new in zip(self.flats, taken, strict=True)]
        left = [n for n, flat in enumerate(self.flats) if flat is None and any(map(marked, self.groups[n]))]
        if left:
            logger.warning(
                "parameter groups %s hold parameters that were not loaded by zerostart, or not as they are "
                "now: DeepSpeed flattens these groups itself",
                left,
            )

    def current(self) -> torch.Tensor | None:
        """The buffer of the group that the constructor is at, None if it has to make one."""
        number = len(self.made()) - 1
        return self.flats[number] if 0 <= number < len(self.flats) else None

    def made(self) -> list[Any]:
        """The groups that the constructor has come to."""
        raise NotImplementedError

    @contextlib.contextmanager
    def overrides(self) -> Iterator[None]:
        """Have the object take our buffers, for the time of its constructor."""
        original = getattr(self.optimizer, self.flatten)

        def flatten(tensors: Sequence[torch.Tensor], alignment: int, *args: Any, **kwargs: Any) -> Any:
            flat = self.current()
            if flat is not None and _fits(flat, tensors, kwargs.get("param_padding"), alignment):
                return flat
            return original(tensors, alignment, *args, **kwargs)

        setattr(self.optimizer, self.flatten, flatten)
        try:
            yield
        finally:
            self.optimizer.__dict__.pop(self.flatten, None)

    @contextlib.contextmanager
    def cleaned_up(self) -> Iterator[None]:
        """If the body fails, leave no hook and no buffer behind, and the client's optimizer as it was."""
        before = [list(group["params"]) for group in self.client]
        try:
            yield
        except BaseException:
            for hook in self.optimizer.__dict__.get("_grad_acc_hooks", []):
                hook.remove()
            for parameter in (p for group in self.groups for p in group):
                if getattr(parameter, "_hp_mapping", None) is not None:
                    parameter._hp_mapping = None
            for group, parameters in zip(self.client, before, strict=True):
                group["params"] = parameters
            # The traceback holds the object: what it made is not to live as long.
            self.optimizer.__dict__.clear()
            raise

    def read_masters(self) -> None:
        """Read the masters of rounded parameters into this rank's partitions."""
        wanted: dict[RunReader, list[tuple[str, int, torch.Tensor]]] = {}
        read: list[tuple[Any, int, torch.Tensor]] = []
        group = self.arguments["dp_process_group"]
        rank = dist.get_rank(group=group)
        for parameters, offsets, master in self.parts():
            if master.dtype != torch.float32:
                continue
            begin = rank * master.numel()
            for parameter, offset in zip(parameters, offsets, strict=True):
                found = marked(parameter)
                if found is None or found.reader is None or parameter.dtype == torch.float32:
                    continue
                low = min(max(begin - offset, 0), parameter.numel())
                high = max(low, min(begin + master.numel() - offset, parameter.numel()))
                at = max(offset + low - begin, 0) if low < high else 0
                share = master.detach()[at : at + high - low]
                wanted.setdefault(found.reader, []).append((found.name, low, share))
                read.append((parameter, low, share))
        for reader, runs in wanted.items():
            reader(runs)
        changed = []
        for parameter, low, share in read:
            found = marked(parameter)
            assert found is not None, "it was marked above"
            setattr(parameter, _ATTRIBUTE, replace(found, reader=None))  # what is behind the reader can go
            if _follow(share, parameter.detach().view(-1)[low : low + share.numel()]):
                changed.append(found.name)
        if changed:
            logger.info(
                "%d parameters were changed between the load and the engine's start (%s%s): their fp32 "
                "masters start from what they hold now",
                len(changed),
                ", ".join(changed[:3]),
                ", ..." if len(changed) > 3 else "",
            )


class _Zero(_Adoption):
    """``DeepSpeedZeroOptimizer``."""

    flatten = "flatten_dense_tensors_aligned"

    def rules(self) -> tuple[bool, bool]:
        return bool(self.arguments["round_robin_gradients"]), bool(self.arguments["parameter_alignment"])

    def made(self) -> list[Any]:
        return list(self.optimizer.__dict__.get("bit16_groups", ()))

    def parts(self) -> list[tuple[list[Any], list[int], torch.Tensor]]:
        o = self.optimizer
        return list(
            zip(
                o.round_robin_bit16_groups,
                o.round_robin_bit16_offsets,
                o.single_partition_of_fp32_groups,
                strict=True,
            )
        )

    @contextlib.contextmanager
    def overrides(self) -> Iterator[None]:
        """A group that is flat already needs no memory: it does not go by way of the CPU."""
        from deepspeed.accelerator import get_accelerator

        accelerator = get_accelerator()
        original = accelerator.available_memory

        def available_memory(*args: Any, **kwargs: Any) -> Any:
            return original(*args, **kwargs) if self.current() is None else sys.maxsize

        accelerator.available_memory = available_memory
        try:
            with super().overrides():
                yield
        finally:
            del accelerator.available_memory


class _BF16(_Adoption):
    """``BF16_Optimizer``: stage 1 in bf16 with gradients accumulated in fp32."""

    flatten = "_flatten_dense_tensors_aligned"

    def made(self) -> list[Any]:
        return list(self.optimizer.__dict__.get("bf16_groups", ()))

    def parts(self) -> list[tuple[list[Any], list[int], torch.Tensor]]:
        found = []
        for group, master in zip(
            self.optimizer.bf16_groups, self.optimizer.fp32_groups_flat_partition, strict=True
        ):
            offsets, end = [], 0
            for parameter in group:
                offsets.append(end)
                end += parameter.numel()
            found.append((group, offsets, master))
        return found


def _fits(
    flat: torch.Tensor, tensors: Sequence[torch.Tensor], padding: Sequence[int] | None, alignment: int
) -> bool:
    """Whether ``flat`` is what flattening ``tensors`` would give, in size and in the place of each."""
    end = 0
    for tensor, pad in zip(tensors, padding or [0] * len(tensors), strict=True):
        if tensor.data_ptr() != flat.data_ptr() + end * flat.element_size() or tensor.dtype != flat.dtype:
            return False
        end += tensor.numel() + pad
    return end + -end % alignment == flat.numel()


def _follow(master: torch.Tensor, held: torch.Tensor) -> bool:
    """Make a master that was read follow its parameter where that has been changed since; whether it was."""
    found = False
    for start in range(0, master.numel(), _CHUNK):
        high = master[start : start + _CHUNK]
        low = held[start : start + _CHUNK].to(high.device)
        other = high.to(low.dtype) != low
        if bool(other.any()):
            high.copy_(torch.where(other, low.to(high.dtype), high))
            found = True
    return found


@contextlib.contextmanager
def _spared(engine: Any) -> Iterator[None]:
    """Have DeepSpeed not broadcast the parameters that are the same on all ranks.

    ``_broadcast_model`` passes over parameters with an attribute ``ds_optim_param``.
    """
    spared = []
    if engine.dist_backend is not None:
        parameters = [p for p in engine.module.parameters() if marked(p)]
        spared = [p for p in _alike(parameters, engine.seq_data_parallel_group) if not _own(p)]
    for parameter in spared:
        parameter.ds_optim_param = True
    try:
        yield
    finally:
        for parameter in spared:
            del parameter.ds_optim_param


def _own(parameter: Any) -> bool:
    return hasattr(parameter, "ds_optim_param") or hasattr(parameter, "allreduce")


def _alike(parameters: Sequence[torch.Tensor], group: Any) -> list[Any]:
    """Those that hold the same on all ranks of the group: collective, with one small message.

    What each rank did to the model since the load cannot be known from outside, so the bits of each parameter
    are summed up, at the speed of memory.
    """
    if not parameters:
        return []
    own = torch.stack([_sum(parameter.detach()) for parameter in parameters])
    extremes = torch.stack([own, ~own])  # ~ reverses the order: the least of it is the greatest.
    dist.all_reduce(extremes, op=dist.ReduceOp.MIN, group=group)
    same = (extremes[0] == ~extremes[1]).tolist()
    return [parameter for parameter, alike in zip(parameters, same, strict=True) if alike]


def _sum(tensor: torch.Tensor) -> torch.Tensor:
    """The sum of a tensor's bits as 64-bit words, wherever in memory it begins."""
    words = tensor.contiguous().view(-1).view(torch.uint8)
    head = min(-words.storage_offset() % 8, words.numel())
    body = (words.numel() - head) // 8 * 8
    ends = torch.cat([words[:head], words[head + body :]])
    return words[head : head + body].view(torch.int64).sum() + ends.to(torch.int64).sum()
