"""Refit: the weights of a live sharded model into inference engines, or into another sharded model."""
