"""A small model with what engines, storages and formats have to cope with, and a file of its weights."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

import zerostart


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
    from safetensors.torch import save_file

    state = {name: t for name, t in reference().state_dict().items() if name not in ("head.weight", without)}
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, path)


def imported(modules: tuple[str, ...]) -> None:
    """Import the modules that register an engine, storage, format or library."""
    import importlib

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
