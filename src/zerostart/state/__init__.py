"""Save, resume, compare, convert and edit models."""
