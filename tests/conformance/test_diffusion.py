"""Load original checkpoints of diffusers models in shards, and compare with its own load."""

import diffusers
import pytest

from tests.conformance import table
from tests.conformance.diffusion import FAMILIES
from tests.conformance.diffusion_suite import check_family
from tests.conformance.diffusion_table import EXCLUDED_CLASSES, converter_classes, section


@pytest.mark.parametrize(
    "key", [pytest.param(f.key, marks=[] if f.quick else pytest.mark.slow) for f in FAMILIES]
)
def test_original_layouts_are_identical(key: str) -> None:
    result = check_family(key)
    assert not result.differences
    assert result.tensors


def test_every_class_with_a_converter_is_covered_or_left_out_for_a_reason() -> None:
    covered = {one.kind for one in FAMILIES if not one.explicit}
    assert converter_classes() == covered | EXCLUDED_CLASSES.keys()
    assert not covered & EXCLUDED_CLASSES.keys()


@pytest.mark.slow
def test_the_documentation_has_this_part_of_the_table() -> None:
    written = table.PATH.read_text(encoding="utf-8")
    if f"Small models of diffusers {diffusers.__version__}," in written:
        assert section() in written
    else:
        pytest.skip("the table was made with another version of diffusers")
