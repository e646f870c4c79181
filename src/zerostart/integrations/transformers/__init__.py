"""Serve ``from_pretrained``, ``from_config`` and the Trainer of transformers."""
