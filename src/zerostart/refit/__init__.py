"""Weights of a live model into inference engines, without a gather."""
