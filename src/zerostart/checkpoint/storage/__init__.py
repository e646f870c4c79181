"""Where the bytes of a checkpoint lie, and how they are had: local files, memory, and what is registered."""

from zerostart.checkpoint.storage.base import Reader, Residency, Rows, Storage, register_storage, storage_at
from zerostart.checkpoint.storage.local import LocalFiles

__all__ = ["LocalFiles", "Reader", "Residency", "Rows", "Storage", "register_storage", "storage_at"]
