"""What is touched of SGLang."""
