"""Save every type and family from shards, with the original layout."""

import pytest

from tests.conformance import diffusion_suite
from tests.conformance.diffusion import FAMILIES
from tests.conformance.exclusions import excluded
from tests.conformance.registry import identifiers
from tests.conformance.saving import check_saving
from tests.conformance.suite import NAMED


@pytest.mark.parametrize("identifier", NAMED)
def test_named_types_go_back_as_they_came(identifier: str) -> None:
    """Compare names, types, shapes and bytes of all tensors, from two ranks."""
    assert check_saving(identifier, (2,)) == []


@pytest.mark.slow
@pytest.mark.parametrize("identifier", [name for name in identifiers() if excluded(name) is None])
def test_all_types_go_back_as_they_came(identifier: str) -> None:
    """Compare all types that load, from one to four ranks."""
    assert check_saving(identifier) == []


@pytest.mark.parametrize(
    "key", [pytest.param(f.key, marks=[] if f.quick else pytest.mark.slow) for f in FAMILIES]
)
def test_original_layouts_of_diffusers_go_back(key: str) -> None:
    """Save from a single original file, and from diffusers' layout, back to the same layout."""
    assert diffusion_suite.check_saving(key, (1, 3)) == []
