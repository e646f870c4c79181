"""Load every identifier of transformers' registry in shards, and compare with its own load."""

import pytest
import transformers

from tests.conformance import table
from tests.conformance.checkpoints import choose
from tests.conformance.exclusions import excluded
from tests.conformance.registry import Unavailable, identifiers
from tests.conformance.suite import NAMED, check


@pytest.mark.parametrize("identifier", NAMED)
def test_named_types_are_identical(identifier: str) -> None:
    result = check(identifier)
    assert not result.differences
    assert result.used or not result.entries


@pytest.mark.slow
@pytest.mark.parametrize("identifier", identifiers())
def test_identical_or_excluded_for_a_reason(identifier: str) -> None:
    if excluded(identifier) is None:
        result = check(identifier)
        assert not result.differences
        assert result.tensors
    else:
        with pytest.raises(Unavailable):
            choose(identifier)


@pytest.mark.slow
def test_the_documentation_has_this_table() -> None:
    written = table.PATH.read_text(encoding="utf-8")
    if f"of transformers {transformers.__version__}:" in written:
        assert written == table.text()
    else:
        pytest.skip("the table was made with another version of transformers")
