"""Names, signatures and errors that users script against."""

import doctest
import inspect
import pickle
from collections.abc import Callable

import pytest

import zerostart
from zerostart import errors


def parameters(verb: object) -> dict[str, object]:
    found = inspect.signature(verb).parameters  # type: ignore[arg-type]
    return {name: p.default for name, p in found.items()}


def test_load_takes_what_the_contract_says() -> None:
    assert parameters(zerostart.load) == {
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


def test_plan_takes_what_the_contract_says() -> None:
    found = parameters(zerostart.plan)
    assert list(found) == [
        "source",
        "world_size",
        "engine",
        "zero_stage",
        "expert_parallel",
        "tensor_parallel",
        "dtype",
        "converter",
        "model",
        "rank",  # This and what follows is beyond the contract.
        "engine_config",
        "sequence_parallel",
        "exchange",
        "memory_limit",
        "chunk_size",
        "device_memory",
        "host_memory",
        "storage_rate",
        "interconnect_rate",
        "optimizer",
        "trust_remote_code",
    ]
    assert found["engine"] == "deepspeed"
    assert found["zero_stage"] == 3


def test_other_verbs_take_what_the_contract_says() -> None:
    assert list(parameters(zerostart.report)) == ["model"]
    assert parameters(zerostart.full_tensors) == {"model": inspect.Parameter.empty, "rank": 0}
    required = inspect.Parameter.empty
    state = {"path": required, "model": required, "optimizer": None}
    assert parameters(zerostart.load_state) == state
    saved = state | {"extra": None, "wait": True}
    assert parameters(zerostart.save_state) == saved
    assert list(parameters(zerostart.gradient_checkpoint)) == ["function", "args", "offload", "kwargs"]


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
