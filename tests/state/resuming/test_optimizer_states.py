"""Optimizers that keep more than AdamW does: it comes back, or the save says by name what it would lose."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zerostart
from tests.ranks import run_ranks
from zerostart.errors import CheckpointError, ConfigError


class Counting(torch.optim.SGD):
    """Numbers of its own, in its state dict and under no parameter of its state."""

    def __init__(self, parameters: Any, lr: float = 0.1) -> None:
        super().__init__(parameters, lr=lr, momentum=0.9)
        self.ramp = 1.0
        self.history = torch.zeros(3)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "ramp": self.ramp, "history": self.history}


class Lookahead(torch.optim.Optimizer):
    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer.param_groups, {})
        self.optimizer = optimizer


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4, bias=False))


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, width: int = 8) -> list[float]:
    losses = []
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        loss = model(torch.randn(4, width, generator=generator)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def adafactor(parameters: Any) -> torch.optim.Optimizer:
    from transformers.optimization import Adafactor

    return Adafactor(parameters, lr=1e-2, relative_step=False, beta1=0.9)


WHOLE: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "torch's Adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
    "transformers' Adafactor": adafactor,
    "Muon": lambda p: torch.optim.Muon([x for x in p if x.dim() == 2], lr=1e-2),
}


@pytest.mark.parametrize("name", WHOLE)
def test_a_whole_model_goes_on(name: str, tmp_path: Path) -> None:
    model = net()
    optimizer = WHOLE[name](model.parameters())
    trained(model, optimizer, range(2))
    zerostart.save_state(tmp_path / "state", model, optimizer)
    wanted = trained(model, optimizer, range(2, 5))
    other = net()
    resumed = WHOLE[name](other.parameters())
    zerostart.load_state(tmp_path / "state", other, resumed)
    assert trained(other, resumed, range(2, 5)) == wanted
    zerostart.load_state(tmp_path / "state", model, optimizer)  # of one that has gone on
    assert trained(model, optimizer, range(2, 5)) == wanted
    zerostart.verify(tmp_path / "state")


def test_an_optimizer_around_another_is_refused(tmp_path: Path) -> None:
    model = net()
    optimizer = Lookahead(torch.optim.AdamW(model.parameters()))
    with pytest.raises(ConfigError, match="Lookahead wraps another one, a AdamW, in its attribute optimizer"):
        zerostart.save_state(tmp_path / "state", model, optimizer)
    assert not (tmp_path / "state").exists()


def test_values_of_its_own_are_refused(tmp_path: Path) -> None:
    model = net()
    with pytest.raises(ConfigError, match=r"Counting has values of its own .*ramp, history"):
        zerostart.save_state(tmp_path / "state", model, Counting(model.parameters()))


def test_a_state_of_no_parameter_is_refused(tmp_path: Path) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.state[torch.ones(2)]["step"] = 3
    with pytest.raises(ConfigError, match="in none of its groups"):
        zerostart.save_state(tmp_path / "state", model, optimizer)


def test_an_averaged_model_counts_on(tmp_path: Path) -> None:
    models = [torch.optim.swa_utils.AveragedModel(net()) for _ in range(2)]
    for _ in range(3):
        models[0].update_parameters(net())
    zerostart.save_state(tmp_path / "state", models[0])
    zerostart.load_state(tmp_path / "state", models[1])
    assert models[1].n_averaged == 3


class Blocks(torch.optim.Optimizer):
    """The layout of an 8-bit Adam's state: codes, a scale for each block of 16, and their meaning."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                local, grad = (
                    t.to_local() if hasattr(t, "to_local") else t for t in (parameter, parameter.grad)
                )
                count = local.numel()
                blocks = -(-count // 16)
                state = self.state[parameter]
                if not state:
                    state["step"] = 0
                    state["state1"] = torch.zeros(local.shape, dtype=torch.uint8)
                    state["absmax1"] = torch.zeros(blocks)
                    state["qmap1"] = torch.linspace(-1, 1, 256)
                state["step"] += 1
                padded = torch.zeros(blocks * 16)
                padded[:count] = state["qmap1"][state["state1"].view(-1).long()]
                kept = (padded.view(blocks, 16) * state["absmax1"][:, None]).view(-1)[:count]
                kept = 0.9 * kept + grad.reshape(-1)
                padded[:count] = kept
                state["absmax1"] = padded.view(blocks, 16).abs().amax(1).clamp_min(1e-8)
                share = padded.view(blocks, 16) / state["absmax1"][:, None]
                codes = ((share + 1) * 127.5).round().to(torch.uint8).view(-1)[:count]
                state["state1"] = codes.view(local.shape)
                local.sub_(group["lr"] * kept.view(local.shape))


def sharded() -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    return fully_shard(net())


def saved(folder: Path, kind: str) -> tuple[list[float], list[float]]:
    model = sharded() if kind == "FSDP2" else nn.parallel.DistributedDataParallel(net())
    optimizer = Blocks(model.parameters())
    trained(model, optimizer, range(2))
    zerostart.save_state(folder, model, optimizer)
    wanted = trained(model, optimizer, range(2, 4))
    return wanted, resumed(folder, kind)


def resumed(folder: Path, kind: str) -> list[float]:
    model = sharded() if kind == "FSDP2" else nn.parallel.DistributedDataParallel(net())
    optimizer = Blocks(model.parameters())
    zerostart.load_state(folder, model, optimizer)
    return trained(model, optimizer, range(2, 4))


def refused(folder: Path) -> None:
    model = sharded()
    before = {name: p.to_local().clone() for name, p in model.named_parameters()}  # type: ignore[attr-defined]
    with pytest.raises(
        CheckpointError, match=r"absmax1.*by 2 ranks.*be resumed only where ranks have the same shares"
    ):
        zerostart.load_state(folder, model, Blocks(model.parameters()))
    for name, p in model.named_parameters():
        assert torch.equal(before[name], p.to_local()), name  # type: ignore[attr-defined]


@pytest.mark.slow
def test_states_in_blocks_go_on_where_the_shares_are_the_same(tmp_path: Path) -> None:
    (wanted, found), _ = run_ranks(saved, 2, tmp_path / "state", "FSDP2")
    assert found == wanted
    zerostart.verify(tmp_path / "state")
    run_ranks(refused, 1, tmp_path / "state")


def bitsandbytes(parameters: Any) -> torch.optim.Optimizer:
    from bitsandbytes.optim import AdamW8bit

    made: torch.optim.Optimizer = AdamW8bit(parameters, lr=1e-2, min_8bit_size=16)
    return made


@pytest.mark.slow
def test_bitsandbytes_states_go_on(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    model, other = net(), net()
    optimizer, resumed = bitsandbytes(model.parameters()), bitsandbytes(other.parameters())
    trained(model, optimizer, range(2))
    zerostart.save_state(tmp_path / "state", model, optimizer)
    wanted = trained(model, optimizer, range(2, 5))
    zerostart.load_state(tmp_path / "state", other, resumed)
    assert any(
        value.dtype == torch.uint8
        for value in resumed.state[other[0].weight].values()
        if hasattr(value, "dtype")
    )
    assert trained(other, resumed, range(2, 5)) == wanted


def muons(folder: Path, saves: bool) -> list[float]:
    model = sharded()
    optimizer = torch.optim.Muon([p for p in model.parameters() if p.dim() == 2], lr=1e-2)
    if saves:
        trained(model, optimizer, range(2))
        zerostart.save_state(folder, model, optimizer)
    else:
        zerostart.load_state(folder, model, optimizer)
    return trained(model, optimizer, range(2, 5))


@pytest.mark.slow
def test_muon_goes_on_with_other_ranks(tmp_path: Path) -> None:
    wanted = run_ranks(muons, 2, tmp_path / "state", True)[0]
    assert run_ranks(muons, 2, tmp_path / "state", False)[0] == wanted
    assert run_ranks(muons, 1, tmp_path / "state", False)[0] == pytest.approx(wanted, rel=1e-3)
