"""Options that several commands share: the arguments of a load or a forecast, by their description."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import typer

from zerostart.loading.arguments import config_of, dtype_of, options

Command = TypeVar("Command", bound=Callable[..., None])


@dataclass(frozen=True)
class _Typed:
    """What is typed for an option; a ``number`` may have a ``least`` and a ``most``."""

    kind: Literal["text", "number", "switch", "size", "rate", "dtype", "json"] = "text"
    least: int | None = None
    most: int | None = None


_SIZE, _RATE, _SHARERS = _Typed("size"), _Typed("rate"), _Typed("number", least=1)
#: By the arguments' names; any other is text. A size is like 80GB, a rate like 7GB/s, json a file's path.
_TYPED = {
    "zero_stage": _Typed("number", least=0, most=3),
    "engine_config": _Typed("json"),
    "expert_parallel": _SHARERS,
    "tensor_parallel": _SHARERS,
    "sequence_parallel": _SHARERS,
    "memory_limit": _SIZE,
    "chunk_size": _SIZE,
    "dtype": _Typed("dtype"),
    "exchange": _Typed("switch"),
    "trust_remote_code": _Typed("switch"),
    "device_memory": _SIZE,
    "host_memory": _SIZE,
    "storage_rate": _RATE,
    "interconnect_rate": _RATE,
}

SourceArgument = Annotated[
    str,
    typer.Argument(metavar="SOURCE", help="A checkpoint: directory, file, URL, or cached hub id."),
]


Download = Annotated[bool, typer.Option("--download", help="Fetch a hub id that is not in the local cache.")]


def fetched(source: str, download: bool) -> str:
    """Download ``source`` if that was asked for, and return it; raises CheckpointNotFoundError."""
    if download:
        from zerostart.checkpoint.source import download as fetch

        fetch(source)
    return source


def takes(*kinds: type) -> Callable[[Command], Command]:
    """Decorator: give a command the options of the arguments in ``kinds`` in place of its ``**given``.

    They come before the command's own options that may be left out.
    """

    def extend(command: Command) -> Command:
        # Annotations as objects, and not as the text that they are in the file: typer reads what is in them.
        own = list(inspect.signature(command, eval_str=True).parameters.values())
        # The last parameter is ``**given``, which typer knows nothing of.
        required = [p for p in own[:-1] if p.default is p.empty]
        optional = [p for p in own[:-1] if p.default is not p.empty]
        shared = [_parameter(*described) for described in options(*kinds)]
        every = [p.replace(kind=p.KEYWORD_ONLY) for p in (*required, *shared, *optional)]
        command.__signature__ = inspect.Signature(every)  # type: ignore[attr-defined]
        command.__annotations__ = {p.name: p.annotation for p in every} | {"return": None}
        return command

    return extend


def _parameter(name: str, default: Any, words: str) -> inspect.Parameter:
    """One option, as typer reads a command's signature."""
    word, option = name.replace("_", "-"), _TYPED.get(name, _Typed())
    # A switch's default is told by its own words, for ``no-`` and its name would be said twice.
    shown = default is not None and option.kind != "switch"
    more: dict[str, Any] = {"help": words, "show_default": shown}
    kind: Any = str
    if option.kind == "number":
        kind, more = int, {**more, "min": option.least, "max": option.most, "metavar": "N"}
    elif option.kind == "switch":
        kind = bool
    elif option.kind == "json":
        kind, more = Path, {**more, "exists": True, "dir_okay": False, "metavar": "FILE"}
    elif option.kind in ("size", "rate"):
        more["metavar"] = option.kind.upper()
    flag = f"--{word}/--no-{word}" if option.kind == "switch" else f"--{word}"
    wanted: object = kind if default is not None else kind | None
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=default,
        annotation=Annotated[wanted, typer.Option(flag, **more)],
    )


def values_of(given: Mapping[str, Any]) -> dict[str, Any]:
    """Convert typed options to JSON data: sizes to bytes, configuration files to their content.

    Raises ConfigError for a dtype or a configuration that is none, and a usage error for a size.
    """
    read: dict[str, Callable[[Any], object]] = {
        "size": _size_of,
        "rate": lambda text: _size_of(text.removesuffix("/s")),
        "json": config_of,
        "dtype": lambda name: str(dtype_of(name)).removeprefix("torch."),
    }
    kinds = {name: _TYPED.get(name, _Typed()).kind for name in given}
    return {
        name: value if value is None or kinds[name] not in read else read[kinds[name]](value)
        for name, value in given.items()
    }


def _size_of(text: str) -> int:
    from zerostart.checkpoint.write.shards import parse_size
    from zerostart.errors import ConfigError

    try:
        return parse_size(text)
    except ConfigError as error:
        raise typer.BadParameter(str(error)) from error
