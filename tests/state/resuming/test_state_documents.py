"""``state.json`` of a training state: complete, sealed, or refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zerostart
from zerostart.errors import CheckpointError, VerifyError


def save_and_read(folder: Path) -> dict[str, Any]:
    model = nn.Linear(2, 2)
    zerostart.save_state(folder, model, torch.optim.SGD(model.parameters(), lr=0.1), extra={"step": 3})
    document: dict[str, Any] = json.loads((folder / "state.json").read_text())
    return document


def load_into_new_model(folder: Path) -> Any:
    model = nn.Linear(2, 2)
    return zerostart.load_state(folder, model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_changed_document_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    document = save_and_read(folder)
    for name in ["seal", *document["seal"]["entries"]]:
        if name == "format":
            continue
        changed = {key: value for key, value in document.items() if key != name}
        (folder / "state.json").write_text(json.dumps(changed))
        if name == "seal":
            assert load_into_new_model(folder) == {"step": 3}  # older versions wrote no seal
        else:
            with pytest.raises(CheckpointError, match=r"state\.json has no entry '?" + name):
                load_into_new_model(folder)
    (folder / "state.json").write_text(json.dumps({**document, "extra": {"step": 4}}))
    with pytest.raises(CheckpointError, match=r"state\.json is not what was written"):
        load_into_new_model(folder)
    with pytest.raises(VerifyError, match=r"state\.json is not what was written"):
        zerostart.verify(folder)


def test_gradients_of_a_finished_step_are_not_saved(tmp_path: Path) -> None:
    def make_model() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Linear(2, 2)
        nn.init.constant_(model.weight, 1.0)
        nn.init.constant_(model.bias, 0.0)
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    def backward(model: nn.Module) -> None:
        model(torch.ones(1, 2)).sum().backward()

    save_and_read(tmp_path / "first")  # the first save starts to record steps
    model, optimizer = make_model()
    backward(model)
    zerostart.save_state(tmp_path / "window", model, optimizer)
    optimizer.step()
    zerostart.save_state(tmp_path / "stepped", model, optimizer)
    backward(model)
    zerostart.save_state(tmp_path / "added", model, optimizer)
    for name, count in (("window", 1), ("stepped", 0), ("added", 2)):
        other, resumed = make_model()
        zerostart.load_state(tmp_path / name, other, resumed)
        grad = next(other.parameters()).grad
        assert count == (0 if grad is None else grad[0, 0].item()), name


def test_flat_optimizer_state_of_torch_is_read(tmp_path: Path) -> None:
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
    resumed_model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    groups = [{"params": resumed_model[0].parameters()}, {"params": resumed_model[1].parameters()}]
    resumed = torch.optim.SGD(groups, lr=1.0, momentum=0.9)
    zerostart.load_state(tmp_path / "flat", resumed_model, resumed)
    assert [group["lr"] for group in resumed.param_groups] == [0.2, 0.3]
    for a, b in zip(model.parameters(), resumed_model.parameters(), strict=True):
        assert torch.equal(a, b)
        assert torch.equal(optimizer.state[a]["momentum_buffer"], resumed.state[b]["momentum_buffer"])
