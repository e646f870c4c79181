"""One-line entries into existing scripts of other libraries."""
