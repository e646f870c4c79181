"""Arguments of a load are described once; signatures, commands and configurations are held equal to that."""

import dataclasses
import inspect
import re
from collections.abc import Callable
from operator import attrgetter
from typing import Any

import pytest

import zerostart
from zerostart.cli import load as load_command
from zerostart.cli import plan as plan_command
from zerostart.loading.arguments import EnabledArguments, ForecastArguments, LoadArguments, options
from zerostart.training.config.load import parse_config
from zerostart.training.loop.runner import LOAD_KEYS

VERBS = [
    getattr(zerostart, name) for name in zerostart.__all__ if inspect.isfunction(getattr(zerostart, name))
]


def described(*kinds: type) -> dict[str, tuple[object, str, bool]]:
    """Default, annotation, and whether a plan takes it, of each argument."""
    found = {}
    for kind in kinds:
        for f in dataclasses.fields(kind):
            default = inspect.Parameter.empty if f.default is dataclasses.MISSING else f.default
            found[f.name] = (default, str(f.type), bool(f.metadata.get("planned", True)))
    return found


def signature(verb: Callable[..., object]) -> dict[str, tuple[object, str]]:
    return {name: (p.default, p.annotation) for name, p in inspect.signature(verb).parameters.items()}


def test_load_takes_what_is_described() -> None:
    assert signature(zerostart.load) == {name: d[:2] for name, d in described(LoadArguments).items()}


@pytest.mark.parametrize("verb", [zerostart.enabled, zerostart.enable])
def test_enabled_takes_what_is_described(verb: Callable[..., object]) -> None:
    assert signature(verb) == {name: d[:2] for name, d in described(EnabledArguments).items()}


def test_a_plan_takes_what_is_described() -> None:
    own = {"world_size": (8, "int"), "engine": ("deepspeed", "str | None"), "rank": (None, "int | None")}
    wanted = {name: d[:2] for name, d in described(LoadArguments, ForecastArguments).items() if d[2]}
    assert signature(zerostart.plan) == wanted | own


@pytest.mark.parametrize(
    ("verb", "kind"),
    [(zerostart.load, LoadArguments), (zerostart.plan, ForecastArguments)],
    ids=lambda made: made.__name__,
)
def test_help_tells_of_each_argument(verb: Callable[..., object], kind: type) -> None:
    """In the order of what describes them, indented as the rest of the docstring is."""
    told = inspect.cleandoc(verb.__doc__ or "").partition("\nArgs:\n")[2].partition("\n\n")[0]
    names = re.findall(r"^    (\w+): \S", told, re.MULTILINE)
    assert set(names) == {field.name for field in dataclasses.fields(kind)}
    assert names == [name for name in inspect.signature(verb).parameters if name in names]


@pytest.mark.parametrize("verb", VERBS, ids=lambda verb: verb.__name__)
def test_public_signatures_are_typed(verb: Callable[..., object]) -> None:
    found = inspect.signature(verb)
    for annotation in (found.return_annotation, *(p.annotation for p in found.parameters.values())):
        assert "Any" not in annotation
        assert annotation != inspect.Parameter.empty


@pytest.mark.parametrize(
    ("command", "kinds"),
    [(load_command.command, (LoadArguments,)), (plan_command.command, (LoadArguments, ForecastArguments))],
)
def test_commands_have_the_options_that_are_described(
    command: Callable[..., None], kinds: tuple[type, ...]
) -> None:
    """Each command's call hands all of them on, so that a wrong one would be refused there."""
    found = inspect.signature(command).parameters
    wanted = {name: default for name, default, _ in options(*kinds)}
    assert {name: found[name].default for name in wanted} == wanted
    planned = {name for name, d in described(LoadArguments, ForecastArguments).items() if d[2]}
    assert wanted.keys() <= planned, "zerostart load shows a plan beside what it has measured"


def test_a_training_configuration_has_the_defaults_that_are_described() -> None:
    values: dict[str, Any] = {
        "model": {"source": "here"},
        "data": {"source": "there"},
        "task": {"name": "causal-lm"},
        "train": {"steps": 1},
        "output": {"directory": "out"},
    }
    config, defaults = parse_config(values), described(LoadArguments)
    for name, key in LOAD_KEYS.items():
        wanted = {"source": "here"}.get(name, defaults[name][0])
        assert attrgetter(key)(config) == wanted
