"""Names, signatures and errors that users script against."""

import doctest
import inspect
import pickle
from collections.abc import Callable

import pytest

import zerostart
from zerostart import errors


def test_load_takes_what_the_contract_says() -> None:
    found = inspect.signature(zerostart.load).parameters
    assert {name: p.default for name, p in found.items()} == {
        "source": inspect.Parameter.empty,
        "model": None,
        "engine": None,  # the launcher's, else the one that is installed
        "zero_stage": 3,
        "engine_config": None,
        "expert_parallel": 1,
        "tensor_parallel": 1,
        "sequence_parallel": 1,
        "dtype": None,
        "converter": None,
        "memory_limit": None,
        "chunk_size": None,
        "strict": True,
        "progress": True,
        "fp32_masters": True,
        "exchange": None,
        "trust_remote_code": False,
    }


LEAVES = {
    "BuildError": ValueError,
    "CheckpointError": ValueError,
    "CheckpointNotFoundError": FileNotFoundError,
    "ConfigError": ValueError,
    "ConversionError": ValueError,
    "CoverageError": ValueError,
    "EngineError": RuntimeError,
    "InsufficientMemoryError": MemoryError,
    "PeerError": RuntimeError,
    "ReadError": OSError,
    "UnsupportedVersionError": ImportError,
    "VerifyError": ValueError,
    "WriteError": OSError,
}


@pytest.mark.parametrize(("name", "builtin"), LEAVES.items())
def test_errors_form_one_tree_of_builtins(name: str, builtin: type[Exception]) -> None:
    kind = getattr(errors, name)
    assert issubclass(kind, zerostart.ZerostartError)
    assert issubclass(kind, builtin)
    again = pickle.loads(pickle.dumps(kind("what happened")))
    assert type(again) is kind
    assert str(again) == "what happened"


def test_coverage_error_carries_the_names() -> None:
    made = errors.CoverageError("text", ["a"], ["b"], {"c": ((1, 2), (2, 1))})
    again = pickle.loads(pickle.dumps(made))
    assert (again.missing, again.unexpected, again.mismatched) == (("a",), ("b",), {"c": ((1, 2), (2, 1))})
    assert str(again) == "text"


VERBS = [verb for name in zerostart.__all__ if inspect.isfunction(verb := getattr(zerostart, name))]


@pytest.mark.parametrize("verb", VERBS, ids=lambda verb: verb.__name__)
def test_the_example_of_a_verb_runs(verb: Callable[..., object]) -> None:
    (example,) = doctest.DocTestFinder(recurse=False).find(verb, globs={})
    assert example.examples
    told: list[str] = []
    failed, _ = doctest.DocTestRunner(verbose=False).run(example, out=told.append)
    assert failed == 0, "".join(told)
