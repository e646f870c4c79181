"""``zerostart load``: rehearse a load on local ranks.

Its ranks run ``python -m zerostart.cli.load OPTIONS-AS-JSON``.
"""

from __future__ import annotations

import json as json_module
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from zerostart.checkpoint.strict_json import dump_json
from zerostart.cli.launch import join_group, leave_group, run_local_ranks, worker_main
from zerostart.cli.options import (
    LOAD_OPTIONS,
    Download,
    SourceArgument,
    add_options,
    download_if,
    parse_values,
)
from zerostart.errors import ConfigError, ZerostartError

if TYPE_CHECKING:
    import torch
    from torch import nn


@add_options(*LOAD_OPTIONS)
def command(
    source: SourceArgument,
    nproc: Annotated[
        int, typer.Option("--nproc", metavar="N", min=1, help="Local ranks.", show_default=False)
    ],
    verify: Annotated[
        bool, typer.Option("--verify", help="Compare every element with an unsharded load.")
    ] = False,
    json: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the result to this file.")
    ] = None,
    download: Download = False,
    **values: Any,
) -> None:
    """Rehearse a load on this machine: time it, measure it, verify it.

    All ranks load with the chosen engine. --verify compares every element with an unsharded load.
    """
    options = {"source": download_if(source, download), **parse_values(values), "verify": verify}
    ranks = run_local_ranks("zerostart.cli.load", [json_module.dumps(options)], nproc)
    result = _summarise(ranks)
    if json is not None:
        json.write_text(dump_json(result, indent=2) + "\n", encoding="utf-8")
    _print(result, str(ranks[0]["text"]))
    if result["verified"] is False:
        wrong = ranks[0]["wrong"]
        raise ZerostartError(
            f"{len(wrong)} tensors differ from the unsharded load: {', '.join(wrong[:5])}; this is a "
            "bug in zerostart"
        )


def _summarise(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the content of the JSON file."""
    columns = ("rank", "seconds", "read_bytes", "peak_host_bytes", "peak_device_bytes")
    first = ranks[0]
    return {
        "ranks": [{key: rank[key] for key in columns} for rank in ranks],
        "missing": first["missing"],
        "unexpected": first["unexpected"],
        "mismatched": first["mismatched"],
        "verified": first["verified"],
        "seconds": max(rank["seconds"]["total"] for rank in ranks),
        "forecast": first["forecast"],
    }


def _print(result: dict[str, Any], text: str) -> None:
    from rich.console import Console

    from zerostart.cli.terminal import say

    console = Console()
    say(console, text)
    if len(result["ranks"]) > 1:
        say(console, f"All {len(result['ranks'])} ranks: {result['seconds']:.2f} s")
    if result["verified"]:
        say(console, "Verified: every element equals the unsharded load")


def _run(argv: list[str]) -> dict[str, object]:
    """Load on one rank, and return its result."""
    import dataclasses

    import zerostart
    from zerostart import models
    from zerostart.checkpoint.source import open_catalog
    from zerostart.loading.request import Request

    options = json_module.loads(argv[0])
    verify = options.pop("verify")
    # Import the model's library first, as a training script would, so that only the load is timed.
    request = Request(**options).with_engine()
    request.resolve(int(os.environ["WORLD_SIZE"])).import_library()
    catalog = open_catalog(options["source"])
    models.import_code(None, catalog.root, {name: one.shape for name, one in catalog.weights.items()})
    forecast = _make_forecast(options)
    join_group()
    model = zerostart.load(**options)
    report = zerostart.report(model)
    wrong = _find_differences(model, str(options["source"]), request.dtype) if verify else None
    leave_group()
    facts = dataclasses.asdict(report)
    return {
        **facts,
        "seconds": report.phases,
        "text": str(report),
        "verified": None if wrong is None else not wrong,
        "wrong": wrong or [],
        "forecast": forecast,
    }


def _make_forecast(options: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the forecast of each rank; on rank 0 only.

    Call it before the load, which changes the page cache.
    """
    import zerostart

    # Not collective: the other ranks wait for rank 0 when they join the group.
    if int(os.environ["RANK"]):
        return []
    try:
        plan = zerostart.plan(**options, world_size=int(os.environ["WORLD_SIZE"]))
    except ZerostartError:
        return []  # the load will raise the same error on every rank
    columns = ("rank", "read_bytes", "read_ops", "peak_host_bytes", "peak_device_bytes", "read_seconds")
    return [{key: getattr(rank, key) for key in columns} for rank in plan.ranks]


def _find_differences(model: nn.Module, source: str, dtype: torch.dtype | None) -> list[str]:
    import torch.distributed as dist

    import zerostart
    from zerostart.checkpoint.settings import whole_copy
    from zerostart.checkpoint.source import open_catalog
    from zerostart.models import library_of

    loading = library_of(model).own_loading(type(model))
    catalog = open_catalog(source)
    root = catalog.root
    if loading is None or root is None:
        raise ConfigError(
            f"--verify compares with the model's library, but {type(model).__name__} "
            "belongs to no known library"
        )
    reference: dict[str, torch.Tensor] = {}
    buffers: dict[str, torch.Tensor] = {}
    # Only rank 0 loads the whole model to compare with.
    if dist.get_rank() == 0:
        with whole_copy(catalog) as folder:
            plain = loading(folder, dtype)
        reference, buffers = plain.state_dict(), dict(plain.named_buffers())
    wrong = []
    loaded = set()
    # All ranks gather each tensor; ``reference`` is empty except on rank 0, whose result counts.
    for name, tensor in zerostart.full_tensors(model):
        if tensor is not None:
            loaded.add(name)
            if name not in reference or not _is_same(tensor, reference[name]):
                wrong.append(name)
    # Compare buffers that are in no state dict, too; they are computed while the model is built.
    own = {name: buffer.cpu() for name, buffer in model.named_buffers()}
    wrong += [name for name, buffer in buffers.items() if name not in own or not _is_same(own[name], buffer)]
    return sorted({*wrong, *(reference.keys() - loaded)})


def _is_same(*pair: torch.Tensor) -> bool:
    """Return True if dtypes, shapes and bits are equal."""
    import torch

    a, b = (tensor.detach().contiguous().reshape(-1).view(torch.uint8) for tensor in pair)
    return pair[0].dtype == pair[1].dtype and pair[0].shape == pair[1].shape and torch.equal(a, b)


if __name__ == "__main__":
    worker_main(_run)
