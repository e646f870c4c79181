"""Options that several commands share: the settings of a load and of a forecast."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import typer

Command = TypeVar("Command", bound=Callable[..., None])


@dataclass(frozen=True)
class Option:
    """One option of a command; sizes are like 80GB, and rates like 7GB/s."""

    name: str
    help: str
    kind: Literal["text", "number", "switch", "size", "rate", "dtype", "json"] = "text"
    default: Any = None
    minimum: int | None = None
    maximum: int | None = None


ENABLE_OPTIONS = (
    Option("engine", "deepspeed or fsdp2; default: what the script is set up for."),
    Option(
        "zero_stage",
        "With --engine: 3 shards parameters, 0 to 2 keep them whole.",
        "number",
        minimum=0,
        maximum=3,
    ),
    Option("engine_config", "A JSON file: DeepSpeed's configuration, or the settings of FSDP2.", "json"),
    Option("expert_parallel", "Ranks that share experts.", "number", 1, minimum=1),
    Option("tensor_parallel", "Ranks that share a tensor.", "number", 1, minimum=1),
    Option("sequence_parallel", "Ranks that share each sequence.", "number", 1, minimum=1),
    Option("memory_limit", "Maximum size of a rank's staging buffers.", "size"),
    Option("chunk_size", "Maximum size of one read.", "size"),
)
LOAD_OPTIONS = (
    Option("engine", "deepspeed or fsdp2; default: the launcher's, else the one that is installed."),
    replace(ENABLE_OPTIONS[1], default=3, help="ZeRO stage; 0: whole on every rank."),
    *ENABLE_OPTIONS[2:],
    Option("dtype", "Floating dtype, such as bfloat16; default: the checkpoint's own.", "dtype"),
    Option(
        "exchange",
        "Read shared bytes once and exchange them, or on each rank; default: the faster way.",
        "switch",
    ),
    Option("trust_remote_code", "Run model code from the checkpoint.", "switch", False),
)
FORECAST_OPTIONS = (
    Option(
        "device_memory",
        "Memory of one accelerator, such as 80GB; also on machines without one.",
        "size",
    ),
    Option("host_memory", "Memory of one machine, shared by up to 8 ranks.", "size"),
    Option("storage_rate", "Bandwidth of the storage to one machine, such as 7GB/s.", "rate"),
    Option("interconnect_rate", "Bandwidth between ranks, for each rank, such as 200GB/s.", "rate"),
    Option("optimizer", "adamw, fused_adamw, adam, momentum or sgd; default: as configured, else adamw."),
)
_KINDS = {option.name: option.kind for option in (*LOAD_OPTIONS, *FORECAST_OPTIONS)}

#: Types that weights are written in.
WeightDtype = Literal["float32", "bfloat16", "float16"]
SourceArgument = Annotated[
    str,
    typer.Argument(metavar="SOURCE", help="A checkpoint: directory, file, URL, or cached hub id."),
]
Download = Annotated[bool, typer.Option("--download", help="Fetch a hub id that is not in the local cache.")]


def download_if(source: str, download: bool) -> str:
    """Download ``source`` if ``download``, and return it. Raises CheckpointNotFoundError."""
    if download:
        from zerostart.checkpoint.source import download as fetch

        fetch(source)
    return source


def add_options(*options: Option) -> Callable[[Command], Command]:
    """Replace the ``**values`` of a command by ``options``, before its own optional ones."""

    def extend(command: Command) -> Command:
        # Evaluate the annotations, which typer reads.
        own = list(inspect.signature(command, eval_str=True).parameters.values())
        # The last parameter is ``**values``.
        required = [p for p in own[:-1] if p.default is p.empty]
        optional = [p for p in own[:-1] if p.default is not p.empty]
        every = [
            p.replace(kind=p.KEYWORD_ONLY) for p in (*required, *map(_make_parameter, options), *optional)
        ]
        command.__signature__ = inspect.Signature(every)  # type: ignore[attr-defined]
        command.__annotations__ = {p.name: p.annotation for p in every} | {"return": None}
        return command

    return extend


def _make_parameter(option: Option) -> inspect.Parameter:
    """Describe one option as typer reads a command's signature."""
    flag = f"--{option.name.replace('_', '-')}"
    more: dict[str, Any] = {"help": option.help, "show_default": option.default is not None}
    kind: Any = str
    if option.kind == "number":
        kind, more = int, {**more, "min": option.minimum, "max": option.maximum, "metavar": "N"}
    elif option.kind == "switch":
        kind, flag, more["show_default"] = bool, f"{flag}/--no-{flag[2:]}", False
    elif option.kind == "json":
        kind, more = Path, {**more, "exists": True, "dir_okay": False, "metavar": "FILE"}
    elif option.kind in ("size", "rate"):
        more["metavar"] = option.kind.upper()
    return inspect.Parameter(
        option.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=option.default,
        annotation=Annotated[kind if option.default is not None else kind | None, typer.Option(flag, **more)],
    )


def parse_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Convert typed options to JSON data: sizes to bytes, configuration files to their content.

    Raises ConfigError for a wrong dtype or configuration, and a usage error for a wrong size.
    """
    return {
        name: value if value is None else parse_value(_KINDS[name], value) for name, value in values.items()
    }


def parse_value(kind: str, value: Any) -> Any:
    """Convert the value of one option; see ``parse_values``."""
    if kind in ("size", "rate"):
        from zerostart.checkpoint.write.shards import parse_size
        from zerostart.errors import ConfigError

        try:
            return parse_size(value.removesuffix("/s"))
        except ConfigError as error:
            raise typer.BadParameter(str(error)) from error
    if kind in ("json", "dtype"):
        from zerostart.loading.request import config_of, dtype_of

        return config_of(value) if kind == "json" else str(dtype_of(value)).removeprefix("torch.")
    return value
