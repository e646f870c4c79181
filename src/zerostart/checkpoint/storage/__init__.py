"""Storages of checkpoints: local files, memory, object stores and web servers."""

from zerostart.checkpoint.paths import scheme_of
from zerostart.checkpoint.storage.base import (
    Reader,
    RequestCost,
    Residency,
    Rows,
    Storage,
    register_storage,
    storage_at,
)
from zerostart.checkpoint.storage.local import LocalFiles

__all__ = [
    "LocalFiles",
    "Reader",
    "RequestCost",
    "Residency",
    "Rows",
    "Storage",
    "register_storage",
    "scheme_of",
    "storage_at",
]
