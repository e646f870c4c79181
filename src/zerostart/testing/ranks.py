"""What the suites share: real ranks of this machine, over gloo, and a small model with its file."""

from __future__ import annotations

import importlib
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from safetensors.torch import save_file
from torch import nn

import zerostart


def on_ranks(
    function: Callable[..., object], world_size: int, *arguments: object, timeout: float = 120.0
) -> list[Any]:
    """Call the module-level ``function(*arguments)`` on every rank; return the results by rank.

    What is passed and returned has to be picklable. The ranks have this process's environment of now. Raises
    AssertionError, with the stacks of the ranks, where one raises or dies, or where not all have returned
    after ``timeout`` seconds.
    """
    with tempfile.TemporaryDirectory(prefix="zerostart-ranks-") as folder:
        # Importing torch and an engine takes seconds: ranks are forked from a server that has, if nobody
        # else's runs in this process already.
        context = mp.get_context("forkserver")
        context.set_forkserver_preload([__name__, "zerostart"])
        given = (function, arguments, world_size, folder, dict(os.environ))
        # Daemons: ranks end with the process that tests, should that be ended first.
        ranks = [
            context.Process(target=_main, args=(rank, *given), daemon=True) for rank in range(world_size)
        ]
        for process in ranks:
            process.start()
        # One time for all: a rank that hangs mostly hangs the others with it.
        deadline = time.monotonic() + timeout
        for process in ranks:
            process.join(max(0.0, deadline - time.monotonic()))
        wrong = []
        # All of them, and not the first alone: which one failed by itself shows only beside the others.
        for rank, process in enumerate(ranks):
            if process.is_alive():
                process.kill()
                wrong.append(f"rank {rank} had not returned after {timeout:.0f} s")
            elif process.exitcode:
                told = Path(folder, f"{rank}.error")
                text = told.read_text() if told.exists() else f"exit code {process.exitcode}"
                wrong.append(f"rank {rank}: {text}")
        if wrong:
            raise AssertionError("\n".join(wrong))
        return [torch.load(Path(folder, f"{rank}.value"), weights_only=False) for rank in range(world_size)]


def _main(
    rank: int,
    function: Callable[..., object],
    arguments: tuple[object, ...],
    world_size: int,
    folder: str,
    environment: dict[str, str],
) -> None:
    """One rank: its process group meets in a file of the folder."""
    torch.set_num_threads(1)
    # The server was forked with the environment of the first call, which may be another than that of this
    # one.
    os.environ.clear()
    os.environ.update(environment)
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
    )
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/rendezvous",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=60),
        )
        value = function(*arguments)
        # Before the barrier: it is there even if another rank fails on its way to that.
        torch.save(value, Path(folder, f"{rank}.value"))
        # So that no rank takes its end of the group away while another still exchanges.
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        Path(folder, f"{rank}.error").write_text(traceback.format_exc())
        os._exit(1)  # threads of a broken process group must not keep a failed rank alive


class Net(nn.Module):
    """A model with parameters of sizes that do not divide evenly, tied weights, and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 6)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.norm = nn.LayerNorm(6)
        # One element: of several ranks most have none of it.
        self.scale = nn.Parameter(torch.ones(1))
        self.head = nn.Linear(6, 13, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("seen", torch.zeros(3))
        # In no state dict: what a load makes of it comes of building the model.
        self.register_buffer("table", torch.arange(6.0), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits [..., 13] of token numbers [...]."""
        x = self.embed(tokens) + self.table
        for layer in self.layers:
            x = layer(x)
        logits: torch.Tensor = self.head(self.norm(x) * self.scale)
        return logits


def reference() -> Net:
    """Build ``Net`` with fixed values, the same in every process."""
    model = Net()
    # Its own generator: the values are the same whatever has been drawn before.
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.copy_(torch.randn(tensor.shape, generator=generator))
    return model


def save(path: Path, without: str = "") -> None:
    """Write the weights of ``reference`` to a safetensors file, without the tensor that is named."""
    state = {name: t for name, t in reference().state_dict().items() if name not in ("head.weight", without)}
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, path)


def imported(modules: tuple[str, ...]) -> None:
    """Import the modules that register an engine, storage, format or library."""
    for name in modules:
        importlib.import_module(name)


def loaded_from(modules: tuple[str, ...], source: str, engine: str) -> tuple[list[str], int]:
    """Load, and compare this rank with the unsharded model; return what differs and the bytes read."""
    imported(modules)
    model = zerostart.load(source, model=Net, engine=engine, progress=False)
    wanted = reference().state_dict()
    wrong = []
    for name, tensor in zerostart.full_tensors(model, rank=None):
        assert tensor is not None, "every rank asked for it"
        if not torch.equal(tensor, wanted.pop(name)):
            wrong.append(f"{name} differs")
    return wrong + [f"{name} is not there" for name in wanted], zerostart.report(model).read_bytes
