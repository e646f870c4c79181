"""Save live models to checkpoint files."""
