"""Where the bytes of a checkpoint lie, and how they are had: local files, memory, and what is registered."""

from zerostart.checkpoint.storage.base import Reader, Residency, Storage
from zerostart.checkpoint.storage.registry import register_storage, storage_at
from zerostart.checkpoint.storage.rows import Rows

__all__ = ["Reader", "Residency", "Rows", "Storage", "register_storage", "storage_at"]
