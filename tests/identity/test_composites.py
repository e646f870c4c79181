"""Several loads in one module: an encoder from a checkpoint, a decoder that starts, an adapter that exists.

They go to one engine. What is expected is the same module, whole, trained by torch alone.
"""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zerostart
from tests.ranks import run_ranks

ENGINES = [("deepspeed", 3), ("deepspeed", 2), ("fsdp2", 3)]
MORE = [("deepspeed", 1), ("deepspeed", 0), ("fsdp2", 2), ("fsdp2", 0)]
SEED = 3


class Composite(nn.Module):
    def __init__(self, encoder: nn.Module, decoder: nn.Module, adapter: nn.Module) -> None:
        super().__init__()
        self.encoder, self.decoder, self.adapter = encoder, decoder, adapter
        self.register_buffer("scale", torch.ones(()))
        self.shift = nn.Parameter(torch.zeros(2))  # of no load

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.decoder(self.adapter(self.encoder(x))) * self.scale + self.shift


def encoder() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 5))


def decoder() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 2))


def whole() -> Composite:
    torch.manual_seed(SEED)
    parts = encoder(), nn.Linear(5, 5)
    torch.manual_seed(SEED)
    return Composite(parts[0], decoder(), parts[1])


def loaded(engine: str, stage: int) -> Composite:
    expected = whole()
    options = {"engine": engine, "zero_stage": stage, "progress": False}
    weights = {name: tensor.clone() for name, tensor in expected.encoder.state_dict().items()}
    first = zerostart.load(weights, encoder, **options)
    torch.manual_seed(SEED)
    second = zerostart.load(None, model=decoder, **options)
    third = zerostart.load(None, model=copy.deepcopy(expected.adapter), **options)
    return Composite(first, second, third)


def started(model: nn.Module, engine: str, stage: int) -> tuple[Any, Any]:
    """What is called and asked, and the optimizer."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    if engine == "deepspeed":
        import deepspeed

        config = {
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {"stage": stage},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "gradient_clipping": 0.0,
        }
        made, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        return made, None
    if stage:
        from torch.distributed.fsdp import fully_shard

        fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    return model, optimizer


def step(model: Any, optimizer: Any, x: torch.Tensor, averaged: bool) -> None:
    loss = model(x).square().mean()
    if optimizer is None:
        model.backward(loss)
        model.step()
        return
    loss.backward()
    for parameter in model.parameters() if averaged else ():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()
    optimizer.step()
    optimizer.zero_grad()


def differing(model: Any, expected: nn.Module) -> list[str]:
    got, want = dict(zerostart.full_tensors(model, rank=None)), expected.state_dict()
    found = list(got.keys() ^ want.keys())
    for name, tensor in want.items():
        if not torch.allclose(got[name], tensor, rtol=1e-5, atol=1e-6):
            found.append(name)
    return found


def homes(model: nn.Module) -> dict[str, int]:
    """Where partitions, or whole parameters, of what was loaded lie."""
    held = {n: getattr(p, "ds_tensor", p) for n, p in model.named_parameters() if n != "shift"}
    return {name: t.untyped_storage().data_ptr() for name, t in held.items() if t.numel()}


def train(cases: list[tuple[str, int]], folder: Path) -> None:
    x = torch.arange(24.0).view(4, 6) / 24
    for engine, stage in cases:
        model, expected = loaded(engine, stage), whole()
        assert [
            n for n, p in zerostart.full_tensors(model, None) if not torch.equal(p, expected.state_dict()[n])
        ] == []
        places = homes(model) if engine == "deepspeed" else {}
        running, optimizer = started(model, engine, stage)
        # The engine trains in the buffers of the loads: no copy of them was made.
        assert engine != "deepspeed" or homes(model) == places, (engine, stage)
        reference = torch.optim.AdamW(expected.parameters(), lr=0.1)
        for _ in range(3):
            step(running, optimizer, x, averaged=engine == "fsdp2" and stage == 0)
            step(expected, reference, x, averaged=False)
        assert differing(running, expected) == [], (engine, stage)
        report = zerostart.report(running)
        assert "decoder.0.weight" in report.initialised
        assert report.read_bytes > 0
        with zerostart.gathered(running, "adapter.weight", modifier_rank=0) as tensor:
            if dist.get_rank() == 0:
                tensor.zero_()
        with torch.no_grad():
            expected.adapter.weight.zero_()
        assert differing(running, expected) == [], (engine, stage)
        saved = zerostart.digest(running)
        assert set(saved) == set(expected.state_dict())
        path = folder / f"{engine}{stage}"
        zerostart.save_state(path, running, optimizer, extra=7)
        assert zerostart.verify(path).tensors
        step(running, optimizer, x, averaged=engine == "fsdp2" and stage == 0)
        assert zerostart.digest(running) != saved
        assert zerostart.load_state(path, running, optimizer) == 7
        assert zerostart.digest(running) == saved


@pytest.mark.slow
def test_several_loads_go_to_one_engine(tmp_path: Path) -> None:
    run_ranks(train, 2, ENGINES, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 3])
def test_several_loads_go_to_one_engine_at_any_stage(world: int, tmp_path: Path) -> None:
    run_ranks(train, world, [*ENGINES, *MORE], tmp_path, timeout=300)
