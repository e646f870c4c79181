"""The formats in which checkpoints lie, and their readers, which check every field."""

from zerostart.checkpoint.formats.base import Format, format_of, formats, register_format

__all__ = ["Format", "format_of", "formats", "register_format"]
