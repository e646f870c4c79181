"""The arguments of a load, of ``enabled`` and of a forecast: each is described here, once.

The verbs of the front door spell them out in their signatures, which ``tests/contract`` holds equal to these
fields; all else goes by the fields: what a verb hands on, the options of the command line, the defaults of a
training configuration. What the arguments mean is told in the documentation of the verbs.

Imports nothing that is heavy, for the command line.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Sequence

    import torch

    from zerostart.checkpoint.source import Files
    from zerostart.models import ModelLike as ModelLike

    Source: TypeAlias = str | os.PathLike[str] | Files | Mapping[str, torch.Tensor] | None
    Converter: TypeAlias = (
        Callable[[dict[str, torch.Tensor]], Mapping[str, torch.Tensor]] | Sequence[object] | None
    )

__all__ = ["EnabledArguments", "ForecastArguments", "LoadArguments", "Option", "keys", "options", "taken"]

Value = TypeVar("Value")
Fields = TypeVar("Fields")


@dataclass(frozen=True)
class Option:
    """How the command line takes an argument, and what is typed there.

    A ``size`` is like 80GB, a ``rate`` like 7GB/s, and ``json`` the path of a JSON file. A ``number`` may
    have a ``least`` and a ``most``.
    """

    help: str
    kind: Literal["text", "number", "switch", "size", "rate", "dtype", "json"] = "text"
    least: int | None = None
    most: int | None = None


def _argument(
    default: Value, option: Option | None = None, *, key: str | None = None, planned: bool = True
) -> Value:
    """A field, with its ``option`` of the command line and its ``key`` in a training configuration, if any.

    ``plan`` takes it if it is ``planned``.
    """
    return field(default=default, metadata={"option": option, "key": key, "planned": planned})


@dataclass(frozen=True, kw_only=True)
class EnabledArguments:
    """The arguments of ``zerostart.enabled``, as documented there."""

    engine: str | None = _argument(
        None, Option("deepspeed or fsdp2; default: what the script is set up for.")
    )
    zero_stage: int | None = _argument(
        None,
        Option("With --engine, 3 shards parameters, 0 to 2 leave them whole.", "number", least=0, most=3),
    )
    engine_config: Mapping[str, object] | None = _argument(
        None, Option("A JSON file: DeepSpeed's configuration, or what is set for fsdp2.", "json")
    )
    expert_parallel: int = _argument(
        1, Option("Ranks that share experts.", "number", least=1), key="engine.expert_parallel"
    )
    tensor_parallel: int = _argument(1, Option("Ranks that share a tensor.", "number", least=1))
    sequence_parallel: int = _argument(
        1, Option("Ranks that share each sequence.", "number", least=1), key="engine.sequence_parallel"
    )
    memory_limit: int | None = _argument(None, Option("Most staging buffers of a rank.", "size"))
    chunk_size: int | None = _argument(None, Option("Most bytes of one read.", "size"))
    progress: bool = _argument(True, planned=False)
    fp32_masters: bool = _argument(True, key="model.fp32_masters", planned=False)


@dataclass(frozen=True, kw_only=True)
class LoadArguments(EnabledArguments):
    """The arguments of ``zerostart.load``, as documented there."""

    source: Source = field(kw_only=False, metadata={"key": "model.source"})
    model: ModelLike = None
    engine: str = _argument("deepspeed", Option("deepspeed or fsdp2."), key="engine.name")
    zero_stage: int = _argument(
        3, Option("ZeRO stage; 0: whole on every rank.", "number", least=0, most=3), key="engine.zero_stage"
    )
    dtype: torch.dtype | None = _argument(  # noqa: RUF009  # it makes a field
        None, Option("Floating dtype, such as bfloat16; default: the checkpoint's own.", "dtype")
    )
    converter: Converter = None
    strict: bool = _argument(True, key="model.strict", planned=False)
    exchange: bool | None = _argument(
        None,
        Option(
            "Read what several ranks want once and exchange it, or on each; default: what is faster.",
            "switch",
        ),
    )


@dataclass(frozen=True, kw_only=True)
class ForecastArguments:
    """The arguments of a forecast beside those of a load; see ``zerostart.plan``."""

    device_memory: int | None = _argument(
        None,
        Option(
            "Memory of one accelerator, such as 80GB; plans for accelerators also where there is none.",
            "size",
        ),
    )
    host_memory: int | None = _argument(
        None, Option("Memory of one machine, which up to 8 ranks share.", "size")
    )
    storage_rate: float | None = _argument(
        None, Option("What storage gives to one machine, such as 7GB/s.", "rate")
    )
    interconnect_rate: float | None = _argument(
        None, Option("What one rank exchanges with others, such as 200GB/s.", "rate")
    )
    optimizer: str | None = _argument(
        None, Option("adamw, fused_adamw, adam, momentum or sgd; default: as configured, else adamw.")
    )


def options(*kinds: type) -> Iterator[tuple[str, Any, Option]]:
    """Name, default and option of each argument in ``kinds`` that the command line takes."""
    for kind in kinds:
        for described in dataclasses.fields(kind):
            if (option := described.metadata.get("option")) is not None:
                yield described.name, described.default, option


def keys(kind: type) -> dict[str, str]:
    """The arguments in ``kind`` that a training configuration has, and the dotted key of each."""
    found = {described.name: described.metadata.get("key") for described in dataclasses.fields(kind)}
    return {name: key for name, key in found.items() if key is not None}


def taken(kind: type[Fields], given: Mapping[str, Any]) -> Fields:
    """A ``kind`` out of a verb's arguments, of which some may be for others; those not given are defaults."""
    names = [described.name for described in dataclasses.fields(kind)]  # type: ignore[arg-type]
    return kind(**{name: given[name] for name in names if name in given})
