"""Scripts of transformers: ``from_pretrained``, ``from_config``, the Trainer."""
