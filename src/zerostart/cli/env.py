"""``zerostart env``: installed and known versions, and whether the libraries fit."""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import importlib.metadata
import json
import platform
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.table import Table

    from zerostart.upstream.guard import Use

#: Beside the libraries that the registry knows versions of: what users combine zerostart with.
_OTHERS = ("huggingface-hub", "safetensors", "numpy", "trl", "datasets")
_GPUS = Path("/proc/driver/nvidia/gpus")


def command(
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
    check: Annotated[
        bool,
        typer.Option(
            "--check",
            help="Import the libraries and compare their code with what is known; exit 1 if it differs.",
        ),
    ] = False,
) -> None:
    """Show versions and devices; with --check, whether they work."""
    with _uncollected() if check else contextlib.nullcontext():
        found = _found(check)
    if as_json:
        print(json.dumps(found, indent=1))
    else:
        _print(found, check)
    if any(use["misfit"] for use in found["uses"]):
        raise typer.Exit(1)


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    # On the way out the interpreter collects once more, but for what is frozen.
    atexit.register(gc.freeze)
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def _found(check: bool) -> dict[str, Any]:
    from zerostart.upstream.guard import declared_uses
    from zerostart.upstream.versions import LIBRARIES

    # By metadata: an import of all libraries takes seconds, and may fail.
    installed = {library.name: library.installed() for library in LIBRARIES}
    uses = [use for use in declared_uses() if installed[use.library.name]] if check else []
    return {
        "installed": {"zerostart": _version("zerostart"), **installed}
        | {name: _version(name) for name in _OTHERS},
        "supported": {
            library.name: {
                "range": library.specifier,
                "known": None if (version := installed[library.name]) is None else library.knows(version),
                "extra": library.extra,
            }
            for library in LIBRARIES
        },
        "uses": [
            {"owner": use.owner, "names": use.names, "why": use.why, "misfit": _misfit(use)} for use in uses
        ],
        "devices": _devices(check),
        "python": platform.python_version(),
        "platform": platform.platform(),
    }


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _misfit(use: Use) -> str:
    from zerostart.upstream.versions import DEEPSPEED

    with contextlib.redirect_stdout(sys.stderr):  # DeepSpeed says there what it found.
        try:
            if use.library is DEEPSPEED:
                from zerostart.upstream.deepspeed.zero3_partitions import import_deepspeed

                import_deepspeed()
            importlib.import_module(use.library.name)
            return use.misfit()
        except Exception as error:  # An import may fail with anything; it is what is asked for.
            return f"{use.library.name} cannot be imported: {error}"


def _devices(check: bool) -> dict[str, object]:
    from zerostart.distributed.machine import available_memory, cores

    usable = None
    if check:
        import torch

        usable = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
    return {
        "cores": cores(),
        "available_memory_bytes": available_memory(),
        "accelerators": [_model(gpu) for gpu in sorted(_GPUS.glob("*/information"))],
        "usable": usable,
    }


def _model(information: Path) -> str:
    """The name in a file of NVIDIA's driver."""
    lines = information.read_text(encoding="utf-8", errors="replace").splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("Model:")), "unknown")


def _verdict(found: dict[str, Any]) -> str:
    versions = {name: version for name, version in found["installed"].items() if version is not None}
    misfits = [use for use in found["uses"] if use["misfit"]]
    compared = len(found["uses"])
    if not misfits:
        unknown = [name for name, supported in found["supported"].items() if supported["known"] is False]
        news = ", ".join(f"{name} {versions[name]}" for name in unknown)
        untried = f", though it was not tried with {news}" if news else ""
        return f"zerostart works here: all {compared} places that it builds on are as known{untried}"
    libraries = ", ".join(
        f"{name} {versions[name]}" for name in dict.fromkeys(_library(use) for use in misfits)
    )
    return f"zerostart does not fit {libraries}: {len(misfits)} of {compared} places differ, named at the end"


def _print(found: dict[str, Any], check: bool) -> None:
    from rich.console import Console
    from rich.filesize import decimal
    from rich.text import Text

    console = Console(highlight=False)
    devices = found["devices"]
    accelerators = ", ".join(devices["accelerators"]) or "no NVIDIA driver"
    if devices["usable"] is not None:
        accelerators += f" (torch can use {devices['usable']})"
    memory = f"{decimal(devices['available_memory_bytes'])} of memory left"
    if check:
        wrong = any(use["misfit"] for use in found["uses"])
        console.print(Text(_verdict(found), style="red" if wrong else "green"))
    console.print(Text(f"Python {found['python']}, {found['platform']}"))
    console.print(Text(f"{devices['cores']:g} cores, {memory}, {accelerators}"))
    console.print(_libraries(found))
    for use in found["uses"]:
        if use["misfit"]:
            console.print(Text(f"{use['misfit']} ({use['why']})", style="red"))


def _library(use: dict[str, Any]) -> str:
    owner: str = use["owner"]
    return owner.replace(":", ".").partition(".")[0]


def _libraries(found: dict[str, Any]) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table("installed", "", "known", "", box=None, padding=(0, 2, 0, 0))
    table.add_row("zerostart", found["installed"]["zerostart"])
    for name, supported in found["supported"].items():
        version = found["installed"][name]
        remark = "" if supported["known"] else "not a version that zerostart knows"
        if version is None:
            remark = f"pip install 'zerostart[{supported['extra']}]'" if supported["extra"] else "missing"
        table.add_row(name, version or "-", supported["range"], Text(remark))
    for name in _OTHERS:
        if found["installed"][name]:
            table.add_row(name, found["installed"][name])
    return table
