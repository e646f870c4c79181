"""Local ranks over gloo, and a small model with its file."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.multiprocessing.spawn import ProcessException, start_processes

import zerostart
from zerostart.live.model import get_record


def on_ranks(
    function: Callable[..., object], world_size: int, *arguments: object, timeout: float = 120.0
) -> list[Any]:
    """Call the module-level ``function(*arguments)`` on all ranks; return results by rank.

    Arguments and results must be picklable. The ranks have the present environment of this process. Raises
    AssertionError, with the stack of the first rank that raises, if one raises or dies, or if not all have
    returned after ``timeout`` seconds.
    """
    # Importing torch and an engine takes seconds: ranks are forked from a server that has imported them.
    multiprocessing.get_context("forkserver").set_forkserver_preload([__name__, "zerostart"])
    deadline = time.monotonic() + timeout
    with tempfile.TemporaryDirectory(prefix="zerostart-ranks-") as folder:
        rank_arguments = (function, arguments, world_size, folder, dict(os.environ))
        context = start_processes(_main, rank_arguments, world_size, False, True, "forkserver")  # type: ignore[no-untyped-call]
        try:
            while not context.join(max(0.0, deadline - time.monotonic())):
                if time.monotonic() > deadline:
                    raise AssertionError(f"a rank had not returned after {timeout:.0f} s")
        except ProcessException as error:
            raise AssertionError(str(error)) from error
        finally:
            for process in context.processes:
                process.kill()
        return [torch.load(Path(folder, f"{rank}.value"), weights_only=False) for rank in range(world_size)]


def _main(
    rank: int,
    function: Callable[..., object],
    arguments: tuple[object, ...],
    world_size: int,
    folder: str,
    environment: dict[str, str],
) -> None:
    """Run one rank: its process group meets in a file of the folder."""
    torch.set_num_threads(1)
    # The server was forked with the environment of the first call.
    os.environ.clear()
    os.environ.update(environment)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    os.environ.update(WORLD_SIZE=str(world_size), LOCAL_WORLD_SIZE=str(world_size))
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=60),
    )
    torch.save(function(*arguments), Path(folder, f"{rank}.value"))
    # No rank destroys its group while another still exchanges.
    dist.barrier()
    dist.destroy_process_group()


class Net(nn.Module):
    """A model with uneven sizes, tied weights and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 6)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.norm = nn.LayerNorm(6)
        # One element, so that most ranks hold none of it.
        self.scale = nn.Parameter(torch.ones(1))
        self.head = nn.Linear(6, 13, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("seen", torch.zeros(3))
        # In no state dict: a load gets its values from building the model.
        self.register_buffer("table", torch.arange(6.0), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits [..., 13] of token numbers [...]."""
        x = self.embed(tokens) + self.table
        for layer in self.layers:
            x = layer(x)
        logits: torch.Tensor = self.head(self.norm(x) * self.scale)
        return logits


def reference() -> Net:
    """Build ``Net`` with fixed values, the same in every process."""
    model = Net()
    # A separate generator, so that earlier draws do not matter.
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.copy_(torch.randn(tensor.shape, generator=generator))
    return model


def save(path: Path, without: str = "") -> None:
    """Write the weights of ``reference`` to a safetensors file, without one tensor."""
    state = {name: t for name, t in reference().state_dict().items() if name not in ("head.weight", without)}
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, path)


def load(
    modules: tuple[str, ...],
    source: str | Path,
    engine: str,
    stage: int = 3,
    config: Mapping[str, object] | None = None,
) -> nn.Module:
    """Load ``source`` into ``Net``, after ``modules`` have registered an engine, storage or format."""
    for name in modules:
        importlib.import_module(name)
    # Without the exchange of reads, each rank reads exactly the bytes of its plan.
    return zerostart.load(
        source, Net, engine=engine, zero_stage=stage, engine_config=config, progress=False, exchange=False
    )


def load_and_compare(*arguments: Any) -> tuple[list[str], int]:
    """Load and compare with the unsharded model; return the differences and bytes read."""
    model = load(*arguments)
    record, expected = get_record(model), reference().state_dict()
    wrong = []
    for name, tensor in zerostart.full_tensors(model, rank=None):
        assert tensor is not None, "every rank asked for it"
        if not torch.equal(tensor, expected.pop(name)):
            wrong.append(f"{name} differs")
    for name, shard in record.shards(model).items():
        # A forecast starts from the placements, so a load must follow them.
        rank = record.report.rank
        if shard.name in record.recipes and shard.layout != record.placements.layout(shard.name, rank):
            wrong.append(f"{name} has another layout than planned")
    if not torch.equal(model.get_buffer("table").cpu(), torch.arange(6.0)):
        wrong.append("the buffer that is not persistent differs")
    return wrong + [f"{name} is missing" for name in expected], record.report.read_bytes


def check_loads(
    world_sizes: tuple[int, ...],
    modules: tuple[str, ...],
    source: str | Path,
    engine: str,
    stage: int = 3,
    config: Mapping[str, object] | None = None,
) -> None:
    """Load on real ranks; expect the unsharded tensors and ties, and the planned bytes."""
    for world_size in world_sizes:
        plan = zerostart.plan(source, world_size, engine, stage, model=Net, engine_config=config)
        results = on_ranks(load_and_compare, world_size, modules, source, engine, stage, config)
        for rank, (wrong, read) in enumerate(results):
            assert wrong == [], f"rank {rank} of {world_size} at stage {stage}"
            assert read == plan.ranks[rank].read_bytes
