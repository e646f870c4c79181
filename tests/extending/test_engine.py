"""An engine that zerostart does not know, and its own two, pass what engines have to pass."""

import pytest

import tests.extending.rows  # noqa: F401  # registers itself
from zerostart.testing import EngineConformance


class TestRows(EngineConformance):
    engine = "rows"
    imports = ("extending.rows",)


@pytest.mark.slow
class TestDeepSpeed(EngineConformance):
    engine = "deepspeed"
    stages = (0, 1, 2, 3)


@pytest.mark.slow
class TestFSDP2(EngineConformance):
    engine = "fsdp2"
    stages = (0, 1, 2, 3)
