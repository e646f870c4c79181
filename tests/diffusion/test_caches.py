"""Caches that a model's own code hands from layer to layer, and changes in place, under engines' hooks."""

from typing import Any

import pytest
import torch
from torch import nn

from tests.diffusion.sharded import (
    differing,
    fill,
    gradients_of,
    kept,
    load,
    off,
    on_one_thread,
    started,
)
from tests.ranks import run_ranks

WIDTH = 6


class Layer(nn.Module):
    """Adds what it has seen of the last chunk; the place in the cache goes on."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(
        self, x: torch.Tensor, cache: Any = None, place: Any = None, *, note: Any = None
    ) -> torch.Tensor:
        y = self.inner(x)
        if note is not None:
            note["calls"] = note.get("calls", 0) + 1
        if cache is None:
            return y
        index = place[0]
        if index == len(cache):
            cache.append("first")
        else:
            y = y + (0.5 * cache[index] if isinstance(cache[index], torch.Tensor) else 1.0)
            cache[index] = x.clone()
        place[0] += 1
        return y


class Whatever(nn.Module):
    """Takes all as it comes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Layer()

    def forward(self, x: torch.Tensor, deep: Any) -> torch.Tensor:
        (cache, places), notes = deep
        return self.layer(x, cache, places["at"], note=notes)


class Causal(nn.Module):
    """By position, by keyword, None, and in tuples and dicts; a chunk at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Layer(), Layer(), Whatever(), Layer()])

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, list[Any], dict[str, Any]]:
        cache: list[Any] = []
        notes: dict[str, Any] = {"kept": x.new_ones(2)}
        chunks = []
        for chunk in x.unbind(1):
            place = [0]
            y = self.blocks[0](chunk, cache, place)
            y = self.blocks[1](y, cache=cache, place=place, note=notes)
            y = self.blocks[2](y, ((cache, {"at": place}), notes))
            chunks.append(self.blocks[3](y, None))
        return torch.stack(chunks, 1), [*cache, place], notes

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self(x)[0] if x.dim() == 3 else self.blocks[0](x)

    def decode(self, x: torch.Tensor, cache: list[Any]) -> torch.Tensor:
        cache.append(self.blocks[0](x))
        return cache[-1]


def batches(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(2, n, WIDTH, generator=generator).to(dtype).requires_grad_() for n in (3, 2)]


def passes(model: nn.Module, made: Any = None, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Two batches in turn, in inference mode, without gradients, and with them."""
    found: dict[str, Any] = {}
    with torch.inference_mode():
        found["inference"] = [kept(model(x.detach())) for x in batches(dtype)]
        found["part"] = [model.encode(x.detach().mean(1)).clone() for x in batches(dtype)]
    with torch.no_grad():
        found["evaluated"] = [kept(model(x)) for x in batches(dtype)]
        cache: list[Any] = []
        for x in batches(dtype):
            model.decode(x.mean(1), cache)
        found["cache"] = kept(cache)
    results = [model(x) for x in batches(dtype)]
    found["trained"] = kept(results)
    found["gradients"] = gradients_of(model, results, made)
    return found


def on_engine(engine: str, state: dict[str, torch.Tensor], cast: bool) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    if cast:
        from torch.distributed.fsdp import MixedPrecisionPolicy

        settings = {"engine_config": {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)}}
    model = load(engine, state, Causal, **settings)
    model, made = started(engine, model, trained=True)
    model.train()
    return passes(model, made, torch.bfloat16 if cast else torch.float32)


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "cast"), [("deepspeed", False), ("fsdp2", False), ("fsdp2", True)])
def test_what_a_layer_does_to_a_cache_its_caller_sees(engine: str, cast: bool) -> None:
    model = fill(Causal())
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    dtype = torch.bfloat16 if cast else torch.float32
    wanted = on_one_thread(lambda: passes(model.to(dtype), dtype=dtype))
    for found in run_ranks(on_engine, 2, engine, state, cast):
        assert not off(found.pop("gradients"), wanted["gradients"], 2e-2 if cast else 1e-5)
        assert not differing(found, {k: v for k, v in wanted.items() if k != "gradients"})
