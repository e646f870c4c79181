"""Save and resume unsharded models."""

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


class Noncontiguous(nn.Module):
    """Parameters and buffers that are not contiguous in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.transposed = nn.Parameter(torch.randn(3, 5).t())
        self.sliced = nn.Parameter(torch.randn(4, 6)[:, 1:4])
        self.images = nn.Conv2d(2, 3, 2).to(memory_format=torch.channels_last)
        self.register_buffer("every_other", torch.randn(9)[::2])
        self.register_buffer("permuted", torch.randn(2, 3, 4).permute(2, 0, 1))
        self.number = nn.Parameter(torch.randn(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        image: torch.Tensor = self.images(torch.ones(1, 2, 3, 3)).square().sum()
        buffers: torch.Tensor = self.every_other.sum() + self.permuted.sum()  # type: ignore[operator]
        product: torch.Tensor = (x @ self.transposed).square().sum()
        return product + (x[:4] @ self.sliced).square().sum() + image * self.number + buffers


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, count: int) -> list[float]:
    losses = []
    for _ in range(count):
        optimizer.zero_grad()
        loss = model(torch.arange(5.0))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_noncontiguous_tensors_are_restored(tmp_path: Path) -> None:
    torch.manual_seed(1)
    first, second = Noncontiguous(), Noncontiguous()
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in (first, second)]
    steps(first, optimizers[0], 2)
    expected = {name: tensor.clone() for name, tensor in first.state_dict().items()}
    zerostart.save_state(tmp_path / "state", first, optimizers[0])
    zerostart.verify(tmp_path / "state")
    continued = steps(first, optimizers[0], 3)

    zerostart.load_state(tmp_path / "state", second, optimizers[1])
    assert [n for n, t in second.state_dict().items() if not torch.equal(t, expected[n])] == []
    assert not second.transposed.is_contiguous()
    assert second.sliced.stride() == (6, 1)
    assert steps(second, optimizers[1], 3) == continued
    assert zerostart.digest(first) == zerostart.digest(second)

    # A pending gradient is contiguous although its parameter is not.
    second.transposed.grad = torch.arange(15.0).view(5, 3)
    zerostart.save_state(tmp_path / "window", second, optimizers[1], wait=False).wait()
    second.transposed.grad = None
    zerostart.load_state(tmp_path / "window", second, optimizers[1])
    assert torch.equal(torch.Tensor(second.transposed.grad), torch.arange(15.0).view(5, 3))

    zerostart.save(first, tmp_path / "saved")
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    assert {n: torch.equal(t, saved[n]) for n, t in first.state_dict().items()} == dict.fromkeys(saved, True)


@pytest.mark.parametrize(
    ("tensor", "reason"),
    [
        (torch.ones(1).expand(4), "which cannot be restored"),
        (torch.ones(2, dtype=torch.complex64).conj(), "which cannot be restored"),
        (torch.eye(2).to_sparse(), "is not a dense tensor"),
        (torch.ones(2, dtype=torch.complex128), "torch.complex128, which safetensors files do not know"),
    ],
)
def test_unrestorable_tensors_are_refused(tmp_path: Path, tensor: torch.Tensor, reason: str) -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("odd", tensor)
    with pytest.raises(ConfigError, match=f"odd.* {reason}"):
        zerostart.save_state(tmp_path / "state", model)
    assert not (tmp_path / "state").exists()


@pytest.mark.parametrize("key", ["a/b", 3])
def test_optimizer_state_keys_are_checked(tmp_path: Path, key: Any) -> None:
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
    "sequential": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o), lr_scheduler.MultiStepLR(o, [3])], [3]
    ),
    "chained": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.LinearLR(o), lr_scheduler.ExponentialLR(o, 0.9)], o
    ),
}


def step_schedules(pairs: list[tuple[Any, Any]], count: int) -> list[list[float]]:
    rates: list[list[float]] = []
    for _ in range(count):
        for optimizer, schedule in pairs:
            optimizer.step()
            schedule.step(*([1.0] if isinstance(schedule, lr_scheduler.ReduceLROnPlateau) else []))
        rates.append([optimizer.param_groups[0]["lr"] for optimizer, _ in pairs])
    return rates


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_are_saved_as_extra(tmp_path: Path, name: str) -> None:
    models = [nn.Linear(2, 2), nn.Linear(2, 2)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in models]
    first, second = [(o, SCHEDULES[name](o)) for o in optimizers]
    step_schedules([first], 4)
    zerostart.save_state(tmp_path / "state", models[0], first[0], {"schedule": first[1].state_dict()})
    extra: Any = zerostart.load_state(tmp_path / "state", models[1], second[0])
    second[1].load_state_dict(extra["schedule"])
    assert all(mine == theirs for mine, theirs in step_schedules([first, second], 8))


class CountingLinear(nn.Linear):
    """Module with extra state, like a quantiser."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.extra: Any = {"steps": 0}

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


def test_extra_state_of_modules_is_restored(tmp_path: Path) -> None:
    model, loaded = (nn.Sequential(*(CountingLinear() for _ in range(3))) for _ in range(2))
    extra = {"steps": 3, "scale": (1.5, None), "table": [b"\x00\xff", b""]}
    model[0].extra, model[1].extra, model[2].extra = extra, torch.arange(5), bytes(range(256))
    zerostart.save_state(tmp_path / "state", model)
    zerostart.verify(tmp_path / "state")
    zerostart.load_state(tmp_path / "state", loaded)
    assert loaded[0].extra == extra
    assert loaded[2].extra == bytes(range(256))
    assert torch.equal(loaded[1].extra, torch.arange(5))
    model[1].extra = object()
    with pytest.raises(ConfigError, match=r"modules\.1 is a object"):
        zerostart.save_state(tmp_path / "state", model)


def test_gathered_optimizer_is_refused(tmp_path: Path) -> None:
    (tmp_path / "optimizer.bin").touch()
    with pytest.raises(CheckpointNotFoundError, match="SHARDED_STATE_DICT"):
        zerostart.load_state(tmp_path, Noncontiguous())


def test_state_without_its_model_is_refused(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    zerostart.save_state(tmp_path, model)
    shutil.rmtree(tmp_path / "model")
    with pytest.raises(CheckpointNotFoundError, match="model"):
        zerostart.load_state(tmp_path, model)
