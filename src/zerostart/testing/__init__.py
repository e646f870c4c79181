"""Conformance suites for your own engines, storages, formats and model libraries.

Subclass one of them in a test module for pytest.
"""

from zerostart.testing.engines import EngineConformance
from zerostart.testing.formats import FormatConformance
from zerostart.testing.libraries import ModelLibraryConformance
from zerostart.testing.ranks import on_ranks
from zerostart.testing.storages import StorageConformance

__all__ = [
    "EngineConformance",
    "FormatConformance",
    "ModelLibraryConformance",
    "StorageConformance",
    "on_ranks",
]
