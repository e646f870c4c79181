"""Private parts of torch."""
