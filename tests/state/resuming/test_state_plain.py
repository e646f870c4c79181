"""Models that no engine cuts: tensors in any order in memory, schedules, states of modules."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.optim import lr_scheduler

import zerostart
from zerostart.errors import CheckpointNotFoundError, ConfigError


class Orders(nn.Module):
    """Parameters and buffers whose elements lie in memory otherwise than row by row."""

    def __init__(self) -> None:
        super().__init__()
        self.turned = nn.Parameter(torch.randn(3, 5).t())
        self.cut = nn.Parameter(torch.randn(4, 6)[:, 1:4])
        self.images = nn.Conv2d(2, 3, 2).to(memory_format=torch.channels_last)
        self.register_buffer("every_other", torch.randn(9)[::2])
        self.register_buffer("permuted", torch.randn(2, 3, 4).permute(2, 0, 1))
        self.number = nn.Parameter(torch.randn(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        image: torch.Tensor = self.images(torch.ones(1, 2, 3, 3)).square().sum()
        buffers: torch.Tensor = self.every_other.sum() + self.permuted.sum()  # type: ignore[operator]
        product: torch.Tensor = (x @ self.turned).square().sum()
        return product + (x[:4] @ self.cut).square().sum() + image * self.number + buffers


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, count: int) -> list[float]:
    losses = []
    for _ in range(count):
        optimizer.zero_grad()
        loss = model(torch.arange(5.0))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_tensors_in_any_order_in_memory_come_back(tmp_path: Path) -> None:
    torch.manual_seed(1)
    first, second = Orders(), Orders()
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in (first, second)]
    steps(first, optimizers[0], 2)
    wanted = {name: tensor.clone() for name, tensor in first.state_dict().items()}
    zerostart.save_state(tmp_path / "state", first, optimizers[0])
    zerostart.verify(tmp_path / "state")
    on = steps(first, optimizers[0], 3)

    zerostart.load_state(tmp_path / "state", second, optimizers[1])
    assert [n for n, t in second.state_dict().items() if not torch.equal(t, wanted[n])] == []
    assert not second.turned.is_contiguous()
    assert second.cut.stride() == (6, 1)
    assert steps(second, optimizers[1], 3) == on
    assert zerostart.digest(first) == zerostart.digest(second)

    # Gradients that wait for a step, which are row by row where the parameter is not.
    second.turned.grad = torch.arange(15.0).view(5, 3)
    zerostart.save_state(tmp_path / "window", second, optimizers[1], wait=False).wait()
    second.turned.grad = None
    zerostart.load_state(tmp_path / "window", second, optimizers[1])
    assert torch.equal(torch.Tensor(second.turned.grad), torch.arange(15.0).view(5, 3))

    zerostart.save(first, tmp_path / "saved")
    files = load_file(tmp_path / "saved" / "model.safetensors")
    assert {n: torch.equal(t, files[n]) for n, t in first.state_dict().items()} == dict.fromkeys(files, True)


@pytest.mark.parametrize(
    ("tensor", "reason"),
    [
        (torch.ones(1).expand(4), "which cannot be restored"),
        (torch.ones(2, dtype=torch.complex64).conj(), "which cannot be restored"),
        (torch.eye(2).to_sparse(), "is not a dense tensor"),
        (torch.ones(2, dtype=torch.complex128), "torch.complex128, which safetensors files do not know"),
    ],
)
def test_what_could_not_be_restored_is_not_saved(tmp_path: Path, tensor: torch.Tensor, reason: str) -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("odd", tensor)
    with pytest.raises(ConfigError, match=f"odd.* {reason}"):
        zerostart.save_state(tmp_path / "state", model)
    assert not (tmp_path / "state").exists()


@pytest.mark.parametrize("key", ["a/b", 3])
def test_a_state_of_an_optimizer_needs_a_name(tmp_path: Path, key: Any) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.state[model.weight][key] = torch.zeros(2, 2)
    with pytest.raises(ConfigError, match="a string without slashes"):
        zerostart.save_state(tmp_path / "state", model, optimizer)


SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
    "milestones": lambda o: lr_scheduler.MultiStepLR(o, [2, 6, 6]),
    "cycle": lambda o: lr_scheduler.OneCycleLR(o, 0.2, total_steps=20),
    "plateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1),
    "one after the other": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o), lr_scheduler.MultiStepLR(o, [3])], [3]
    ),
    "chained": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.LinearLR(o), lr_scheduler.ExponentialLR(o, 0.9)], o
    ),
}


def run(made: list[tuple[Any, Any]], count: int) -> list[list[float]]:
    rates: list[list[float]] = []
    for _ in range(count):
        for optimizer, schedule in made:
            optimizer.step()
            schedule.step(*([1.0] if isinstance(schedule, lr_scheduler.ReduceLROnPlateau) else []))
        rates.append([optimizer.param_groups[0]["lr"] for optimizer, _ in made])
    return rates


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_kind_of_schedule_goes_into_extra(tmp_path: Path, name: str) -> None:
    models = [nn.Linear(2, 2), nn.Linear(2, 2)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in models]
    first, second = [(o, SCHEDULES[name](o)) for o in optimizers]
    run([first], 4)
    zerostart.save_state(tmp_path / "state", models[0], first[0], {"schedule": first[1].state_dict()})
    extra: Any = zerostart.load_state(tmp_path / "state", models[1], second[0])
    second[1].load_state_dict(extra["schedule"])
    assert all(mine == theirs for mine, theirs in run([first, second], 8))


class Counting(nn.Linear):
    """A module with a state that is no tensor of its state dict, as quantisers keep one."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.seen: Any = {"steps": 0}

    def get_extra_state(self) -> Any:
        return self.seen

    def set_extra_state(self, state: Any) -> None:
        self.seen = state


def test_what_modules_keep_beside_tensors_comes_back(tmp_path: Path) -> None:
    model, again = (nn.Sequential(*(Counting() for _ in range(3))) for _ in range(2))
    kept = {"steps": 3, "scale": (1.5, None), "table": [b"\x00\xff", b""]}
    model[0].seen, model[1].seen, model[2].seen = kept, torch.arange(5), bytes(range(256))
    zerostart.save_state(tmp_path / "state", model)
    zerostart.verify(tmp_path / "state")
    zerostart.load_state(tmp_path / "state", again)
    assert again[0].seen == kept
    assert again[2].seen == bytes(range(256))
    assert torch.equal(again[1].seen, torch.arange(5))
    model[1].seen = object()
    with pytest.raises(ConfigError, match=r"modules\.1 is a object"):
        zerostart.save_state(tmp_path / "state", model)


def test_an_optimizer_that_one_rank_has_gathered_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "optimizer.bin").touch()
    with pytest.raises(CheckpointNotFoundError, match="SHARDED_STATE_DICT"):
        zerostart.load_state(tmp_path, Orders())


def test_a_state_whose_model_has_gone_is_no_state(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    zerostart.save_state(tmp_path, model)
    shutil.rmtree(tmp_path / "model")
    with pytest.raises(CheckpointNotFoundError, match="model"):
        zerostart.load_state(tmp_path, model)
