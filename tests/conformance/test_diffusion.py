"""Original-layout checkpoints of diffusers models, loaded in shards and compared with its own load."""

from __future__ import annotations

import pytest
from tests.conformance.diffusion import FAMILIES
from tests.conformance.diffusion_suite import check_family


@pytest.mark.parametrize(
    "key", [pytest.param(f.key, marks=[] if f.quick else pytest.mark.slow) for f in FAMILIES]
)
def test_original_layouts_are_identical(key: str) -> None:
    result = check_family(key)
    assert not result.differences
    assert result.tensors
