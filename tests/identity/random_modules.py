"""Random plain modules with aliases in containers, shared and viewed buffers, ties, hooks; and checkpoints.

A module is made from a number, the same in every process, and so is its checkpoint. ``strangers`` of a module
names what is no longer the same object as the parameter or buffer that it was made of.
"""

import functools
import random
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

WIDTH = 5


class Leaf(nn.Module):
    """A layer that uses its parameters through a container."""

    def __init__(self, number: int) -> None:
        super().__init__()
        choose = random.Random(number)
        self.weight = nn.Parameter(torch.zeros(WIDTH, WIDTH))
        self.bias = nn.Parameter(torch.zeros(WIDTH))
        self.register_buffer("scale", torch.arange(1.0, WIDTH + 1) / 7)
        if choose.random() < 0.5:
            self.register_buffer("part", self.scale[1:3], persistent=choose.random() < 0.5)
        if choose.random() < 0.5:
            self.offsets = (torch.arange(float(WIDTH)) * number).cos()
        if choose.random() < 0.3:
            self.view = self.scale[:2]
        if choose.random() < 0.3:
            self.register_load_state_dict_pre_hook(_rename)
        self.kept, self.look = keep(choose, self.weight)
        self.listed = [self.bias, {"scale": self.scale}]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One layer: [n, WIDTH] to [n, WIDTH]."""
        y = nn.functional.linear(x, self.look(self.kept), self.listed[0]) * self.listed[1]["scale"]
        return y + getattr(self, "offsets", torch.zeros(1)) + getattr(self, "view", torch.zeros(1)).sum()


def _rename(module: nn.Module, state: Any, prefix: str, *_: Any) -> None:
    if f"{prefix}kernel" in state:
        state[f"{prefix}weight"] = state.pop(f"{prefix}kernel").t()


def keep(choose: random.Random, p: nn.Parameter) -> tuple[Any, Callable[[Any], Any]]:
    """A container with a parameter in it, and how to find it there."""
    kind = choose.choice(("list", "tuple", "dict", "object", "weak", "deep"))
    if kind == "weak":
        return weakref.ref(p), lambda v: v()
    if kind == "object":
        return SimpleNamespace(held=p), lambda v: v.held
    if kind == "deep":
        return {"a": [(1, SimpleNamespace(held=(p,)))]}, lambda v: v["a"][0][1].held[0]
    return {"list": [p], "tuple": (p,), "dict": {0: p}}[kind], lambda v: v[0]


class RandomModule(nn.Module):
    """Leaves and layers of torch's in a row, some tied, some with a common buffer; bookkeeping at the top."""

    def __init__(self, number: int) -> None:
        super().__init__()
        choose = random.Random(number * 7919)
        self.rows = nn.ModuleList(self._row(choose, number + at) for at in range(choose.randint(1, 4)))
        leaves = [row for row in self.rows if isinstance(row, Leaf)]
        if len(leaves) > 1 and choose.random() < 0.4:
            leaves[1].scale = leaves[0].scale
            leaves[1].listed[1]["scale"] = leaves[0].scale
            for name, view in (("part", leaves[0].scale[1:3]), ("view", leaves[0].scale[:2])):
                if hasattr(leaves[1], name):
                    setattr(leaves[1], name, view)
        if len(leaves) > 1 and choose.random() < 0.4:
            leaves[-1].bias = leaves[0].bias
            leaves[-1].listed[0] = leaves[0].bias
        shared = torch.arange(3.0) + number
        self.first, self.second = nn.Module(), nn.Module()
        self.first.register_buffer("table", shared, persistent=choose.random() < 0.5)
        self.second.register_buffer("table", shared, persistent=choose.random() < 0.8)
        self.everything = dict(self.named_parameters())
        self.tables = (shared, [shared])

    @staticmethod
    def _row(choose: random.Random, number: int) -> nn.Module:
        kind = choose.choice(("leaf", "leaf", "linear", "lstm", "gru", "norm"))
        if kind == "leaf":
            return Leaf(number)
        if kind == "linear":
            return nn.Linear(WIDTH, WIDTH)
        if kind == "norm":
            return nn.BatchNorm1d(WIDTH)
        return (nn.LSTM if kind == "lstm" else nn.GRU)(WIDTH, WIDTH, num_layers=choose.randint(1, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """All rows in turn: [n, WIDTH] to [n, WIDTH]."""
        for row in self.rows:
            y = row(x)
            x = y[0] if isinstance(y, tuple) else y
        return x + self.tables[0].sum() + self.first.table.sum() + self.second.table.sum()

    def strangers(self) -> list[str]:
        """Aliases that are not what they should be the same as."""
        wrong = [name for name, p in self.everything.items() if p is not self.get_parameter(name)]
        for at, row in enumerate(self.rows):
            if isinstance(row, Leaf):
                wrong += [] if row.look(row.kept) is row.weight else [f"rows.{at}.kept"]
                wrong += [] if row.listed[0] is row.bias else [f"rows.{at}.listed[0]"]
                wrong += [] if row.listed[1]["scale"] is row.scale else [f"rows.{at}.listed[1]"]
                views = [name for name in ("part", "view") if hasattr(row, name)]
                memory = row.scale.untyped_storage()._cdata
                wrong += [
                    f"rows.{at}.{n}" for n in views if getattr(row, n).untyped_storage()._cdata != memory
                ]
            if isinstance(row, nn.RNNBase):
                names = zip(row._flat_weights_names, row._flat_weights, strict=True)
                wrong += [f"rows.{at}.{name}" for name, p in names if p is not getattr(row, name)]
        tables = (self.first.table, self.second.table, self.tables[0], self.tables[1][0])
        return wrong + ([] if all(t is tables[0] for t in tables) else ["tables"])


def module(number: int) -> Callable[[], RandomModule]:
    """Makes the module of that number."""
    return functools.partial(RandomModule, number)


def checkpoint(number: int) -> dict[str, torch.Tensor]:
    """A checkpoint for the module of that number: contradictory in places, incomplete in others."""
    choose = random.Random(number * 104729)
    generator = torch.Generator().manual_seed(number)
    state: dict[str, torch.Tensor] = RandomModule(number).state_dict()
    for name, t in list(state.items()):
        state[name] = (
            torch.randn(t.shape, generator=generator).to(t.dtype) if t.is_floating_point() else t + 5
        )
        if name.endswith("running_var"):
            state[name] = state[name].abs()
        lost = 0.3 if not name.startswith("rows") else 0.1 if name.endswith(".bias") else 0.0
        if choose.random() < lost:
            del state[name]
        elif name.endswith(".weight") and choose.random() < 0.2 and t.shape == (WIDTH, WIDTH):
            state[name.replace(".weight", ".kernel")] = state.pop(name)
    return dict(state) if choose.random() < 0.5 else state
