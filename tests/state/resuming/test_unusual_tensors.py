"""Resume models with unusual tensors at another DeepSpeed stage."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zerostart
from tests.ranks import run_ranks


class UnusualModel(nn.Module):
    """Scalar, frozen and unused parameters; buffers of all kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 5), nn.Linear(5, 2)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.single = nn.Parameter(torch.ones(1))
        self.frozen = nn.Parameter(torch.randn(7), requires_grad=False)
        self.unused = nn.Parameter(torch.randn(3))
        self.register_buffer("count", torch.tensor(3))
        self.register_buffer("flags", torch.tensor([True, False]))
        self.register_buffer("nothing", torch.empty(0))
        self.register_buffer("passing", torch.randn(2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(self.first(x) * self.scale) * self.single
        return out.square().mean()


def make_engine(stage: int) -> Any:
    import deepspeed

    torch.manual_seed(0)
    weights = {name: tensor.clone() for name, tensor in UnusualModel().state_dict().items()}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    model = zerostart.load(
        weights, UnusualModel, engine="deepspeed", zero_stage=stage, engine_config=config, progress=False
    )
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [{"params": trained[::2], "lr": 0.02}, {"params": trained[1::2]}]
    optimizer = torch.optim.AdamW(groups, lr=0.01)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def train(engine: Any, count: int) -> list[float]:
    losses = []
    for number in range(count):
        loss = engine(torch.randn(2, 3, generator=torch.Generator().manual_seed(number)))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def read_digests(path: Path) -> dict[str, str]:
    folders = json.loads((path / "state.json").read_text())["digests"]
    return {n: d for folder in folders.values() for n, d in folder.items() if not n.startswith("random/")}


def resume_at_other_stages(folder: Path) -> list[list[float]]:
    """Return losses after a save and two resumes."""
    engine = make_engine(3)
    train(engine, 2)
    zerostart.save_state(folder / "3", engine)
    losses = [train(engine, 2)]
    engine.destroy()
    for stage, before, after in ((2, "3", "2"), (3, "2", "again")):
        engine = make_engine(stage)
        zerostart.load_state(folder / before, engine)
        zerostart.save_state(folder / after, engine)
        losses.append(train(engine, 2))
        engine.destroy()
    return losses


@pytest.mark.slow
def test_unusual_tensors_resume_at_other_stages(tmp_path: Path) -> None:
    losses = run_ranks(resume_at_other_stages, 2, tmp_path)[0]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert losses[2] == losses[0]
    expected = read_digests(tmp_path / "3")
    assert {"scale", "nothing", "optimizer/exp_avg/scale", "optimizer/exp_avg/unused"} <= expected.keys()
    assert read_digests(tmp_path / "2") == read_digests(tmp_path / "again") == expected
