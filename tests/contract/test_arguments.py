"""The verbs and the commands of a load take the settings of ``Request``."""

import inspect
from collections.abc import Callable
from operator import attrgetter
from typing import Any

import pytest

import zerostart
from tests.training.language import CAUSAL
from zerostart.cli import load as load_command
from zerostart.cli import plan as plan_command
from zerostart.cli import run as run_command
from zerostart.cli.options import ENABLE_OPTIONS, FORECAST_OPTIONS, LOAD_OPTIONS, Option
from zerostart.loading.request import Request
from zerostart.training.config.load import parse_config
from zerostart.training.loop.runner import LOAD_KEYS

VERBS = [
    getattr(zerostart, name) for name in zerostart.__all__ if inspect.isfunction(getattr(zerostart, name))
]


def defaults(verb: Callable[..., object]) -> dict[str, object]:
    return {name: p.default for name, p in inspect.signature(verb).parameters.items()}


def test_load_takes_the_settings_of_a_request() -> None:
    found = defaults(zerostart.load)
    own = {"reinitialise_mismatched", "engine_reason"}
    wanted = {name: default for name, default in defaults(Request).items() if name not in own}
    assert found == {**wanted, "source": inspect.Parameter.empty}
    assert defaults(zerostart.enable) == defaults(zerostart.enabled)


@pytest.mark.parametrize("verb", VERBS, ids=lambda verb: verb.__name__)
def test_public_signatures_are_typed(verb: Callable[..., object]) -> None:
    found = inspect.signature(verb)
    for annotation in (found.return_annotation, *(p.annotation for p in found.parameters.values())):
        assert "Any" not in annotation
        assert annotation != inspect.Parameter.empty


@pytest.mark.parametrize(
    ("command", "verb", "options"),
    [
        (load_command.command, zerostart.load, LOAD_OPTIONS),
        (plan_command.command, zerostart.plan, (*LOAD_OPTIONS, *FORECAST_OPTIONS)),
        (run_command.command, zerostart.enable, ENABLE_OPTIONS),
    ],
)
def test_options_of_commands_are_arguments_of_the_verbs(
    command: Callable[..., None], verb: Callable[..., object], options: tuple[Option, ...]
) -> None:
    found, wanted = defaults(command), defaults(verb)
    assert {o.name: found[o.name] for o in options} == {o.name: o.default for o in options}
    # The engine of a plan is DeepSpeed where nobody names one, and the installed one on the command line.
    assert all(o.default == wanted[o.name] for o in options if o.name != "engine")


def test_a_training_configuration_has_the_defaults_of_a_load() -> None:
    values: dict[str, Any] = {
        "model": {"source": "here"},
        "task": {"name": CAUSAL, "source": "there"},
        "train": {"steps": 1},
        "output": {"directory": "out"},
    }
    config, wanted = parse_config(values), defaults(zerostart.load) | {"source": "here"}
    for name, key in LOAD_KEYS.items():
        assert attrgetter(key)(config) == wanted[name]
