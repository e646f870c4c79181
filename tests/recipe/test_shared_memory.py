"""Checkpoint tensors that share memory share it in a converter, as in torch."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zerostart
from zerostart.errors import ConversionError

State = dict[str, torch.Tensor]
Convert = Callable[[State], State]


def module_for(tensors: State) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        result = nn.Module()
        for name, tensor in tensors.items():
            result.register_buffer(name, torch.zeros(tensor.shape, dtype=tensor.dtype))
        return result

    return build


def loads_as_torch(source: Any, state: State, convert: Convert | None) -> None:
    """Load ``source``, and compare with eager ``convert`` of ``state``."""
    expected = {name: t.clone() for name, t in (convert or dict)(state).items()}
    result = zerostart.load(
        source,
        module_for(expected),
        engine="fsdp2",
        zero_stage=0,
        converter=convert,
        progress=False,
    ).state_dict()
    for name, want in expected.items():
        assert torch.equal(result[name], want), name


def one_under_two_names() -> State:
    t = torch.arange(12.0).view(4, 3)
    return {"a": t, "b": t, "c": t.clone()}


def two_of_one_memory() -> State:
    t = torch.arange(12.0).view(4, 3)
    return {"a": t, "b": t.detach(), "c": t.t(), "d": t[0].clone()}


def overlapping_runs() -> State:
    t = torch.arange(30.0)
    return {"b": t[6:18].view(4, 3), "a": t[:12].view(4, 3), "far": t[20:24], "row": t[2:3].expand(5)}


def columns() -> State:
    t = torch.arange(60.0).view(6, 10)
    return {"q": t[:, :4], "k": t[:, 4:8], "turned": t[1:3].t(), "corner": t[5:, 9:]}


SOURCES = (one_under_two_names, two_of_one_memory, overlapping_runs, columns)


def first_only(state: State) -> State:
    state[next(iter(state))].mul_(2)
    return state


@pytest.mark.parametrize("make", SOURCES)
def test_tensors_that_share_memory_arrive_as_torch_loads_them(
    tmp_path: Path, make: Callable[[], State]
) -> None:
    loads_as_torch(make(), make(), None)
    torch.save(make(), tmp_path / "model.pt")
    loads_as_torch(tmp_path / "model.pt", torch.load(tmp_path / "model.pt"), None)


def test_one_tensor_under_two_names_is_written_under_both() -> None:
    loads_as_torch(one_under_two_names(), one_under_two_names(), first_only)


def test_hooks_of_a_module_write_into_shared_memory_too() -> None:
    class Hooked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Parameter(torch.zeros(4, 3)), nn.Parameter(torch.zeros(4, 3))
            self.register_load_state_dict_pre_hook(lambda module, state, *_: state["a"].mul_(2))

    t = torch.arange(12.0).view(4, 3)
    result = zerostart.load({"a": t, "b": t}, Hooked, engine="fsdp2", zero_stage=0, progress=False)
    expected = Hooked()
    expected.load_state_dict({"a": t, "b": t})
    assert torch.equal(result.state_dict()["b"], expected.b)
    assert torch.equal(result.state_dict()["a"], expected.a)


def test_what_nothing_was_written_into_stays_as_it_is_stored() -> None:
    source = {name: t for name, t in overlapping_runs().items() if t.is_contiguous()}
    result = zerostart.load(source, module_for(source), engine="fsdp2", zero_stage=0, progress=False)
    assert zerostart.report(result).converted == ()


@pytest.mark.parametrize("make", [two_of_one_memory, overlapping_runs, columns])
def test_a_write_that_another_tensor_would_show_is_refused(make: Callable[[], State]) -> None:
    with pytest.raises(ConversionError, match="which in the checkpoint shares memory with"):
        loads_as_torch(make(), make(), first_only)
