"""Checkpoints on disk: which bytes of which file hold which tensor, and writing them."""
