"""What a verb is given is of the kind that its signature names, or refused by name, on every rank alike."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch

import zerostart
from ranks import rank_outcomes
from zerostart.errors import ConfigError
from zerostart.loading.argument_kinds import check_arguments

VERBS = {name: v for name in zerostart.__all__ if inspect.isfunction(v := getattr(zerostart, name))}
#: Kinds with names of their own, which the verbs check themselves; and those that say nothing.
OWN = {"Source", "ModelLike", "Converter", "Comparable", "Extra", "object", "torch.optim.Optimizer | None"}
#: Called in every forward, in compiled ones too, so that nothing is asked there.
UNASKED = {"gradient_checkpoint"}
ARGUMENTS = [
    (verb, parameter.name)
    for verb, made in VERBS.items()
    if verb not in UNASKED
    for parameter in inspect.signature(made).parameters.values()
    if parameter.annotation not in OWN and parameter.kind is not parameter.VAR_POSITIONAL
]


@pytest.mark.parametrize(("verb", "name"), ARGUMENTS)
def test_another_kind_is_refused_by_name(verb: str, name: str) -> None:
    required = [
        p.name
        for p in inspect.signature(VERBS[verb]).parameters.values()
        if p.default is p.empty and p.kind is not p.VAR_POSITIONAL
    ]
    # Those before it are right, as far as a signature tells.
    right: dict[str, object] = {"model": torch.nn.Linear(1, 1), "path": "here", "source": "here", "name": ""}
    given = {need: right.get(need) for need in required} | {name: object()}
    with pytest.raises(
        ConfigError, match=rf"^zerostart\.{verb}: {name}=<object obj.* is not accepted; give "
    ):
        VERBS[verb](**given)


@pytest.mark.parametrize(
    ("verb", "given", "told"),
    [
        ("load", {"tensor_parallel": 2.0}, "tensor_parallel=2.0 is not accepted; give a whole number"),
        ("load", {"zero_stage": True}, "zero_stage=True is not accepted; give a whole number"),
        ("load", {"strict": "no"}, "strict='no' is not accepted; give True or False"),
        ("load", {"dtype": "bfloat16"}, "dtype='bfloat16' is not accepted; give a torch.dtype or None"),
        ("plan", {"world_size": "8"}, "world_size='8' is not accepted; give a whole number"),
        ("save_state", {"wait": 1}, "wait=1 is not accepted; give True or False"),
        ("verify", {"path": 3}, "path=3 is not accepted; give a string or a path"),
        ("load_pipeline", {"without": "vae"}, "without='vae' is not accepted; give a list of strings"),
    ],
)
def test_the_refusal_says_what_is_accepted(verb: str, given: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError) as refused:
        check_arguments(VERBS[verb], given)
    assert str(refused.value) == f"zerostart.{verb}: {told}"


@pytest.mark.parametrize(
    ("verb", "given"),
    [
        (zerostart.load, {"exchange": None, "engine_config": {}, "dtype": torch.bfloat16, "source": 3}),
        (zerostart.plan, {"device_memory": 1 << 30, "storage_rate": 1, "rank": None}),
        (zerostart.save, {"max_shard_size": "5GB", "model": torch.nn.Linear(1, 1)}),
        (zerostart.load_pipeline, {"trainable": ("unet",), "without": {"vae"}, "placement": None}),
    ],
)
def test_what_a_signature_names_is_taken(verb: Callable[..., object], given: dict[str, Any]) -> None:
    check_arguments(verb, given)


def load_with_rank(mistaken: int) -> None:
    import torch.distributed as dist

    stage: Any = "3" if dist.get_rank() == mistaken else 3
    make = lambda: torch.nn.Linear(1, 1, bias=False)  # noqa: E731
    zerostart.load({"weight": torch.ones(1, 1)}, make, engine="fsdp2", zero_stage=stage, progress=False)


def test_a_mistake_of_one_rank_is_told_on_all() -> None:
    first, second = rank_outcomes(load_with_rank, 2, 1)
    assert first.error == second.error == "zerostart.errors.ConfigError"
    assert "zerostart.load: zero_stage='3' is not accepted" in first.message == second.message
