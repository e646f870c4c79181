"""Every type of transformers' registry and family of diffusers, loaded in shards and saved as it was."""

import pytest

from tests.conformance import diffusion_suite
from tests.conformance.diffusion import FAMILIES
from tests.conformance.exclusions import excluded
from tests.conformance.registry import identifiers
from tests.conformance.saving import check_saving
from tests.conformance.suite import NAMED


@pytest.mark.parametrize("identifier", NAMED)
def test_named_types_go_back_as_they_came(identifier: str) -> None:
    """Names, types, shapes and bytes of all tensors, from two ranks."""
    assert check_saving(identifier, (2,)) == []


@pytest.mark.slow
@pytest.mark.parametrize("identifier", [name for name in identifiers() if excluded(name) is None])
def test_all_types_go_back_as_they_came(identifier: str) -> None:
    """The same for all that load, from one to four ranks."""
    assert check_saving(identifier) == []


@pytest.mark.parametrize(
    "key", [pytest.param(f.key, marks=[] if f.quick else pytest.mark.slow) for f in FAMILIES]
)
def test_original_layouts_of_diffusers_go_back(key: str) -> None:
    """From a single file in the release's own layout back to that, and from diffusers' to diffusers'."""
    assert diffusion_suite.check_saving(key, (1, 3)) == []
