"""Tensors of a live model: names, shards, masters and optimizer state, on any engine."""
