"""Several loads form one module on one engine.

The expectation is the same module, unsharded, trained by torch.
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
SLOW_ENGINES = [("deepspeed", 1), ("deepspeed", 0), ("fsdp2", 2), ("fsdp2", 0)]
SEED = 3


class Composite(nn.Module):
    def __init__(self, encoder: nn.Module, decoder: nn.Module, adapter: nn.Module) -> None:
        super().__init__()
        self.encoder, self.decoder, self.adapter = encoder, decoder, adapter
        self.register_buffer("scale", torch.ones(()))
        self.shift = nn.Parameter(torch.zeros(2))  # from no load

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.decoder(self.adapter(self.encoder(x))) * self.scale + self.shift


def encoder() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 5))


def decoder() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 2))


def reference_model() -> Composite:
    torch.manual_seed(SEED)
    parts = encoder(), nn.Linear(5, 5)
    torch.manual_seed(SEED)
    return Composite(parts[0], decoder(), parts[1])


def load_composite(engine: str, stage: int) -> Composite:
    expected = reference_model()
    options = {"engine": engine, "zero_stage": stage, "progress": False}
    weights = {name: tensor.clone() for name, tensor in expected.encoder.state_dict().items()}
    first = zerostart.load(weights, encoder, **options)
    torch.manual_seed(SEED)
    second = zerostart.load(None, model=decoder, **options)
    third = zerostart.load(None, model=copy.deepcopy(expected.adapter), **options)
    return Composite(first, second, third)


def start_engine(model: nn.Module, engine: str, stage: int) -> tuple[Any, Any]:
    """Return what to call, and the optimizer."""
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
        wrapped, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        return wrapped, None
    if stage:
        from torch.distributed.fsdp import fully_shard

        fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    return model, optimizer


def step(model: Any, optimizer: Any, x: torch.Tensor, average_gradients: bool) -> None:
    loss = model(x).square().mean()
    if optimizer is None:
        model.backward(loss)
        model.step()
        return
    loss.backward()
    for parameter in model.parameters() if average_gradients else ():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()
    optimizer.step()
    optimizer.zero_grad()


def differing_names(model: Any, expected: nn.Module) -> list[str]:
    actual, expected_state = dict(zerostart.full_tensors(model, rank=None)), expected.state_dict()
    names = list(actual.keys() ^ expected_state.keys())
    for name, tensor in expected_state.items():
        if not torch.allclose(actual[name], tensor, rtol=1e-5, atol=1e-6):
            names.append(name)
    return names


def storages(model: nn.Module) -> dict[str, int]:
    """Return the storage address of each loaded tensor."""
    tensors = {n: getattr(p, "ds_tensor", p) for n, p in model.named_parameters() if n != "shift"}
    return {name: t.untyped_storage().data_ptr() for name, t in tensors.items() if t.numel()}


def train(cases: list[tuple[str, int]], folder: Path) -> None:
    x = torch.arange(24.0).view(4, 6) / 24
    for engine, stage in cases:
        model, expected = load_composite(engine, stage), reference_model()
        assert [
            n for n, p in zerostart.full_tensors(model, None) if not torch.equal(p, expected.state_dict()[n])
        ] == []
        addresses = storages(model) if engine == "deepspeed" else {}
        running, optimizer = start_engine(model, engine, stage)
        # The engine trains in the loads' buffers without a copy.
        assert engine != "deepspeed" or storages(model) == addresses, (engine, stage)
        reference = torch.optim.AdamW(expected.parameters(), lr=0.1)
        for _ in range(3):
            step(running, optimizer, x, average_gradients=engine == "fsdp2" and stage == 0)
            step(expected, reference, x, average_gradients=False)
        assert differing_names(running, expected) == [], (engine, stage)
        report = zerostart.report(running)
        assert "decoder.0.weight" in report.initialised
        assert report.read_bytes > 0
        with zerostart.gathered(running, "adapter.weight", modifier_rank=0) as tensor:
            if dist.get_rank() == 0:
                tensor.zero_()
        with torch.no_grad():
            expected.adapter.weight.zero_()
        assert differing_names(running, expected) == [], (engine, stage)
        digest = zerostart.digest(running)
        assert set(digest) == set(expected.state_dict())
        path = folder / f"{engine}{stage}"
        zerostart.save_state(path, running, optimizer, extra=7)
        assert zerostart.verify(path).tensors
        step(running, optimizer, x, average_gradients=engine == "fsdp2" and stage == 0)
        assert zerostart.digest(running) != digest
        assert zerostart.load_state(path, running, optimizer) == 7
        assert zerostart.digest(running) == digest


@pytest.mark.slow
def test_several_loads_train_on_one_engine(tmp_path: Path) -> None:
    run_ranks(train, 2, ENGINES, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 3])
def test_several_loads_train_at_any_stage(world: int, tmp_path: Path) -> None:
    run_ranks(train, world, [*ENGINES, *SLOW_ENGINES], tmp_path, timeout=300)
