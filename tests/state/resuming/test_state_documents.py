"""The document of a training state: digested, whole or refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zerostart
from zerostart.errors import CheckpointError, VerifyError


def saved(place: Path) -> dict[str, Any]:
    model = nn.Linear(2, 2)
    zerostart.save_state(place, model, torch.optim.SGD(model.parameters(), lr=0.1), extra={"step": 3})
    read: dict[str, Any] = json.loads((place / "state.json").read_text())
    return read


def load(place: Path) -> Any:
    model = nn.Linear(2, 2)
    return zerostart.load_state(place, model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_a_document_that_was_changed_is_refused(tmp_path: Path) -> None:
    place = tmp_path / "state"
    read = saved(place)
    for name in ["seal", *read["seal"]["entries"]]:
        if name == "format":
            continue
        changed = {key: value for key, value in read.items() if key != name}
        (place / "state.json").write_text(json.dumps(changed))
        if name == "seal":
            assert load(place) == {"step": 3}  # as of a version that had none
        else:
            with pytest.raises(CheckpointError, match=r"state\.json has no entry '?" + name):
                load(place)
    (place / "state.json").write_text(json.dumps({**read, "extra": {"step": 4}}))
    with pytest.raises(CheckpointError, match=r"state\.json is not what was written"):
        load(place)
    with pytest.raises(VerifyError, match=r"state\.json is not what was written"):
        zerostart.verify(place)


def test_gradients_that_a_step_has_taken_are_not_added_again(tmp_path: Path) -> None:
    def made() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Linear(2, 2)
        nn.init.constant_(model.weight, 1.0)
        nn.init.constant_(model.bias, 0.0)
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    def backward(model: nn.Module) -> None:
        model(torch.ones(1, 2)).sum().backward()

    saved(tmp_path / "first")  # from when on steps are known
    model, optimizer = made()
    backward(model)
    zerostart.save_state(tmp_path / "window", model, optimizer)
    optimizer.step()
    zerostart.save_state(tmp_path / "stepped", model, optimizer)
    backward(model)
    zerostart.save_state(tmp_path / "added", model, optimizer)
    for name, count in (("window", 1), ("stepped", 0), ("added", 2)):
        other, resumed = made()
        zerostart.load_state(tmp_path / name, other, resumed)
        grad = next(other.parameters()).grad
        assert count == (0 if grad is None else grad[0, 0].item()), name


def test_torchs_flat_optimizer_state_is_read(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    groups = [{"params": model[0].parameters(), "lr": 0.2}, {"params": model[1].parameters(), "lr": 0.3}]
    optimizer = torch.optim.SGD(groups, momentum=0.9)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    weights, states = get_state_dict(model, optimizer, options=options)
    dcp.save({"model": weights, "optim": states}, checkpoint_id=tmp_path / "flat", no_dist=True)
    other = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    groups = [{"params": other[0].parameters()}, {"params": other[1].parameters()}]
    resumed = torch.optim.SGD(groups, lr=1.0, momentum=0.9)
    zerostart.load_state(tmp_path / "flat", other, resumed)
    assert [group["lr"] for group in resumed.param_groups] == [0.2, 0.3]
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two)
        assert torch.equal(optimizer.state[one]["momentum_buffer"], resumed.state[two]["momentum_buffer"])
