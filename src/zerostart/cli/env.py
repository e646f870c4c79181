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
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from zerostart.distributed.machine import no_garbage_collection

if TYPE_CHECKING:
    from rich.table import Table

    from zerostart.upstream.guard import Use

#: Further libraries that users combine with zerostart.
_FURTHER_LIBRARIES = ("huggingface-hub", "safetensors", "numpy", "trl", "datasets")
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
    prepare: Annotated[
        bool, typer.Option("--prepare", help="Compile DeepSpeed's operators, which the first load needs.")
    ] = False,
) -> None:
    """Show versions and devices; with --check, whether they work."""
    if prepare:
        from zerostart.upstream.deepspeed.zero3_partitions import OPERATIONS, load_operations

        with contextlib.redirect_stdout(sys.stderr):  # DeepSpeed prints its findings
            load_operations(OPERATIONS)
    # Skip garbage collection, also at exit: this process only imports.
    atexit.register(gc.freeze)
    with no_garbage_collection():
        facts = _collect(check)
    if as_json:
        print(json.dumps(facts, indent=1))
    else:
        _print(facts, check)
    if any(use["misfit"] for use in facts["uses"]):
        raise typer.Exit(1)


def _collect(check: bool) -> dict[str, Any]:
    from zerostart.upstream.guard import declared_uses
    from zerostart.upstream.versions import LIBRARIES

    # From metadata, since importing all libraries takes seconds and may fail.
    installed = {library.name: library.installed() for library in LIBRARIES}
    uses = [use for use in declared_uses() if installed[use.library.name]] if check else []
    return {
        "installed": {"zerostart": _installed_version("zerostart"), **installed}
        | {name: _installed_version(name) for name in _FURTHER_LIBRARIES},
        "supported": {
            library.name: {
                "range": library.specifier,
                "known": None if (version := installed[library.name]) is None else library.knows(version),
                "extra": library.extra,
            }
            for library in LIBRARIES
        },
        "uses": [
            {"owner": use.owner, "names": use.names, "why": use.why, "misfit": _find_misfit(use)}
            for use in uses
        ],
        "devices": _list_devices(check),
        "python": platform.python_version(),
        "platform": platform.platform(),
    }


def _installed_version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _find_misfit(use: Use) -> str:
    from zerostart.upstream.versions import DEEPSPEED

    with contextlib.redirect_stdout(sys.stderr):  # DeepSpeed prints its findings
        try:
            if use.library is DEEPSPEED:
                from zerostart.upstream.deepspeed.zero3_partitions import import_deepspeed

                import_deepspeed()
            importlib.import_module(use.library.name)
            return use.find_misfit()
        except Exception as error:  # an import may raise anything, which is the result
            return f"{use.library.name} cannot be imported: {error}"


def _list_devices(check: bool) -> dict[str, object]:
    from zerostart.distributed.machine import available_memory, cores

    usable = None
    if check:
        import torch

        usable = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
    return {
        "cores": cores(),
        "available_memory_bytes": available_memory(),
        "accelerators": [_read_gpu_name(gpu) for gpu in sorted(_GPUS.glob("*/information"))],
        "usable": usable,
    }


def _read_gpu_name(information: Path) -> str:
    """Return the GPU's name in a file of NVIDIA's driver."""
    lines = information.read_text(encoding="utf-8", errors="replace").splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("Model:")), "unknown")


def _summarise(facts: dict[str, Any]) -> str:
    misfits = [use for use in facts["uses"] if use["misfit"]]
    compared = len(facts["uses"])
    if not misfits:
        return f"zerostart works here: all {compared} private parts that it uses are as expected"
    names = dict.fromkeys(use["owner"].replace(":", ".").partition(".")[0] for use in misfits)
    libraries = ", ".join(f"{name} {facts['installed'][name]}" for name in names)
    return f"zerostart does not fit {libraries}: {len(misfits)} of {compared} parts differ, listed at the end"


def _print(facts: dict[str, Any], check: bool) -> None:
    from rich.console import Console
    from rich.filesize import decimal

    devices = facts["devices"]
    accelerators = ", ".join(devices["accelerators"]) or "no NVIDIA driver"
    if devices["usable"] is not None:
        accelerators += f" (torch can use {devices['usable']})"
    memory = f"{decimal(devices['available_memory_bytes'])} of memory left"
    if check:
        typer.secho(_summarise(facts), bold=True)
    typer.echo(f"Python {facts['python']}, {facts['platform']}")
    typer.echo(f"{devices['cores']:g} cores, {memory}, {accelerators}")
    Console(highlight=False).print(_make_table(facts))
    for use in facts["uses"]:
        if use["misfit"]:
            typer.secho(f"{use['misfit']} ({use['why']})", fg="red")


def _make_table(facts: dict[str, Any]) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table("installed", "", "known", "", box=None, padding=(0, 2, 0, 0))
    table.add_row("zerostart", facts["installed"]["zerostart"])
    for name, supported in facts["supported"].items():
        version = facts["installed"][name]
        remark = "" if supported["known"] else "not a version that zerostart knows"
        if version is None:
            remark = f"pip install 'zerostart[{supported['extra']}]'" if supported["extra"] else "missing"
        table.add_row(name, version or "-", supported["range"], Text(remark))
    for name in _FURTHER_LIBRARIES:
        if facts["installed"][name]:
            table.add_row(name, facts["installed"][name])
    return table
