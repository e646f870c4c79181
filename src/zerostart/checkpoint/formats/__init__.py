"""Readers of the formats that checkpoints have, which check every field."""
