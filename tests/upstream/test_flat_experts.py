"""Check the parameter groups of experts that ZeRO stage 2 needs."""

import warnings
from typing import Any

import torch

from zerostart.upstream.deepspeed.zero12_groups import GroupKey, split_groups, split_optimizer


def kind_of(parameter: Any) -> GroupKey:
    return GroupKey(getattr(parameter, "group_name", None), getattr(parameter, "home", None))


def mixed_optimizer(**options: Any) -> tuple[Any, Any, torch.optim.Optimizer]:
    dense, expert = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(3))
    expert.group_name = "ep_size_2"  # type: ignore[attr-defined]
    return dense, expert, torch.optim.AdamW([("a", dense), ("b", expert)], lr=0.5, **options)


def settings(twin: Any) -> list[float]:
    return [group["lr"] for group in twin.param_groups]


def test_a_mixed_group_is_split_in_the_twin() -> None:
    dense, expert, client = mixed_optimizer(weight_decay=0.1)
    (group,) = client.param_groups
    twin: Any = split_optimizer(client, kind_of)
    first, second = twin.param_groups
    assert first is group
    assert client.param_groups == [group]
    assert (first["params"], first["param_names"], "moe" in first) == ([dense], ["a"], False)
    assert (second["params"], second["param_names"]) == ([expert], ["b"])
    values = (second["moe"], second["name"], second["lr"], second["weight_decay"])
    assert values == (True, "ep_size_2", 0.5, 0.1)
    assert twin.state is client.state
    assert type(twin) is type(client)


def test_groups_of_one_kind_are_unchanged() -> None:
    dense, expert, _ = mixed_optimizer()
    client = torch.optim.SGD([{"params": [dense]}, {"params": [expert], "lr": 0.2}], lr=0.1)
    groups = list(client.param_groups)
    assert split_optimizer(client, kind_of) is client
    assert all(a is b for a, b in zip(client.param_groups, groups, strict=True))
    assert [group.get("name") for group in groups] == [None, "ep_size_2"]
    assert split_optimizer(torch.optim.SGD([dense], lr=0.1), kind_of).param_groups[0].get("moe") is None


def test_groups_of_several_loads_are_split_by_load() -> None:
    parameters: list[Any] = [torch.nn.Parameter(torch.full((2,), float(n))) for n in range(5)]
    for parameter, home in zip(parameters, (7, None, 7, 8, 8), strict=True):
        parameter.home = home
    parameters[3].group_name = "ep_size_2"
    client = torch.optim.SGD(parameters, lr=0.1)
    twin: Any = split_optimizer(client, kind_of)
    members = [[int(p[0]) for p in group["params"]] for group in twin.param_groups]
    assert members == [[0, 2], [1], [4], [3]]
    assert [group.get("moe") for group in twin.param_groups] == [None, None, None, True]
    (group,) = torch.optim.SGD(parameters, lr=0.1).param_groups
    groups = split_groups([group], kind_of)
    assert [[int(p[0]) for p in group["params"]] for group in groups] == members
    client.param_groups[0]["lr"] = 0.5
    assert settings(twin) == [0.5] * 4


def test_frozen_parameters_form_no_group() -> None:
    """DeepSpeed reads the dtype of each group's first trained parameter."""
    parameters: list[Any] = [torch.nn.Parameter(torch.full((2,), float(n))) for n in range(6)]
    for parameter, home in zip(parameters, (7, 7, 8, 8, None, 7), strict=True):
        parameter.home = home
    parameters[1].group_name = "ep_size_2"
    for parameter in (*parameters[:2], parameters[3], parameters[5]):
        parameter.requires_grad_(False)
    (group,) = torch.optim.SGD(parameters, lr=0.1).param_groups
    groups = split_groups([group], kind_of)
    assert [[int(p[0]) for p in group["params"]] for group in groups] == [[0, 1, 2, 3, 5], [4]]
    assert not any(group.get("moe") for group in groups)
    frozen = torch.optim.SGD(parameters[:2], lr=0.1)
    assert [len(group["params"]) for group in split_optimizer(frozen, kind_of).param_groups] == [1, 1]


def test_schedulers_made_before_and_after_reach_both_halves() -> None:
    dense, expert, client = mixed_optimizer()
    early = torch.optim.lr_scheduler.LambdaLR(client, lambda step: 1 / (1 + step))
    twin: Any = split_optimizer(client, kind_of)
    late = torch.optim.lr_scheduler.LambdaLR(client, lambda step: 1 / (1 + step))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for number in range(3):
            assert settings(twin) == [0.5 / (1 + number)] * 2
            for parameter in (dense, expert):
                parameter.grad = torch.ones_like(parameter)
            twin.step()
            early.step()
            late.step()
    assert torch.equal(dense, expert[:2])
    engine_scheduler = torch.optim.lr_scheduler.ConstantLR(
        twin, 0.5
    )  # created by the engine, for both halves
    assert [group["lr"] for group in twin.param_groups] == engine_scheduler.get_last_lr()


def test_each_half_counts_its_own_steps() -> None:
    class Counting(torch.optim.SGD):
        """Optimizer that stores its number of steps in its groups, like DeepSpeed's FusedAdam."""

        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                group["step"] = group.get("step", 0) + 1
                group["k"] += 1

    dense, expert, _ = mixed_optimizer()
    client = Counting([{"params": [dense, expert], "k": 0}], lr=0.1)
    twin: Any = split_optimizer(client, kind_of)
    groups = list(twin.param_groups)
    for _ in range(3):  # one group at a time, like DeepSpeed
        for group in groups:
            twin.param_groups = [group]
            twin.step()
    twin.param_groups = groups
    assert [(group["step"], group["k"]) for group in groups] == [(3, 3), (3, 3)]


def test_loaded_groups_follow_again() -> None:
    *_, client = mixed_optimizer()
    scheduler = torch.optim.lr_scheduler.LambdaLR(client, lambda step: 1 / (1 + step))
    twin: Any = split_optimizer(client, kind_of)
    twin.load_state_dict(twin.state_dict())
    twin.step()
    scheduler.step()
    assert settings(twin) == [0.25, 0.25]
    assert [group["moe"] for group in twin.param_groups if "moe" in group] == [True]
