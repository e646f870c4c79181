"""``zerostart load``: rehearse a load on local ranks, and compare it with an unsharded one.

Also the worker of its own local ranks: ``python -m zerostart.cli.load OPTIONS-AS-JSON``.
"""

from __future__ import annotations

import json as json_module
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from zerostart.checkpoint.strict_json import dump_json
from zerostart.cli.launch import join_group, leave_group, run_local_ranks, worker_main
from zerostart.cli.options import LOAD_OPTIONS, Download, SourceArgument, fetched, takes, values_of
from zerostart.errors import ConfigError, ZerostartError

if TYPE_CHECKING:
    import torch
    from torch import nn


@takes(*LOAD_OPTIONS)
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
    **given: Any,
) -> None:
    """Rehearse a load on this machine: time it, measure it, verify it.

    All ranks load, on their engine; --verify compares every element with an unsharded load. Ends with the
    forecast and the measurement side by side.
    """
    options = {
        "source": fetched(source, download),
        **values_of(given),
        "verify": verify,
    }
    ranks = run_local_ranks("zerostart.cli.load", [json_module.dumps(options)], nproc)
    result = _summed(ranks)
    if json is not None:
        json.write_text(dump_json(result, indent=2) + "\n", encoding="utf-8")
    _show(result, str(ranks[0]["text"]))
    if result["verified"] is False:
        wrong = ranks[0]["wrong"]
        raise ZerostartError(
            f"{len(wrong)} tensors differ from the unsharded load: {', '.join(wrong[:5])}; this is a "
            "bug in zerostart"
        )


def _summed(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """The contract's JSON form."""
    kept = ("rank", "seconds", "read_bytes", "peak_host_bytes", "peak_device_bytes")
    first = ranks[0]
    return {
        "ranks": [{key: rank[key] for key in kept} for rank in ranks],
        "missing": first["missing"],
        "unexpected": first["unexpected"],
        "mismatched": first["mismatched"],
        "verified": first["verified"],
        "seconds": max(rank["seconds"]["total"] for rank in ranks),
        "forecast": first["forecast"],
    }


def _show(result: dict[str, Any], text: str) -> None:
    from rich.console import Console

    from zerostart.training.loop.terminal import say

    console = Console()
    say(console, text)
    slowest = max(result["ranks"], key=lambda rank: rank["seconds"]["total"])
    if len(result["ranks"]) > 1:
        say(
            console,
            f"All {len(result['ranks'])} ranks: {result['seconds']:.2f} s (rank {slowest['rank']} was last)",
        )
    if result["verified"]:
        say(console, "Verified: every element equals the unsharded load")


def _run(argv: list[str]) -> dict[str, object]:
    """One rank's rehearsal."""
    import dataclasses

    import zerostart
    from zerostart import models
    from zerostart.checkpoint.source import open_catalog
    from zerostart.loading.request import Request

    options = json_module.loads(argv[0])
    verify = options.pop("verify")
    # What a training script has imported long before; the rehearsal times the load alone.
    request = Request(**options).with_engine()
    request.resolve(int(os.environ["WORLD_SIZE"])).require()
    catalog = open_catalog(options["source"])
    models.require(None, catalog.root, {name: one.shape for name, one in catalog.weights.items()})
    forecast = _forecast(options)
    join_group()
    model = zerostart.load(**options)
    made = zerostart.report(model)
    wrong = _differences(model, str(options["source"]), request.dtype) if verify else None
    leave_group()
    facts = dataclasses.asdict(made)
    return {
        **facts,
        "seconds": made.phases,
        "text": str(made),
        "verified": None if wrong is None else not wrong,
        "wrong": wrong or [],
        "forecast": forecast,
    }


def _forecast(options: dict[str, Any]) -> list[dict[str, Any]]:
    """What the load is foreseen to read and hold, of each rank; told by the first rank, before it begins.

    Before, since what a load takes depends on what is in the page cache.
    """
    import zerostart

    # Not collective: rank 0 plans for all, and the others wait for it where the group is made.
    if int(os.environ["RANK"]):
        return []
    try:
        made = zerostart.plan(**options, world_size=int(os.environ["WORLD_SIZE"]))
    except ZerostartError:
        return []  # What cannot be planned cannot be loaded: the load will say so, on every rank.
    kept = ("rank", "read_bytes", "read_ops", "peak_host_bytes", "peak_device_bytes", "read_seconds")
    return [{key: getattr(rank, key) for key in kept} for rank in made.ranks]


def _differences(model: nn.Module, source: str, dtype: torch.dtype | None) -> list[str]:
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
            f"--verify compares with what the model's library loads, but {type(model).__name__} "
            "belongs to no known library"
        )
    reference: dict[str, torch.Tensor] = {}
    buffers: dict[str, torch.Tensor] = {}
    # One whole copy to compare with, on one rank: all ranks on this machine would need as many.
    if dist.get_rank() == 0:
        with whole_copy(catalog) as folder:
            plain = loading(folder, dtype)
        reference, buffers = plain.state_dict(), dict(plain.named_buffers())
    wrong = []
    seen = set()
    # Every rank walks along, as each tensor is gathered by all; ``reference`` is empty on the others, whose
    # result nobody looks at.
    for name, tensor in zerostart.full_tensors(model):
        if tensor is not None:
            seen.add(name)
            if name not in reference or not _same(tensor, reference[name]):
                wrong.append(name)
    # Buffers that are in no state dict are compared as well: they were computed while the model was built.
    own = {name: buffer.cpu() for name, buffer in model.named_buffers()}
    wrong += [name for name, buffer in buffers.items() if name not in own or not _same(own[name], buffer)]
    return sorted({*wrong, *(reference.keys() - seen)})


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    import torch

    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(_bits(a), _bits(b))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    import torch

    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


if __name__ == "__main__":
    worker_main(_run)
