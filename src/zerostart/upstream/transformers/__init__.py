"""Private parts of transformers."""
