"""Samples that a run draws with the model in training."""
