"""Suites for pytest that an engine, storage, format or model library of your own has to pass.

An outsider subclasses one of them in a test module of their own, and says there what is to be tested. Needs
pytest, and nothing else that zerostart does not need itself.
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
