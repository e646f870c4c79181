"""The documentation of each verb says what it raises, and has an example that runs."""

import doctest
import inspect
from collections.abc import Callable

import pytest

import zerostart

VERBS = [verb for name in zerostart.__all__ if inspect.isfunction(verb := getattr(zerostart, name))]


@pytest.mark.parametrize("verb", VERBS, ids=lambda verb: verb.__name__)
def test_the_example_of_a_verb_runs(verb: Callable[..., object]) -> None:
    assert "aises" in str(verb.__doc__)
    assert "    Example:\n" in str(verb.__doc__)
    (example,) = doctest.DocTestFinder(recurse=False).find(verb, globs={})
    assert example.examples
    told: list[str] = []
    failed, _ = doctest.DocTestRunner(verbose=False).run(example, out=told.append)
    assert failed == 0, "".join(told)
