"""Where the bytes of a checkpoint lie, and how they are had: local files, memory, and what is registered."""

from zerostart.checkpoint.storage.base import Reader, Residency, Rows, Storage, register_storage, storage_at

__all__ = ["Reader", "Residency", "Rows", "Storage", "register_storage", "storage_at"]
