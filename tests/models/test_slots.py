"""Every place where Python can keep a tensor is found, and can be given another one."""

import dataclasses
import weakref
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from zerostart.errors import BuildError
from zerostart.models import Aliases
from zerostart.models.aliases import tensor_slots

Pair = namedtuple("Pair", ("left", "right"))


@dataclasses.dataclass(frozen=True)
class Frozen:
    held: Any


class Registry(dict[str, Any]):
    """A dictionary with attributes."""


def registry(held: Any) -> Registry:
    made = Registry()
    made.held = held  # type: ignore[attr-defined]  # what the test is about
    return made


def unregistered(held: Any) -> list[nn.Module]:
    layer = nn.Linear(2, 3, device="meta")
    layer.weight = held
    return [layer]


#: What is made of a parameter, and how to find the parameter in it.
PLACES: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "attribute": (lambda p: SimpleNamespace(held=p), lambda v: v.held),
    "list": (lambda p: [0, p], lambda v: v[1]),
    "tuple": (lambda p: (p, 1), lambda v: v[0]),
    "named tuple": (lambda p: Pair(1, p), lambda v: v.right),
    "dictionary": (lambda p: OrderedDict(a=p), lambda v: v["a"]),
    "frozen dataclass": (Frozen, lambda v: v.held),
    "dictionary's attribute": (registry, lambda v: v.held),
    "weak reference": (weakref.ref, lambda v: v()),
    "unregistered module": (unregistered, lambda v: v[0].weight),
    "nested": (lambda p: {"a": [(1, Frozen([{"b": (p,)}]))]}, lambda v: v["a"][0][1].held[0]["b"][0]),
}


def holder(keep: Callable[[Any], Any]) -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 3, device="meta"))
    model.kept = keep(model[0].weight)
    return model


@pytest.mark.parametrize("place", PLACES)
def test_a_place_follows_its_parameter(place: str) -> None:
    keep, look = PLACES[place]
    model = holder(keep)
    aliases = Aliases.of(model)
    assert [alias.name for alias in aliases.entries] == ["0.weight"]
    new = nn.Parameter(torch.ones(3, 2))
    model[0].weight = new
    aliases.follow(model)
    assert look(model.kept) is new
    kinds = {type(slot.get()) for slot in tensor_slots(model)}
    assert nn.Parameter in kinds
    assert not any(slot.get().is_meta for slot in tensor_slots(model) if slot.get().dim() == 2)


def test_a_cycle_ends() -> None:
    model = holder(lambda p: [p])
    model.kept.append(model.kept)
    model.also = model.kept
    assert [slot.path for slot in tensor_slots(model)].count("kept[0]") + sum(
        slot.path == "also[0]" for slot in tensor_slots(model)
    ) == 1


def test_lists_of_recurrent_layers() -> None:
    """torch's own: a list of weights, and one of weak references to them."""
    model = nn.LSTM(2, 3, num_layers=2, device="meta")
    aliases = Aliases.of(model)
    for name in list(model._parameters):
        model._parameters[name] = nn.Parameter(torch.ones(model._parameters[name].shape))
    aliases.follow(model)
    for name, listed, weak in zip(
        model._flat_weights_names, model._flat_weights, model._flat_weight_refs, strict=True
    ):
        assert listed is getattr(model, name)
        assert weak() is getattr(model, name)


@pytest.mark.parametrize(
    "keep",
    [lambda p: p.data, lambda p: [p.detach()[:1]], lambda p: (p.detach().t(),)],
    ids=["data", "part", "t"],
)
def test_a_view_of_a_parameter_is_refused(keep: Callable[[Any], Any]) -> None:
    with pytest.raises(BuildError, match=r"kept.* is a view of the parameter 0\.weight"):
        Aliases.of(holder(keep))


def test_parameters_in_one_memory_are_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 3, device="meta"), nn.Linear(2, 3, device="meta"))
    model[1].weight = nn.Parameter(model[0].weight.data)
    with pytest.raises(BuildError, match=r"1\.weight and the parameter 0\.weight share memory"):
        Aliases.of(model)


def test_what_spectral_norm_computes_anew_is_no_obstacle() -> None:
    model = nn.utils.spectral_norm(nn.Linear(2, 3, device="meta"))
    aliases = Aliases.of(model)
    model._parameters["weight_orig"] = nn.Parameter(torch.ones(3, 2))
    aliases.follow(model)
    assert torch.equal(model.weight, torch.ones(3, 2))
