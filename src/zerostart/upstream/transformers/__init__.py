"""What is touched of transformers."""
