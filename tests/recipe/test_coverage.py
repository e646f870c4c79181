"""Names that a model ignores by patterns of its own."""

import pytest

from zerostart.errors import BuildError
from zerostart.recipe.recipe import Coverage


def test_patterns_stand_for_themselves() -> None:
    """Flags within one, and references to its own groups, mean what they mean alone."""
    coverage = Coverage(("Head.BIAS", "a.b.a", "a.b.c"), ("old.bias",))
    left = coverage.ignoring([r"x", r"(?i)bias$", r"^(\w)\.\w\.\1$"], [r"(?i)OLD"])
    assert left.missing == ("a.b.c",)
    assert left.unexpected == ()
    assert left.ignored == ("Head.BIAS", "a.b.a", "old.bias")
    assert coverage.ignoring([], []) == coverage


def test_what_is_no_pattern_is_named() -> None:
    with pytest.raises(BuildError, match=r"'\(open', which is not a regular expression"):
        Coverage(("a",), ()).ignoring(["(open"], [])
