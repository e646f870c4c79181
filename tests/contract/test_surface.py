"""Names, signatures and errors that users script against."""

import doctest
import inspect
import pickle
from collections.abc import Callable

import pytest

import zerostart
from zerostart import errors


def test_load_has_the_documented_parameters() -> None:
    parameters = inspect.signature(zerostart.load).parameters
    assert {name: p.default for name, p in parameters.items()} == {
        "source": inspect.Parameter.empty,
        "model": None,
        "engine": None,  # the launcher's, otherwise an installed one
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


BUILTIN_BASES = {
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


@pytest.mark.parametrize(("name", "builtin"), BUILTIN_BASES.items())
def test_errors_derive_from_one_class_and_a_builtin(name: str, builtin: type[Exception]) -> None:
    kind = getattr(errors, name)
    assert issubclass(kind, zerostart.ZerostartError)
    assert issubclass(kind, builtin)
    copied = pickle.loads(pickle.dumps(kind("what happened")))
    assert type(copied) is kind
    assert str(copied) == "what happened"


def test_coverage_error_carries_the_names() -> None:
    error = errors.CoverageError("text", ["a"], ["b"], {"c": ((1, 2), (2, 1))})
    copied = pickle.loads(pickle.dumps(error))
    assert (copied.missing, copied.unexpected, copied.mismatched) == (("a",), ("b",), {"c": ((1, 2), (2, 1))})
    assert str(copied) == "text"


VERBS = [verb for name in zerostart.__all__ if inspect.isfunction(verb := getattr(zerostart, name))]


@pytest.mark.parametrize("verb", VERBS, ids=lambda verb: verb.__name__)
def test_docstring_example_runs(verb: Callable[..., object]) -> None:
    (example,) = doctest.DocTestFinder(recurse=False).find(verb, globs={})
    assert example.examples
    output: list[str] = []
    failed, _ = doctest.DocTestRunner(verbose=False).run(example, out=output.append)
    assert failed == 0, "".join(output)
