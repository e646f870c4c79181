"""Private parts of SGLang."""
